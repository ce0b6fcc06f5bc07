"""The fused log-probs over tensor-parallel ranks, alone and as the output of real Megatron models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_grpo.parallel.fused_logprobs import (
    TokenTargets,
    fused_linear_logprobs,
    masked_linear_logprobs,
    output_layer_logprobs,
)
from tests.rank_pool import RankPool
from tests.tiny_model import write_tiny_model

TOKENS, HIDDEN = 10, 16


def _shard_errors(
    rank: int, world: int, vocab: int, padded: int, temperature: float, chunk: int
) -> dict[str, float]:
    """Largest differences to one process that holds the whole vocabulary."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
    whole = torch.randn(padded, HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, vocab, (TOKENS,), generator=generator)
    upstream = torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    full = (hidden @ whole.t()[:, :vocab] / temperature).log_softmax(-1)
    expected = full.gather(1, labels.unsqueeze(1)).squeeze(1)
    expected_hidden, expected_weight = torch.autograd.grad((expected * upstream).sum(), (hidden, whole))

    weight = whole.detach().chunk(world)[rank].clone().requires_grad_()
    options: dict[str, Any] = {"with_entropy": True, "vocab_chunk": chunk}
    args = (hidden, weight, labels, dist.group.WORLD, temperature, vocab)
    logprobs, entropy = fused_linear_logprobs(*args, **options)
    grad_hidden, grad_weight = torch.autograd.grad((logprobs * upstream).sum(), (hidden, weight))
    logprobs_only, _ = fused_linear_logprobs(*args, reduce_grad_hidden=False, vocab_chunk=chunk)
    (part,) = torch.autograd.grad((logprobs_only * upstream).sum(), hidden)
    dist.all_reduce(part)
    assert entropy is not None
    pairs = {
        "logprobs": (logprobs, expected),
        "entropy": (entropy, -(full.exp() * full).sum(-1)),
        "grad_hidden": (grad_hidden, expected_hidden),
        "grad_weight": (grad_weight, expected_weight.chunk(world)[rank]),
        "summed grad_hidden": (part, expected_hidden),
    }
    return {name: (got - want).abs().max().item() for name, (got, want) in pairs.items()}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("world", "vocab", "padded", "temperature", "chunk"),
    # 61 padded to 64; 5 of 16: two of four shards hold nothing but padding
    [(2, 61, 64, 1.0, 32), (2, 61, 64, 0.7, 7), (4, 61, 64, 0.7, 5), (4, 5, 16, 1.0, 3)],
)
def test_tensor_parallel_equals_one_process(
    ranks: RankPool, world: int, vocab: int, padded: int, temperature: float, chunk: int
) -> None:
    for errors in ranks.run(world, _shard_errors, vocab, padded, temperature, chunk):
        assert max(errors.values()) < 1e-12, errors


def _nothing_selected(rank: int, world: int) -> list[float]:
    hidden = torch.randn(4, HIDDEN, requires_grad=True)
    weight = torch.randn(8, HIDDEN, requires_grad=True)
    logprobs, _ = masked_linear_logprobs(
        hidden, weight, torch.zeros(4, dtype=torch.int64), torch.zeros(4), dist.group.WORLD, 1.0, 16
    )
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [x.abs().max().item() for x in (logprobs, hidden.grad, weight.grad)]


@pytest.mark.timeout(180)
def test_no_selected_position_neither_hangs_nor_moves_a_weight(ranks: RankPool) -> None:
    assert ranks.run(2, _nothing_selected, timeout=60) == [[0.0] * 3] * 2


VOCAB, SEQUENCE, BATCH, TEMPERATURE = 301, 16, 2, 0.7
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one-rank": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
}


