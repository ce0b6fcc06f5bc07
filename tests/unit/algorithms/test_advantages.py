from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_grpo.algorithms.advantage_estimator import (
    AdvantageInputs,
    get_gdpo_reward_component_keys,
    make_advantage_estimator,
)
from megatron_grpo.config.grpo import AdvEstimatorConfig, GRPOConfig
from megatron_grpo.config.loss import ClippedPGLossConfig
from megatron_grpo.parallel.reductions import Metrics


def estimate(
    rewards: list[float],
    group_ids: list[int],
    name: str = "grpo",
    loo: bool = True,
    normalize: bool = False,
    sample_mask: list[int] | None = None,
    token_mask: Tensor | None = None,
    components: dict[str, list[float]] | None = None,
    kl: Tensor | None = None,
    beta: float = 0.1,
    dtype: torch.dtype = torch.float64,
    **grpo: Any,
) -> tuple[Tensor, Metrics]:
    config = GRPOConfig(
        max_num_steps=1,
        num_prompts_per_step=1,
        num_generations_per_prompt=2,
        adv_estimator=AdvEstimatorConfig(
            name=name, use_leave_one_out_baseline=loo, normalize_rewards=normalize
        ),
        **grpo,
    )
    loss = ClippedPGLossConfig(use_kl_in_reward=kl is not None, reference_policy_kl_penalty=beta)
    inputs = AdvantageInputs(
        rewards=torch.tensor(rewards, dtype=dtype),
        group_ids=torch.tensor(group_ids),
        sample_mask=torch.tensor(sample_mask or [1] * len(rewards)),
        token_mask=torch.ones(len(rewards), 1) if token_mask is None else token_mask,
        components={key: torch.tensor(v, dtype=dtype) for key, v in (components or {}).items()},
        kl=kl,
    )
    return make_advantage_estimator(config, loss, None)(inputs)


def first_column(result: tuple[Tensor, Metrics]) -> list[float]:
    return result[0][:, 0].tolist()


@pytest.mark.parametrize("loo", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_rewards_equal_to_the_prompt_index_in_any_order(loo: bool, normalize: bool) -> None:
    ids = torch.arange(5).repeat(4)[torch.randperm(20, generator=torch.Generator().manual_seed(0))].tolist()
    result = estimate([float(i) for i in ids], ids, loo=loo, normalize=normalize)
    assert first_column(result) == [0.0] * 20
    assert result[1]["num_degenerate_groups"].value() == result[1]["num_groups"].value() == 5


def test_missing_row_leaves_other_groups_alone() -> None:
    ids, rewards = [0, 1, 0, 1, 0, 1], [1.0, 0.2, 0.0, 0.7, 0.5, 0.1]
    whole = first_column(estimate(rewards, ids))
    without = first_column(estimate(rewards[:4] + rewards[5:], ids[:4] + ids[5:]))
    assert [without[i] for i in (1, 3, 4)] == [whole[i] for i in (1, 3, 5)]


def test_rejected_rollout_leaves_its_sibling_a_group_of_one() -> None:
    result = estimate([1.0, math.nan, 0.0, 1.0], [0, 0, 1, 1], sample_mask=[1, 0, 1, 1])
    assert first_column(result) == [0.0, 0.0, -1.0, 1.0]
    assert result[1]["num_degenerate_groups"].value() == 1
    assert result[1]["num_groups"].value() == 2


def test_leave_one_out_normalised_does_not_explode() -> None:
    rewards = [0.0] + [0.95] * 7
    advantages = estimate(rewards, [0] * 8, normalize=True, dtype=torch.float32)[0]
    assert advantages.dtype == torch.float32
    assert advantages.abs().max() < 10
    # the mean of the others is 0.95 and the deviation of the whole group 0.95 / sqrt(8)
    assert advantages[0, 0].item() == pytest.approx(-math.sqrt(8), rel=1e-5)


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus"])
@pytest.mark.parametrize(
    ("reward", "count", "dtype"), [(0.35, 7, torch.float32), (0.1, 3, torch.float64)]
)  # in float64 the mean of three 0.1 is not 0.1
def test_constant_reward_is_exactly_zero(name: str, reward: float, count: int, dtype: torch.dtype) -> None:
    for loo in (True, False):
        result = estimate([reward] * count, [3] * count, name=name, loo=loo, normalize=True, dtype=dtype)
        assert first_column(result) == [0.0] * count


def test_lone_success() -> None:
    assert first_column(estimate([1.0, 0, 0, 0], [0] * 4)) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])


def test_group_ids_make_groups_and_nothing_else() -> None:
    """Equal prompts under two ids are two groups; ids are any int64, in any order."""
    for other in (8, -(2**40), 2**63 - 1, -(2**63)):
        assert first_column(estimate([1.0, 0.0, 5.0, 3.0], [9, 9, other, other])) == [1, -1, 2, -2]


