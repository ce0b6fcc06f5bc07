"""Hugging Face parity of the Megatron model in every layout: logits, export, and the directory written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.rank_pool import RankPool

VOCAB, SEQUENCE, BATCH = 61, 16, 2
LAYOUTS: dict[str, tuple[int, bool, dict[str, Any]]] = {  # world size, tied embeddings, policy.parallel
    "one-rank-tied": (1, True, {}),
    "one-rank": (1, False, {}),
    "tp2": (2, True, {"tensor_model_parallel_size": 2}),
    "tp2-sp": (2, False, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, True, {"pipeline_model_parallel_size": 2}),
    "pp2-vpp2": (2, False, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "cp2": (2, False, {"context_parallel_size": 2}),
    "tp2-pp2": (4, True, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "tp2-dp2": (4, False, {"tensor_model_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[Path, torch.Tensor]]:
    """By tied embeddings: a random Qwen3 directory and transformers' logits for ``tokens()``."""
    folder = tmp_path_factory.mktemp("qwen3")
    return {
        tied: write_random(
            Qwen3ForCausalLM, Qwen3Config, folder / str(tied), int(tied), tie_word_embeddings=tied
        )
        for tied in (True, False)
    }


def write_random(
    model_class: Any, config_class: Any, path: Path, seed: int, **config: Any
) -> tuple[Path, torch.Tensor]:
    """Writes a random four-layer model; its directory, and transformers' logits for ``tokens()``."""
    torch.manual_seed(seed)
    model = model_class(
        config_class(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, head_dim=32,
            num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, **config,
        )
    ).eval()  # fmt: skip
    for name, param in model.named_parameters():
        if "norm" in name:  # norms of one would hide a wrong mapping
            torch.nn.init.uniform_(param, 0.5, 1.5)
    model.save_pretrained(path)
    with torch.no_grad():
        return path, model(tokens()).logits


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(3))


def zigzag(length: int, cp: int, rank: int) -> torch.Tensor:
    chunks = torch.arange(length).chunk(2 * cp)
    return torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]]) if cp > 1 else torch.arange(length)


def _policy(path: str, parallel: dict[str, Any], precision: str = "fp32") -> Any:
    from megatron_grpo.config.policy import PolicyConfig

    return PolicyConfig.model_validate(
        {
            "model_path": path, "max_total_sequence_length": 64, "train_global_batch_size": 4,
            "precision": precision, "parallel": parallel, "make_vocab_size_divisible_by": 8,
            "optimizer": {"lr": 1e-3},
        }
    )  # fmt: skip


