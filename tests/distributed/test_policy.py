"""What holds of the policy before it has learned anything: Megatron's loss contract, and a ratio of exactly 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_grpo.config import RunConfig
from megatron_grpo.config.policy import PolicyConfig
from tests.rank_pool import RankPool
from tests.recorded_training import recorded_rollouts, run_config
from tests.tiny_model import write_tiny_model

PACKING = {"enabled": True, "train_mb_tokens": 64}
LAYOUTS: dict[
    str, tuple[int, dict[str, Any] | None, dict[str, Any]]
] = {  # world size, packing, policy.parallel
    "one_rank": (1, None, {}),
    "one_rank-packed": (1, PACKING, {}),
    "tp2_sp": (2, None, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, None, {"pipeline_model_parallel_size": 2}),
    "cp2-packed": (2, PACKING, {"context_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("policy") / "model")


def first_ratios(rank: int, world: int, config: RunConfig) -> dict[str, float]:
    """Ratio and clip metrics of weights that have not moved, with one plan of micro-batches for both passes."""
    from megatron_grpo.algorithms.loss.loss_functions import ClippedPGLossFn
    from megatron_grpo.parallel.layout import initialize_layout
    from megatron_grpo.parallel.reductions import MetricReducer
    from megatron_grpo.policy.packing import train_rule
    from megatron_grpo.policy.policy import MegatronPolicy
    from megatron_grpo.training.exchange import exchange

    layout = initialize_layout(**config.policy.parallel.group_sizes())
    policy = MegatronPolicy(
        config.policy, layout, temperature=0.7, total_optimizer_steps=1, with_reference=False
    )
    scored = [item for group in recorded_rollouts(0, policy.vocab_size) for item in group]
    rule = train_rule(config.policy, layout)
    batch = exchange(scored, layout, 1, 7, rule)
    cut = policy._cut
    with mock.patch.object(policy, "_cut", lambda rows, *_: cut(rows, rule, batch.microbatch_sizes)):
        batch.prev_logprobs = policy.logprobs(batch)
        signs = 1.0 - 2.0 * (torch.arange(len(batch)) % 2)
        batch.advantages = batch.token_mask * signs[:, None]
        metrics = policy.accumulate_gradients(batch, ClippedPGLossFn(config.loss_fn), 0)
    values = MetricReducer(layout).reduce(metrics)
    return {
        name: value for name, value in values.items() if name.startswith(("probs_ratio", "clip_fraction"))
    }


@pytest.mark.timeout(240)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_update_has_ratio_exactly_one(
    ranks: RankPool, model: Path, layout: str, precision: str
) -> None:
    """Scoring and training are the same computation, bit by bit: a clip range of 0 clips nothing."""
    world, packing, parallel = LAYOUTS[layout]
    values = run_config(model, model.parent, 1, packing, **parallel).model_dump()
    values["loss_fn"] |= {"reference_policy_kl_penalty": 0.0, "ratio_clip_min": 0.0, "ratio_clip_max": 0.0}
    values["policy"]["precision"] = precision
    for metrics in ranks.run(world, first_ratios, RunConfig.model_validate(values)):
        clipped = [metrics.pop("clip_fraction_low"), metrics.pop("clip_fraction_high")]
        assert clipped == [0.0, 0.0]
        assert len(metrics) == 6
        assert set(metrics.values()) == {1.0}


def refusals(rank: int, world: int, config: PolicyConfig) -> list[str]:
    """What is said to a model that averages per micro-batch, and to gradient buffers that scale."""
    from megatron_grpo.parallel.layout import initialize_layout
    from megatron_grpo.policy import model_builder
    from megatron_grpo.policy.optimizer import LossContractError, check_loss_contract, gradient_buffers
    from megatron_grpo.policy.policy import MegatronPolicy

    layout = initialize_layout()

    def build() -> MegatronPolicy:
        return MegatronPolicy(config, layout, temperature=1.0, total_optimizer_steps=1, with_reference=False)

    original = model_builder.transformer_config

    def averaging(*args: Any, **kwargs: Any) -> Any:
        built = original(*args, **kwargs)
        built.calculate_per_token_loss = False
        return built

    policy = build()
    gradient_buffers(policy.chunks[0])[0].gradient_scaling_factor = 1 / world
    with pytest.raises(LossContractError) as scaled:
        check_loss_contract(policy.chunks)
    averages = mock.patch.object(model_builder, "transformer_config", averaging)
    with averages, pytest.raises(LossContractError) as averaged:
        build()
    return [str(averaged.value), str(scaled.value)]


@pytest.mark.timeout(240)
def test_a_model_that_would_scale_the_loss_is_refused(ranks: RankPool, model: Path) -> None:
    for averaged, scaled in ranks.run(2, refusals, run_config(model, model.parent, 1).policy):
        assert "calculate_per_token_loss=True" in averaged
        assert "pre-scales gradients by 0.5" in scaled