def test_advantages_are_clipped_and_zero_at_masked_tokens() -> None:
    mask = torch.tensor([[0, 1, 1], [0, 1, 0]])
    result = estimate([4.0, 0.0], [0, 0], token_mask=mask, advantage_clip_low=-1.5, advantage_clip_high=2.5)
    assert result[0].tolist() == [[0, 2.5, 2.5], [0, -1.5, 0]]
    metrics = {name: m.value() for name, m in result[1].items()}
    assert (metrics["advantage_min"], metrics["advantage_max"]) == (-1.5, 2.5)
    assert metrics["advantage_mean"] == pytest.approx(3.5 / 3)
    one_sided = estimate([4.0, 0.0], [0, 0], token_mask=mask, advantage_clip_high=2.5)
    assert one_sided[0].tolist() == [[0, 2.5, 2.5], [0, -4.0, 0]]


def test_kl_in_reward_of_grpo_is_summed_over_the_valid_tokens() -> None:
    mask = torch.tensor([[0, 1, 1], [0, 1, 0]])
    kl = torch.tensor([[math.nan, 0.5, 1.5], [9.0, 1.0, math.inf]], dtype=torch.float64)
    # shaped rewards 1 - 0.1 * 2 and 0 - 0.1 * 1
    result = estimate([1.0, 0.0], [0, 0], token_mask=mask, kl=kl)
    assert result[0].tolist() == [[0, pytest.approx(0.9), pytest.approx(0.9)], [0, pytest.approx(-0.9), 0]]


def test_a_token_without_a_kl_is_left_out_and_counted() -> None:
    kl = torch.tensor([[0.5, math.nan], [1.0, 3.0]], dtype=torch.float64)
    for name in ("grpo", "reinforce_plus_plus"):
        advantages, metrics = estimate([1.0, 0.0], [0, 0], name=name, token_mask=torch.ones(2, 2), kl=kl)
        assert advantages.isfinite().all()
        assert metrics["num_dropped_kl_tokens"].value() == 1
        assert metrics["kl_penalty"].value() == 1.5
        zero = estimate([1.0, 0.0], [0, 0], name=name, token_mask=torch.ones(2, 2), kl=kl.nan_to_num())
        assert torch.equal(advantages, zero[0])


def test_kl_in_reward_without_kl_is_refused() -> None:
    loss = ClippedPGLossConfig(use_kl_in_reward=True)
    config = GRPOConfig(max_num_steps=1, num_prompts_per_step=1, num_generations_per_prompt=2)
    one = torch.ones(1)
    with pytest.raises(ValueError, match="use_kl_in_reward is true but the batch has no KL"):
        make_advantage_estimator(config, loss, None)(
            AdvantageInputs(one, torch.zeros(1, dtype=torch.int64), one, one[:, None])
        )


def test_reinforce_plus_plus_is_white_over_valid_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(12, 7, generator=generator) > 0.4).double()
    kl = torch.rand(12, 7, generator=generator, dtype=torch.float64)
    rewards = torch.rand(12, generator=generator).tolist()
    advantages, _ = estimate(
        rewards, [0, 1, 2] * 4, name="reinforce_plus_plus", token_mask=mask, kl=kl,
        sample_mask=[1] * 11 + [0],
    )  # fmt: skip
    valid = advantages[:11][mask[:11].bool()]
    assert valid.mean().item() == pytest.approx(0, abs=1e-12)
    assert valid.var(unbiased=False).item() == pytest.approx(1, rel=1e-12)
    assert advantages[11].abs().max() == advantages[mask == 0].abs().max() == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": torch.ones(2, 1)}, r"rewards has the shape \[2, 1\]; token_mask makes it \[2\]"),
        ({"rewards": torch.ones(1)}, r"rewards has the shape \[1\]"),
        ({"rewards": torch.tensor([1, 0])}, "rewards is torch.int64, .* give floating-point rewards"),
        ({"rewards": torch.tensor([True, False])}, "rewards is torch.bool"),
        (
            {"group_ids": torch.zeros(2, dtype=torch.int32)},
            "group_ids is torch.int32; it must be torch.int64",
        ),
        ({"sample_mask": torch.ones(3)}, "sample_mask has the shape"),
        ({"components": {"reward/a": torch.ones(2, 2)}}, "reward/a has the shape"),
        ({"token_mask": torch.ones(2)}, r"token_mask .* must be \[B, S\]"),
        ({"kl": torch.ones(2)}, r"\[\[2, 3\], \[2\]\]; it must be \[B, S\]"),
    ],
)
def test_wrong_shapes_and_types_are_named(changes: dict[str, Any], message: str) -> None:
    fitting = {
        "rewards": torch.ones(2), "group_ids": torch.zeros(2, dtype=torch.int64), "sample_mask": torch.ones(2),
        "token_mask": torch.ones(2, 3),
    }  # fmt: skip
    AdvantageInputs(**fitting)
    with pytest.raises(ValueError, match=message):
        AdvantageInputs(**(fitting | changes))


