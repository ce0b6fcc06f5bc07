from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_grpo.algorithms.advantage_estimator import AdvantageInputs, make_advantage_estimator
from megatron_grpo.config.grpo import AdvEstimatorConfig, GRPOConfig
from megatron_grpo.config.loss import ClippedPGLossConfig
from megatron_grpo.parallel.layout import initialize_layout
from megatron_grpo.parallel.reductions import MetricReducer
from tests.rank_pool import RankPool

TOLERANCE = 1e-12
ESTIMATORS: dict[str, tuple[dict[str, Any], bool]] = {
    "grpo": ({"name": "grpo"}, False),
    "grpo, KL in reward": ({"name": "grpo", "use_leave_one_out_baseline": False}, True),
    "gdpo": ({"name": "gdpo"}, False),
    "reinforce++": ({"name": "reinforce_plus_plus"}, True),
}
# Row numbers of each rank: groups (row % 4) straddle ranks, and in the last split one rank has no row.
SPLITS = {2: [[0, 3, 5], [1, 2, 4, 6, 7, 8, 9, 10, 11]], 3: [list(range(7)), [], list(range(7, 12))]}


def _rows(rows: list[int], id_distance: int = 1) -> AdvantageInputs:
    generator = torch.Generator().manual_seed(0)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    rewards, a, b, kl, mask = (
        uniform(12),
        uniform(12),
        100 * uniform(12),
        uniform(12, 5),
        uniform(12, 5) > 0.3,
    )
    group_ids = torch.arange(12) % 4 * id_distance - 7
    sample_mask = torch.ones(12)
    sample_mask[4] = 0
    for x in (rewards, a, b):
        x[[1, 5, 9]] = 0.35  # a degenerate group
    return AdvantageInputs(
        rewards[rows], group_ids[rows], sample_mask[rows], mask[rows],
        {"reward/a": a[rows], "reward/b": b[rows]}, kl[rows],
    )  # fmt: skip


def _estimator(keys: dict[str, Any], use_kl: bool, group: Any) -> Any:
    config = GRPOConfig(
        max_num_steps=1, num_prompts_per_step=4, num_generations_per_prompt=3,
        adv_estimator=AdvEstimatorConfig(**keys),
    )  # fmt: skip
    loss = ClippedPGLossConfig(use_kl_in_reward=use_kl, reference_policy_kl_penalty=0.2)
    return make_advantage_estimator(config, loss, group)


def _sharded(
    rank: int, world: int, id_distance: int
) -> dict[str, tuple[list[list[float]], dict[str, float]]]:
    layout = initialize_layout()
    answers = {}
    for name, (keys, use_kl) in ESTIMATORS.items():
        advantages, metrics = _estimator(keys, use_kl, layout.dp_group)(
            _rows(SPLITS[world][rank], id_distance)
        )
        answers[name] = (advantages.tolist(), MetricReducer(layout).reduce(metrics))
    return answers


@pytest.mark.timeout(180)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("id_distance", [1, 10**12])
def test_groups_that_straddle_ranks_equal_one_process(ranks: RankPool, world: int, id_distance: int) -> None:
    answers = ranks.run(world, _sharded, id_distance)
    for name, (keys, use_kl) in ESTIMATORS.items():
        whole, metrics = _estimator(keys, use_kl, None)(_rows(list(range(12))))
        expected = {key: m.value() for key, m in metrics.items()}
        assert expected["num_groups"] == 4
        for rank, rows in enumerate(SPLITS[world]):
            got, values = answers[rank][name]
            shard = torch.tensor(got, dtype=torch.float64).reshape(len(rows), 5)
            torch.testing.assert_close(shard, whole[rows], rtol=TOLERANCE, atol=TOLERANCE)
            assert values == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


def _one_broken_reward(rank: int, world: int) -> str:
    inputs = _rows([rank])
    if rank == 1:
        inputs.rewards[0] = torch.nan
    try:
        _estimator({"name": "grpo"}, False, dist.group.WORLD)(inputs)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.timeout(120)
def test_a_reward_that_is_not_a_number_is_an_error_on_all_ranks(ranks: RankPool) -> None:
    for message in ranks.run(2, _one_broken_reward):
        assert "the reward is not finite in 1 rollouts" in message


def _cancelling(rank: int, world: int) -> list[float]:
    """Components that cancel: large ones on rank 0; small ones on rank 1, but for 1e-9, rounding of the large ones."""
    group = initialize_layout().dp_group
    a = torch.tensor([0.1e6, 0.7e6, 0.3e6, 1e-3, 2e-3, 4e-3], dtype=torch.float64)
    b = torch.tensor([0.9e6, 0.3e6, 0.7e6, 4e-3 + 1e-9, 3e-3, 1e-3], dtype=torch.float64)
    rows = slice(3 * rank, 3 * rank + 3)
    ones = torch.ones(6, 1)[rows]
    inputs = AdvantageInputs(
        a[rows],
        torch.tensor([0, 0, 0, 1, 1, 1])[rows],
        ones[:, 0],
        ones,
        {"reward/a": a[rows], "reward/b": b[rows]},
    )
    estimator = _estimator({"name": "gdpo", "normalize_rewards": False}, False, group)
    return estimator(inputs)[0][:, 0].tolist()


@pytest.mark.timeout(180)
def test_what_is_left_of_cancelling_components_is_judged_over_all_ranks(ranks: RankPool) -> None:
    # of the second group the components leave something, but next to the rounding of the first it is nothing
    assert ranks.run(2, _cancelling) == [[0.0] * 3] * 2