def _model_gradients(
    rank: int, world: int, path: Path, parallel: dict[str, Any], precision: str
) -> tuple[float, float, int]:
    """Fused against unfused through Megatron's schedule, DDP and model: largest difference of the log-probs, and of
    any parameter's ``main_grad`` relative to its largest entry; and the number of parameters compared."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_grpo.config.policy import PolicyConfig
    from megatron_grpo.models.checkpoint import load_hf_weights
    from megatron_grpo.models.hf_directory import HFDirectory
    from megatron_grpo.parallel.layout import initialize_layout
    from megatron_grpo.parallel.logprobs import vocab_parallel_logprobs
    from megatron_grpo.policy.model_builder import build_model_chunks
    from megatron_grpo.policy.optimizer import wrap_ddp
    from megatron_grpo.policy.packing import local_tokens

    config = PolicyConfig.model_validate(
        {
            "model_path": path, "max_total_sequence_length": 64, "train_global_batch_size": BATCH,
            "precision": precision, "parallel": parallel, "make_vocab_size_divisible_by": 8,
            "optimizer": {"lr": 1e-3},
        }
    )  # fmt: skip
    sizes = {k: v for k, v in parallel.items() if k != "sequence_parallel"}
    layout = initialize_layout(**sizes)
    directory = HFDirectory(path)
    chunks = build_model_chunks(config, directory, layout)
    load_hf_weights(chunks, directory, layout)
    (model,) = wrap_ddp(chunks, chunks[0].config, config)

    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, VOCAB, (2, BATCH, SEQUENCE), generator=generator)
    mask = torch.rand(BATCH, SEQUENCE, generator=generator) < 0.5
    upstream = torch.randn(BATCH, SEQUENCE, generator=generator)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    tokens, labels, mask, upstream, positions = (
        x[:, local_tokens([SEQUENCE], layout.cp_rank, layout.cp)[1]]
        for x in (tokens, labels, mask, upstream, positions)
    )
    collected: list[torch.Tensor] = []

    def run(fused: bool) -> list[torch.Tensor]:
        options = (
            {
                "output_processor": output_layer_logprobs,
                "output_processor_context": TokenTargets(labels, mask, TEMPERATURE, VOCAB),
            }
            if fused
            else {}
        )

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            logprobs = output
            if not fused:
                logprobs = vocab_parallel_logprobs(output, labels, layout.tp_group, TEMPERATURE, VOCAB) * mask
            collected.append(logprobs.detach())
            return (logprobs * upstream).sum(), mask.sum().int(), {}

        model.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=lambda _, m: (m(tokens, positions, None, **options), loss),
            data_iterator=iter([None]), model=model, num_microbatches=1, seq_length=SEQUENCE,
            micro_batch_size=BATCH, forward_only=False,
        )  # fmt: skip
        return [p.main_grad.clone() for p in model.parameters()]

    unfused, fused = run(fused=False), run(fused=True)
    assert all(g.abs().max() > 0 for g in unfused)
    difference = max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(fused, unfused, strict=True)
    )
    logprobs = (collected[1] - collected[0]).abs().max().item() if collected else 0.0
    return logprobs, difference, len(fused)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_megatron_model_has_the_gradients_of_the_unfused_path(
    name: str, tied: bool, ranks: RankPool, tmp_path: Path
) -> None:
    path = write_tiny_model(tmp_path / "model", tied=tied, vocab_size=VOCAB)
    world, parallel = LAYOUTS[name]
    for logprobs, gradients, parameters in ranks.run(world, _model_gradients, path, parallel, "fp32"):
        assert parameters >= 9
        assert logprobs < 2e-6
        assert gradients < 5e-6


@pytest.mark.timeout(240)
def test_bf16_megatron_model_has_the_log_probs_of_the_unfused_path(ranks: RankPool, tmp_path: Path) -> None:
    """Logits are rounded alike; gradients differ by the roundings of bf16 sums."""
    path = write_tiny_model(tmp_path / "model", tied=True, vocab_size=VOCAB)
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    for logprobs, gradients, _ in ranks.run(2, _model_gradients, path, layout, "bf16"):
        assert logprobs < 2e-5
        assert gradients < 2e-2