# --- GDPO


def gdpo(components: dict[str, list[float]], ids: list[int], **keys: Any) -> tuple[Tensor, Metrics]:
    return estimate([0.0] * len(ids), ids, name="gdpo", components=components, **keys)


def test_components_of_different_scale_weigh_the_same() -> None:
    """(1, 0) and (0, 100): every total is different or equal, but the group is not degenerate."""
    result = gdpo({"reward/a": [1.0, 0.0, 0.0], "reward/b": [0.0, 100.0, 0.0]}, [0, 0, 0], normalize=True)
    assert result[1]["num_degenerate_groups"].value() == 0
    first, second, third = first_column(result)
    assert first == pytest.approx(second, rel=1e-4)
    assert third == pytest.approx(-2 * first, rel=1e-4)
    assert torch.tensor([first, second, third]).std().item() == pytest.approx(1.0)


def test_components_that_cancel_give_zero_and_not_scaled_rounding() -> None:
    result = gdpo({"reward/a": [0.1, 0.3, 0.7], "reward/b": [-0.1, -0.3, -0.7]}, [0, 0, 0])
    assert first_column(result) == [0.0] * 3
    assert result[1]["num_degenerate_groups"].value() == 0


def test_components_of_any_size_are_told_from_rounding() -> None:
    small = gdpo({"reward/a": [1e-13, 3e-13, 2e-13], "reward/b": [0.0, 1e-13, 0.0]}, [0, 0, 0])
    large = gdpo({"reward/a": [1e6, 3e6, 2e6], "reward/b": [0.0, 1e6, 0.0]}, [0, 0, 0])
    assert first_column(small) == pytest.approx(first_column(large))
    assert min(map(abs, first_column(large))) > 0.1
    cancelling = {"reward/a": [0.1e6, 0.7e6, 0.3e6], "reward/b": [0.9e6, 0.3e6, 0.7e6]}
    assert first_column(gdpo(cancelling, [0, 0, 0])) == [0.0] * 3


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("normalize", [True, False])
def test_opposite_components_of_a_group_of_two(scale: float, normalize: bool) -> None:
    """(1, 0) and (0, scale): not degenerate; normalised they cancel, down to the epsilon under the deviation."""
    components = {"reward/a": [1.0, 0.0], "reward/b": [0.0, scale]}
    result = gdpo(components, [0, 0], normalize=normalize)
    assert result[1]["num_degenerate_groups"].value() == 0
    cancels = normalize or scale == 1
    assert first_column(result) == ([0.0, 0.0] if cancels else pytest.approx([-(0.5**0.5), 0.5**0.5]))


def test_a_group_with_one_equal_component_is_not_degenerate() -> None:
    result = gdpo({"reward/a": [1.0, 0.0], "reward/b": [1.0, 1.0]}, [0, 0], normalize=True)
    assert result[1]["num_degenerate_groups"].value() == 0
    assert first_column(result) == pytest.approx([0.5**0.5, -(0.5**0.5)])


def test_kl_in_reward_is_refused_with_gdpo() -> None:
    with pytest.raises(ValueError, match=r"use_kl_in_reward is true and .*gdpo"):
        gdpo({"reward/a": [1.0, 0.0], "reward/b": [0.0, 1.0]}, [0, 0], kl=torch.zeros(2, 1))


def test_degenerate_group_of_gdpo_is_exactly_zero() -> None:
    result = gdpo(
        {"reward/a": [0.1, 0.2, 0.35, 0.35], "reward/b": [1.0, 0.0, 0.7, 0.7]}, [0, 0, 1, 1], normalize=True
    )
    assert first_column(result)[2:] == [0.0, 0.0]
    assert result[1]["num_degenerate_groups"].value() == 1


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_components_point_to_grpo(count: int) -> None:
    components = {f"reward/{i}": [1.0, 0.0] for i in range(count)}
    with pytest.raises(ValueError, match=rf"gdpo but the environment returns {count} .* set it to grpo"):
        gdpo(components, [0, 0])


def test_broken_component_is_named() -> None:
    with pytest.raises(ValueError, match="reward/b is not finite in 1 rollouts"):
        gdpo({"reward/a": [1.0, 0.0], "reward/b": [math.nan, 0.0]}, [0, 0])
    with pytest.raises(ValueError, match="the reward is not finite in 2 rollouts"):
        estimate([math.nan, math.inf], [0, 0])


def test_component_keys() -> None:
    batch = {"reward/format": 1, "rewards": 2, "reward/correctness": 3, "kl": 4}
    assert get_gdpo_reward_component_keys(batch) == ["reward/correctness", "reward/format"]
