"""Qwen3-MoE in every expert layout: Hugging Face's logits, export, and training against one rank."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_grpo.config import RunConfig
from tests.distributed.test_models import check_layout_job, tokens, write_random
from tests.rank_pool import RankPool
from tests.recorded_training import assert_same_training, recorded_rollouts, run_config, train_recorded
from tests.tiny_model import write_tiny_model

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # world size, policy.parallel
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "tp2_ep2_etp1": (2, TP2 | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    "tp2": (2, TP2),  # expert-TP 2
    "tp2_etp1": (2, TP2 | {"expert_tensor_parallel_size": 1}),
    "etp2": (2, {"expert_tensor_parallel_size": 2}),
    "cp2_ep2": (2, {"context_parallel_size": 2, "expert_model_parallel_size": 2}),
    "tp2_ep2": (4, TP2 | {"expert_model_parallel_size": 2}),
    "ep2_etp2": (4, {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}),
    "pp2_ep2": (4, PP2 | {"expert_model_parallel_size": 2}),
    "tp2_pp2": (4, TP2 | PP2),
    "pp2_vpp2": (2, PP2 | {"virtual_pipeline_model_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[Path, torch.Tensor]]:
    """By norm_topk_prob: a random Qwen3-MoE directory, one layer dense, and transformers' logits."""
    folder = tmp_path_factory.mktemp("qwen3_moe")
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1]}
    return {
        normalized: write_random(
            Qwen3MoeForCausalLM, Qwen3MoeConfig, folder / str(normalized), int(normalized),
            norm_topk_prob=normalized, **sizes,
        )
        for normalized in (True, False)
    }  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["one_rank", "one_rank_normalized", *LAYOUTS])
def test_logits_and_export_equal_hugging_face(
    layout: str, ranks: RankPool, models: dict[bool, tuple[Path, torch.Tensor]], tmp_path: Path
) -> None:
    world, parallel = LAYOUTS.get(layout, (1, {}))
    path, expected = models[layout != "one_rank"]
    out = tmp_path / "export"
    packed = layout in ("one_rank", "tp2_ep2")
    results = ranks.run(world, check_layout_job, str(path), parallel, expected, packed, str(out))
    errors = [error for error, _ in results if error >= 0]
    assert len(errors) == world // parallel.get("pipeline_model_parallel_size", 1)
    assert max(errors) < 1e-5
    reloaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(reloaded(tokens()).logits, expected, rtol=0, atol=1e-6)


STEPS = 3
ROUTER_LOSSES = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
PACKING = {"enabled": True, "train_mb_tokens": 64}


def moe_run_config(model: Path, folder: Path, policy: dict[str, Any], **parallel: Any) -> RunConfig:
    values = run_config(model, folder, STEPS, **parallel).model_dump()
    values["policy"] |= policy
    return RunConfig.model_validate(values)


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    """The first two layers are dense: with PP 2 a stage has no experts."""
    path = tmp_path_factory.mktemp("moe") / "model"
    return write_tiny_model(path, num_hidden_layers=4, num_experts=4, mlp_only_layers=[0, 1])


@pytest.fixture(scope="module")
def references(model: Path, ranks: RankPool) -> Any:
    """Training on one rank, by the coefficients of the router's losses."""
    known: dict[str, Any] = {}

    def reference(losses: dict[str, float]) -> Any:
        if str(losses) not in known:
            config = moe_run_config(model, model.parent, losses)
            known[str(losses)] = ranks.run(1, train_recorded, config)[0]
        return known[str(losses)]

    return reference


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_training_in_every_layout(layout: str, model: Path, references: Any, ranks: RankPool) -> None:
    """Router losses included."""
    world, parallel = LAYOUTS[layout]
    config = moe_run_config(model, model.parent, ROUTER_LOSSES, **parallel)
    assert_same_training(ranks.run(world, train_recorded, config), references(ROUTER_LOSSES))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("policy", "parallel"),
    [
        (ROUTER_LOSSES | {"train_micro_batch_size": 4}, {}),
        (ROUTER_LOSSES | {"recompute_granularity": "full"}, TP2 | {"expert_model_parallel_size": 2}),
        ({"moe_z_loss_coeff": 0.01, "sequence_packing": PACKING}, {"expert_model_parallel_size": 2}),
    ],
    ids=["micro_batches", "recompute", "packed"],
)
def test_same_training_with_other_micro_batches(
    policy: dict[str, Any], parallel: dict[str, Any], model: Path, references: Any, ranks: RankPool
) -> None:
    world = 1 if not parallel else 4 if "tensor_model_parallel_size" in parallel else 2
    config = moe_run_config(model, model.parent, policy, **parallel)
    losses = {key: policy[key] for key in ROUTER_LOSSES if key in policy}
    assert_same_training(ranks.run(world, train_recorded, config), references(losses))


