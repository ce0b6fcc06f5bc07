"""Edges of the loss, the estimators and their sums: on a bound, rows that do not count, numbers that nearly cancel."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_grpo.algorithms.dynamic_sampling import has_signal, select_groups
from megatron_grpo.algorithms.group_statistics import group_statistics
from megatron_grpo.algorithms.loss.importance_sampling import importance_weights
from megatron_grpo.algorithms.loss.kl import kl_penalty
from megatron_grpo.algorithms.loss.loss_functions import ClippedPGLossFn
from megatron_grpo.config.loss import ClippedPGLossConfig
from megatron_grpo.parallel.fused_logprobs import fused_linear_logprobs
from megatron_grpo.parallel.reductions import Reduction, masked_mean
from tests.unit.algorithms.batches import micro_batch_loss, random_batch
from tests.unit.algorithms.test_advantages import estimate, first_column, gdpo
from tests.unit.algorithms.test_importance_sampling import SEQUENCES
from tests.unit.algorithms.test_loss import NO_KL, one_sequence, values


def test_usable_looks_only_at_log_probs_that_the_loss_uses() -> None:
    nan, one = torch.full((2,), math.nan), torch.zeros(2)
    forced = ClippedPGLossFn(ClippedPGLossConfig(force_on_policy_ratio=True, **NO_KL))
    assert forced.usable(nan, one, nan).all()
    in_reward = ClippedPGLossFn(ClippedPGLossConfig(use_kl_in_reward=True))
    assert in_reward.usable(one, one, nan).all()
    assert not ClippedPGLossFn(ClippedPGLossConfig()).usable(one, one, nan).any()
    assert not in_reward.usable(nan, one, one).any()


def test_loss_has_the_type_of_the_current_log_probs() -> None:
    batch = random_batch()
    batch["curr"] = batch["curr"].float()
    assert micro_batch_loss(ClippedPGLossConfig(), batch).loss_sum.dtype == torch.float32


def test_dual_clip_has_its_gradient_on_the_bound() -> None:
    prev = torch.full((1,), -3.0, dtype=torch.float64)
    curr = prev + math.log(2.0)
    assert (curr - prev).exp().item() == 2.0
    _, gradient = one_sequence(curr, prev, prev, -1.0, ratio_clip_c=2.0, **NO_KL)
    assert gradient.item() == 2.0


def test_weighted_kl_that_overflows_is_finite() -> None:
    config = ClippedPGLossConfig(
        kl_input_clamp_value=None, kl_output_clamp_value=None, use_on_policy_kl_approximation=True
    )
    logprobs = torch.tensor([-100.0], requires_grad=True)
    kl = kl_penalty(config, logprobs, torch.zeros(1), torch.tensor([-120.0]))  # exp(20) times exp(88)
    kl.sum().backward()
    assert kl.isfinite().all()
    assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["tis", "icepop", "seq-mask-tis"])
def test_a_weight_on_a_bound_is_inside(kind: str) -> None:
    """Engines that agree give weights of exactly 1, and 1 is a usual bound."""
    for low, high in ((1.0, 1.0), (0.5, 1.0), (1.0, 2.0)):
        config = ClippedPGLossConfig(
            use_importance_sampling_correction=True,
            truncated_importance_sampling_type=kind,
            truncated_importance_sampling_ratio=high,
            truncated_importance_sampling_ratio_min=low,
        )
        zeros = torch.zeros(4, dtype=torch.float64)
        weights = importance_weights(config, zeros, SEQUENCES, torch.tensor([2, 2]))
        assert weights.truncated.tolist() == [1.0] * 4
        assert not weights.out_of_bounds.any()


def test_clip_fractions_have_their_own_bounds() -> None:
    prev = torch.full((4,), -3.0, dtype=torch.float64)
    curr = prev + torch.tensor([0.7, 0.9, 1.25, 1.5], dtype=torch.float64).log()
    keys = {"ratio_clip_min": 0.2, "ratio_clip_max": 0.4, "ratio_clip_c": 1.45, **NO_KL}
    positive = values(one_sequence(curr, prev, prev, 1.0, **keys)[0])
    assert (positive["clip_fraction_low"], positive["clip_fraction_high"]) == (0.0, 0.25)
    negative = values(one_sequence(curr, prev, prev, -1.0, **keys)[0])
    assert (negative["clip_fraction_low"], negative["clip_fraction_high"]) == (0.25, 0.0)
    keys |= {"ratio_clip_max": 0.1}
    assert values(one_sequence(curr, prev, prev, 1.0, **keys)[0])["clip_fraction_high"] == 0.5
    assert values(one_sequence(curr, prev, prev, -1.0, **keys)[0])["clip_fraction_dual"] == 0.25


def test_extremes_of_the_importance_weight_are_those_before_truncation() -> None:
    prev = torch.full((3,), -1.0, dtype=torch.float64)
    generation = prev - torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64).log()
    got = values(
        one_sequence(
            prev, prev, generation, 1.0, use_importance_sampling_correction=True,
            truncated_importance_sampling_type="tis", truncated_importance_sampling_ratio=2.0,
            truncated_importance_sampling_ratio_min=0.5, **NO_KL,
        )[0]
    )  # fmt: skip
    assert (got["importance_weight_min"], got["importance_weight_max"]) == pytest.approx((0.25, 4.0))
    assert got["sampling_importance_ratio"] == pytest.approx((0.5 + 1.0 + 2.0) / 3)


def test_engine_mismatch_of_broken_engines_is_bounded() -> None:
    prev = torch.full((2,), -1.0, dtype=torch.float64)
    got = values(one_sequence(prev, prev, prev - 500.0, 1.0, **NO_KL)[0])
    assert got["token_mult_prob_error"] == pytest.approx(math.exp(20))
    assert got["gen_kl_error"] == pytest.approx(math.exp(20) - 21)
    assert got["policy_kl_error"] == pytest.approx(math.exp(-20) + 19)


def test_sequence_metrics_of_no_sequence_have_no_value() -> None:
    batch = random_batch()
    batch["token_mask"][:] = 0
    got = values(micro_batch_loss(ClippedPGLossConfig(), batch))
    assert got["seq_logprob_error_max"] is got["seq_logprob_error_mean"] is None


def test_whitening_divides_by_the_deviation_down_to_a_hundredth_of_a_percent() -> None:
    """Variances below 1e-8 are divided by 1e-4: noise is not scaled up to 1."""
    small = first_column(estimate([0.0, 1e-3], [0, 0], name="reinforce_plus_plus"))
    assert small == pytest.approx([-1.0, 1.0])
    tiny = first_column(estimate([0.0, 2e-6], [0, 0], name="reinforce_plus_plus"))
    assert tiny == pytest.approx([-1e-2, 1e-2])


def test_small_differences_of_components_are_not_taken_for_rounding() -> None:
    result = gdpo({"reward/a": [0.0, 1.0], "reward/b": [1.0, 1e-9]}, [0, 0])
    assert first_column(result) == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_components_that_cancel_up_to_rounding_are_zero() -> None:
    result = gdpo({"reward/a": [0.1, 0.7, 0.3], "reward/b": [0.9, 0.3, 0.7]}, [0, 0, 0])
    assert first_column(result) == [0.0] * 3


@pytest.mark.parametrize("name", ["grpo", "gdpo", "reinforce_plus_plus"])
def test_metrics_do_not_look_at_rows_that_do_not_count(name: str) -> None:
    """NaN rewards of a rejected row, and a row without a response token."""
    components = {"reward/a": [1.0, 0.0, math.nan, 1.0], "reward/b": [0.0, 3.0, math.nan, -5.0]}
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0]])
    advantages, metrics = estimate(
        [1.0, 0.0, math.nan, -5.0], [0, 0, 0, 0], name=name, sample_mask=[1, 1, 0, 1], token_mask=mask,
        components=components,
    )  # fmt: skip
    counted = advantages[mask.bool() & torch.tensor([1, 1, 0, 1]).bool()[:, None]]
    assert metrics["advantage_mean"].value() == pytest.approx(counted.mean().item())
    assert metrics["advantage_min"].value() == counted.min().item()
    assert metrics["advantage_max"].value() == counted.max().item()


def test_kl_metrics_are_of_the_tokens_that_count() -> None:
    kl = torch.tensor([[math.nan, 0.5, 1.5], [7.0, 1.0, math.nan]], dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1], [0, 1, 1]])
    _, metrics = estimate([1.0, 0.0], [0, 0], token_mask=mask, kl=kl)
    assert metrics["kl_penalty"].value() == 1.0
    assert metrics["num_dropped_kl_tokens"].value() == 1


def test_degenerate_groups_of_different_rewards_are_exactly_zero() -> None:
    """In floating point the mean of three 0.1 is not 0.1, and a step on what is left would move weights."""
    rewards, ids = [0.1] * 3 + [0.7] * 3, [0] * 3 + [1] * 3
    for name in ("grpo", "reinforce_plus_plus"):
        assert first_column(estimate(rewards, ids, name=name)) == [0.0] * 6


def test_degenerate_groups_of_gdpo_are_zero_beside_others() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.rand(2, 12, generator=generator, dtype=torch.float64)
    a[:3], b[:3] = 0.1, 0.7
    for normalize in (True, False):
        result = gdpo(
            {"reward/a": a.tolist(), "reward/b": b.tolist()}, [i // 3 for i in range(12)], normalize=normalize
        )
        assert first_column(result)[:3] == [0.0] * 3


def test_ids_with_gaps_and_groups_of_masked_rows_are_not_counted() -> None:
    _, metrics = estimate([1.0, 0.0, 1.0, 0.0, 1.0], [3, 3, 7, 7, 9], sample_mask=[1, 1, 1, 1, 0])
    assert metrics["num_groups"].value() == 2
    assert metrics["num_degenerate_groups"].value() == 0


def test_statistics_of_no_row_at_all() -> None:
    statistics = group_statistics(
        torch.zeros(0, 2, dtype=torch.float64), torch.zeros(0, dtype=torch.int64), torch.zeros(0).bool(), None
    )
    assert (statistics.num_groups, statistics.num_degenerate_groups) == (0, 0)
    assert statistics.sum.shape == (0, 2)


def test_rows_that_do_not_count_may_hold_anything() -> None:
    values_ = torch.tensor([[1.0], [3.0], [math.nan], [5.0], [5.0], [math.inf]], dtype=torch.float64)
    valid = torch.tensor([1, 1, 0, 1, 1, 0]).bool()
    statistics = group_statistics(values_, torch.tensor([0, 0, 0, 1, 1, 1]), valid, None)
    assert statistics.sum[:, 0].tolist() == [4.0] * 3 + [10.0] * 3
    assert statistics.std[:, 0].tolist() == pytest.approx([2**0.5] * 3 + [0.0] * 3)
    assert statistics.degenerate[:, 0].tolist() == [False] * 3 + [True] * 3


def test_one_component_that_varies_is_a_signal() -> None:
    components = torch.tensor([[[1.0, 0.5], [0.0, 0.5]], [[1.0, 0.5], [1.0, 0.25]]], dtype=torch.float64)
    assert has_signal(components).tolist() == [True, True]


def test_as_many_groups_as_asked_for_are_all_selected() -> None:
    selection = select_groups(torch.tensor([1, 0]), torch.tensor([True, False]), 2)
    assert selection.train.tolist() == [True, True]
    assert selection.keep.tolist() == [False, False]


def test_sums_of_float32_values_are_in_float64() -> None:
    x = torch.tensor([2.0**24, 1.0, 1.0, 1.0])
    assert masked_mean(x, torch.ones(4).bool()).value() == (2.0**24 + 3) / 4
    x = torch.tensor([2.0**12 + 1, 1.0])
    assert Reduction.effective_size(x).value() == (2.0**12 + 2) ** 2 / ((2.0**12 + 1) ** 2 + 1)


def test_logits_that_are_all_very_low_do_not_underflow() -> None:
    hidden = torch.ones(1, 1)
    weight = torch.tensor([[-1000.0], [-1001.0], [-1002.0]])
    expected = torch.tensor([0.0, -1.0, -2.0]).log_softmax(0)
    logprobs, entropy = fused_linear_logprobs(
        hidden, weight, torch.tensor([1]), None, 1.0, 3, with_entropy=True, vocab_chunk=2
    )
    torch.testing.assert_close(logprobs[0], expected[1])
    assert entropy is not None
    torch.testing.assert_close(entropy[0], -(expected.exp() * expected).sum())