def _forward(chunks: Any, layout: Any, packed: bool) -> torch.Tensor | None:
    """Logits ``[b, s, vocab]`` on the last pipeline stage, through Megatron's own schedule."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func

    indices = zigzag(SEQUENCE, layout.cp, layout.cp_rank)
    ids, params, batch, length = tokens()[:, indices], None, BATCH, SEQUENCE
    positions = indices.expand(BATCH, -1)
    if packed:  # both sequences in one row
        ids, positions, batch, length = ids.reshape(1, -1), positions.reshape(1, -1), 1, BATCH * SEQUENCE
        cu = torch.tensor([0, SEQUENCE, 2 * SEQUENCE], dtype=torch.int32)
        params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=SEQUENCE, max_seqlen_kv=SEQUENCE
        )

    def step(_: Any, model: Any) -> Any:
        out = model(ids, positions, None, packed_seq_params=params)
        return out, lambda logits, non_loss_data: logits

    outputs = get_forward_backward_func()(
        forward_step_func=step, data_iterator=[None] * len(chunks) if len(chunks) > 1 else None,
        model=chunks if len(chunks) > 1 else chunks[0], num_microbatches=layout.pp, seq_length=length,
        micro_batch_size=batch, forward_only=True, collect_non_loss_data=True,
    )  # fmt: skip
    if not layout.is_last_stage:
        return None
    local = outputs[-1].reshape(BATCH, SEQUENCE // layout.cp, -1)
    shards = [torch.empty_like(local) for _ in range(layout.tp)]
    dist.all_gather(shards, local.contiguous(), group=layout.tp_group)
    local = torch.cat(shards, -1)
    parts = [torch.empty_like(local) for _ in range(layout.cp)]
    dist.all_gather(parts, local, group=layout.cp_group)
    full = torch.empty(BATCH, SEQUENCE, local.shape[-1])
    for rank, part in enumerate(parts):
        full[:, zigzag(SEQUENCE, layout.cp, rank)] = part.float()
    return full


def check_layout_job(
    rank: int, world: int, path: str, parallel: dict[str, Any], expected: torch.Tensor, packed: bool, out: str
) -> tuple[float, float]:
    """Returns the largest logit error (-1 where this rank has no logits) and the largest padding logit."""
    from megatron_grpo.models.checkpoint import iter_hf_weights, load_hf_weights
    from megatron_grpo.models.export import save_hf_directory
    from megatron_grpo.models.hf_directory import HFDirectory
    from megatron_grpo.models.registry import describe_model
    from megatron_grpo.parallel.layout import initialize_layout
    from megatron_grpo.policy.model_builder import build_model_chunks

    policy = _policy(path, parallel)
    layout = initialize_layout(
        **{key: value for key, value in parallel.items() if key != "sequence_parallel"}
    )
    directory = HFDirectory(Path(path), tokenizer=False)
    chunks = build_model_chunks(policy, directory, layout)
    load_hf_weights(chunks, directory, layout)

    errors, padding = -1.0, 0.0
    for is_packed in {False, packed}:
        logits = _forward(chunks, layout, is_packed)
        if logits is not None:
            errors = max(errors, (logits[..., :VOCAB] - expected).abs().max().item())
            padding = max(padding, logits[..., VOCAB:].abs().max().item())

    stored = load_file(f"{path}/model.safetensors")
    exported = list(iter_hf_weights(chunks, directory, layout))
    assert [name for name, _ in exported] == list(describe_model(directory.config).hf_shapes())
    if layout.is_replica_leader:
        assert {name for name, _ in exported} == set(stored)
        for name, tensor in exported:
            assert tensor is not None
            assert torch.equal(tensor, stored[name]), name
            tensor.zero_()  # a copy: the parameters must not feel it
    else:
        assert all(tensor is None for _, tensor in exported)
    save_hf_directory(chunks, directory, Path(out), layout, max_shard_bytes=100_000)
    return errors, padding


@pytest.mark.timeout(180)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_export_equal_hugging_face(
    layout: str, ranks: RankPool, models: dict[bool, tuple[Path, torch.Tensor]], tmp_path: Path
) -> None:
    world, tied, parallel = LAYOUTS[layout]
    path, expected = models[tied]
    packed = layout in ("one-rank", "cp2", "tp2-sp")
    out = tmp_path / "export"
    results = ranks.run(world, check_layout_job, str(path), parallel, expected, packed, str(out))
    errors = [error for error, _ in results if error >= 0]
    assert len(errors) == world // parallel.get("pipeline_model_parallel_size", 1)
    assert max(errors) < 1e-5
    assert max(padding for _, padding in results) == 0.0

    assert len(list(out.glob("*.safetensors"))) > 1
    reloaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(reloaded(tokens()).logits, expected, rtol=0, atol=1e-6)
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def export_again_job(rank: int, world: int, path: str, out: str) -> str:
    """Replaces an export with a bf16 one, then fails to write to a place that cannot exist."""
    from megatron_grpo.models.checkpoint import load_hf_weights
    from megatron_grpo.models.export import save_hf_directory
    from megatron_grpo.models.hf_directory import HFDirectory
    from megatron_grpo.parallel.layout import initialize_layout
    from megatron_grpo.policy.model_builder import build_model_chunks

    parallel = {"tensor_model_parallel_size": 2}
    layout = initialize_layout(**parallel)
    directory = HFDirectory(Path(path), tokenizer=False)
    chunks = build_model_chunks(_policy(path, parallel), directory, layout)
    load_hf_weights(chunks, directory, layout)
    save_hf_directory(chunks, directory, Path(out), layout)
    save_hf_directory(chunks, directory, Path(out), layout, dtype=torch.bfloat16)
    try:
        save_hf_directory(chunks, directory, Path(out) / "config.json" / "nowhere", layout)
    except (OSError, RuntimeError) as error:
        return type(error).__name__
    return "nothing raised"


@pytest.mark.timeout(120)
def test_export_replaces_in_one_piece_and_fails_on_all_ranks(
    ranks: RankPool, models: dict[bool, tuple[Path, torch.Tensor]], tmp_path: Path
) -> None:
    path, _ = models[True]
    out = tmp_path / "export"
    assert ranks.run(2, export_again_job, str(path), str(out)) == ["NotADirectoryError", "PeerError"]
    assert [p.name for p in tmp_path.iterdir()] == ["export"]
    reloaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict()
    for name, tensor in load_file(path / "model.safetensors").items():
        assert torch.equal(reloaded[name], tensor.bfloat16()), name


def numerics_job(
    rank: int, world: int, path: str, gradients: dict[str, torch.Tensor], bf16_logits: torch.Tensor
) -> tuple[dict[str, float], float]:
    """Largest relative gradient error for each recompute setting, and largest bf16 logit error."""
    from megatron_grpo.models.checkpoint import load_hf_weights
    from megatron_grpo.models.hf_directory import HFDirectory
    from megatron_grpo.models.registry import describe_model
    from megatron_grpo.parallel.layout import initialize_layout
    from megatron_grpo.policy.model_builder import build_model_chunks

    layout = initialize_layout()
    directory = HFDirectory(Path(path), tokenizer=False)
    errors = {}
    for recompute in (None, "full", "selective"):
        policy = _policy(path, {}).model_copy(update={"recompute_granularity": recompute})
        (model,) = build_model_chunks(policy, directory, layout)
        load_hf_weights([model], directory, layout)
        logits = model(tokens(), torch.arange(SEQUENCE).expand(BATCH, -1), None)[..., :VOCAB]
        logits.square().mean().backward()
        params = dict(model.named_parameters())
        errors[str(recompute)] = max(
            ((ours - gradients[tensor.name]).abs().max() / gradients[tensor.name].abs().max()).item()
            for mapping in describe_model(directory.config).weight_map(model.vocab_size)
            for tensor, ours in zip(mapping.hf, mapping.to_hf([params[mapping.param].grad]), strict=True)
        )
    chunks = build_model_chunks(_policy(path, {}, "bf16"), directory, layout)
    load_hf_weights(chunks, directory, layout)
    logits = _forward(chunks, layout, packed=False)
    assert logits is not None
    return errors, (logits[..., :VOCAB] - bf16_logits).abs().max().item()


@pytest.mark.timeout(120)
def test_gradients_and_bf16_logits_equal_hugging_face(
    ranks: RankPool, models: dict[bool, tuple[Path, torch.Tensor]]
) -> None:
    path, _ = models[False]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model(tokens()).logits.square().mean().backward()
    gradients = {name: param.grad.clone() for name, param in model.named_parameters()}
    with torch.no_grad():
        bf16_model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        bf16_logits = bf16_model(tokens()).logits.float()
    ((errors, bf16_error),) = ranks.run(1, numerics_job, str(path), gradients, bf16_logits)
    assert set(errors) == {"None", "full", "selective"}
    assert max(errors.values()) < 1e-5
    assert bf16_error < 0.02