def test_router_losses_change_the_training(references: Any) -> None:
    """Guards the comparisons above."""
    norms = [references(losses)["steps"][0]["grad_norm"] for losses in (ROUTER_LOSSES, {})]
    assert abs(norms[0] / norms[1] - 1) > 1e-3


def router_gradients_job(rank: int, world: int, config: RunConfig) -> tuple[Any, dict[str, torch.Tensor]]:
    """The batch, and gradients under Hugging Face names of a step whose policy gradient is 0."""
    from megatron_grpo.algorithms.loss.loss_functions import ClippedPGLossFn
    from megatron_grpo.models.registry import describe_model
    from megatron_grpo.parallel.layout import initialize_layout
    from megatron_grpo.policy.packing import train_rule
    from megatron_grpo.policy.policy import MegatronPolicy
    from megatron_grpo.training.exchange import exchange

    layout = initialize_layout()
    policy = MegatronPolicy(
        config.policy, layout, temperature=1.0, total_optimizer_steps=1, with_reference=False
    )
    batch = exchange(
        [s for group in recorded_rollouts(0, policy.vocab_size) for s in group],
        layout, 1, 7, train_rule(config.policy, layout),
    )  # fmt: skip
    batch.prev_logprobs = policy.logprobs(batch)
    batch.advantages = torch.zeros(batch.tokens.shape)
    policy.accumulate_gradients(batch, ClippedPGLossFn(config.loss_fn), 0)
    params = dict(policy.model[0].named_parameters())
    return (batch.tokens, batch.token_mask), {
        tensor.name: gradient
        for mapping in describe_model(policy.directory.config).weight_map(policy.vocab_size)
        if mapping.expert is None
        for tensor, gradient in zip(mapping.hf, mapping.to_hf([params[mapping.param].main_grad]), strict=True)
    }


@pytest.mark.timeout(300)
def test_router_gradients_are_those_of_the_formulas(model: Path, ranks: RankPool) -> None:
    values = moe_run_config(model, model.parent, ROUTER_LOSSES).model_dump()
    values["loss_fn"]["reference_policy_kl_penalty"] = 0
    config = RunConfig.model_validate(values)
    (((rows, masks), gradients),) = ranks.run(1, router_gradients_job, config)

    hf = Qwen3MoeForCausalLM.from_pretrained(model, dtype=torch.float32)
    experts, topk = hf.config.num_experts, hf.config.num_experts_per_tok
    total = torch.zeros(())
    for row, mask in zip(rows, masks, strict=True):
        trained = mask[1:].nonzero().flatten()  # the token before each response token predicts it
        for logits in hf(row[None, :-1], output_router_logits=True).router_logits:
            logits = logits.view(-1, experts)[trained]
            scores = logits.softmax(-1)
            counts = torch.bincount(scores.topk(topk).indices.flatten(), minlength=experts)
            balance = experts * ((counts / (len(trained) * topk)) * scores.mean(0)).sum()
            total = total + len(trained) * ROUTER_LOSSES["moe_aux_loss_coeff"] * balance
            total = total + ROUTER_LOSSES["moe_z_loss_coeff"] * logits.logsumexp(-1).square().sum()
    (total / masks.sum()).backward()
    compared = [name for name, param in hf.named_parameters() if name in gradients and param.grad is not None]
    assert sum("mlp.gate.weight" in name for name in compared) == 2
    for name in compared:
        want = hf.get_parameter(name).grad
        torch.testing.assert_close(gradients[name], want, rtol=1e-4, atol=1e-5 * want.abs().max().item())


@pytest.mark.timeout(300)
def test_resumes_in_the_same_and_in_another_expert_layout(
    model: Path, references: Any, ranks: RankPool, tmp_path: Path
) -> None:
    config = moe_run_config(model, tmp_path, {}, expert_model_parallel_size=2)
    ranks.run(2, train_recorded, config, 2)
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "other" / "checkpoints")
    resumed = ranks.run(2, train_recorded, config)[0]
    other = moe_run_config(model, tmp_path / "other", {}, **LAYOUTS["tp2_etp1"][1])
    moved = ranks.run(2, train_recorded, other)[0]
    for result in (resumed, moved):
        assert len(result["steps"]) == 1
        for name, want in references({})["weights"].items():
            error = (result["weights"][name] - want).abs().max() / want.abs().max()
            assert error < 1e-5, name
    merged = moe_run_config(model, tmp_path / "other", {}, **TP2)
    with pytest.raises(RuntimeError, match="expert_model_parallel_size above 1, or"):
        ranks.run(2, train_recorded, merged)
