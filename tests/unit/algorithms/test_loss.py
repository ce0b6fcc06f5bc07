from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_grpo.algorithms.loss.loss_functions import ClippedPGLossFn, LossInputs, LossOutput
from megatron_grpo.algorithms.sequence_index import SequenceIndex
from megatron_grpo.config.loss import ClippedPGLossConfig
from megatron_grpo.parallel.reductions import MetricReducer
from tests.unit.algorithms.batches import VARIANTS, Batch, loss_and_gradient, micro_batch_loss, random_batch

NO_KL = {"reference_policy_kl_penalty": 0.0}


@pytest.fixture(params=VARIANTS)
def config(request: pytest.FixtureRequest) -> ClippedPGLossConfig:
    return ClippedPGLossConfig(**VARIANTS[request.param])


def values(output: LossOutput) -> dict[str, float | None]:
    return {name: metric.value() for name, metric in output.metrics.items()}


def one_sequence(curr: Tensor, prev: Tensor, generation: Tensor, advantage: float, **keys: object) -> tuple[
    LossOutput, Tensor
]:  # fmt: skip
    """The loss of one sequence without masked tokens, and its gradient with respect to ``curr``."""
    curr = curr.detach().clone().requires_grad_()
    count = len(curr)
    inputs = LossInputs(
        prev_logprobs=prev,
        generation_logprobs=generation,
        reference_policy_logprobs=torch.zeros(count, dtype=curr.dtype),
        advantages=torch.full((count,), advantage, dtype=curr.dtype),
        token_mask=torch.ones(count),
        sequences=SequenceIndex(torch.zeros(count, dtype=torch.int64), 1, torch.ones(1)),
    )
    output = ClippedPGLossFn(ClippedPGLossConfig(**keys))(curr, inputs)
    (gradient,) = torch.autograd.grad(output.loss_sum / output.num_tokens, curr)
    return output, gradient


# --- scale and reduction


def test_micro_batches_of_1_and_9_tokens_equal_one_of_10() -> None:
    batch = random_batch(rows=2, width=16)
    batch["sample_mask"][:] = 1
    batch["token_mask"][:] = 0
    batch["token_mask"][0, 5] = 1
    batch["token_mask"][1, 3:12] = 1
    config = ClippedPGLossConfig()
    loss, gradient, (output,) = loss_and_gradient(config, batch)
    cut_loss, cut_gradient, outputs = loss_and_gradient(config, batch, [[0], [1]])
    assert output.num_tokens.item() == 10
    assert [o.num_tokens.item() for o in outputs] == [1, 9]
    torch.testing.assert_close(cut_loss, loss, rtol=0, atol=1e-14)
    torch.testing.assert_close(cut_gradient, gradient, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "cuts", [[[0, 1, 2, 3], [4, 5, 6, 7]], [[7], [2, 3, 4, 5, 6], [0], [1]], [[2], range(2), range(3, 8)]]
)
def test_any_cut_gives_the_same_loss_gradient_and_metrics(
    config: ClippedPGLossConfig, cuts: list[list[int]]
) -> None:
    batch = random_batch()
    loss, gradient, (output,) = loss_and_gradient(config, batch)
    cut_loss, cut_gradient, outputs = loss_and_gradient(config, batch, cuts)
    torch.testing.assert_close(cut_loss, loss, rtol=0, atol=1e-13)
    torch.testing.assert_close(cut_gradient, gradient, rtol=0, atol=1e-13)
    merged = MetricReducer.merge([o.metrics for o in outputs])
    assert {name: m.value() for name, m in merged.items()} == pytest.approx(values(output), rel=1e-12)


def test_num_tokens_counts_tokens_or_sequences_that_are_valid() -> None:
    batch = random_batch()  # row 2 has no token and row 7 is masked
    tokens = int((batch["token_mask"] * batch["sample_mask"][:, None]).sum())
    token_level = micro_batch_loss(ClippedPGLossConfig(), batch)
    sequence_level = micro_batch_loss(ClippedPGLossConfig(token_level_loss=False), batch)
    assert (token_level.num_tokens.item(), sequence_level.num_tokens.item()) == (tokens, 6)
    assert token_level.num_tokens.dtype == torch.int32
    assert values(token_level)["num_valid_tokens"] == tokens
    assert values(token_level)["num_valid_samples"] == 6


def test_masked_sequences_are_in_no_denominator(config: ClippedPGLossConfig) -> None:
    whole = random_batch()
    whole["sample_mask"][:] = torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0])
    half = {name: x[:4] for name, x in whole.items()}
    loss, gradient, (output,) = loss_and_gradient(config, whole)
    half_loss, half_gradient, (half_output,) = loss_and_gradient(config, half)
    torch.testing.assert_close(loss, half_loss, rtol=0, atol=1e-14)
    torch.testing.assert_close(gradient[:4], half_gradient, rtol=0, atol=1e-14)
    assert gradient[4:].abs().max() == 0
    assert values(output) == pytest.approx(values(half_output), rel=1e-12)


def test_actor_and_kl_share_one_normaliser() -> None:
    for token_level in (True, False):
        config = ClippedPGLossConfig(token_level_loss=token_level, reference_policy_kl_penalty=0.3)
        got = values(micro_batch_loss(config, random_batch()))
        assert got["loss"] == pytest.approx(got["actor_loss"] + 0.3 * got["kl_penalty"], rel=1e-13)


def test_packed_equals_padded(config: ClippedPGLossConfig) -> None:
    """Rows of different lengths behind each other, in another order, with padding at the end."""
    batch = random_batch()
    padded = micro_batch_loss(config, batch)
    keep = [(row, col) for row in (3, 0, 7, 1, 6, 2, 5, 4) for col in range(16 if row != 2 else 4)]
    picked = [(r, c) for r, c in keep if batch["token_mask"][r, c] or c < 2]
    rows, cols = (torch.tensor(x) for x in zip(*picked, strict=True))

    def pack(name: str) -> Tensor:
        return torch.cat([batch[name][rows, cols], torch.full((5,), math.nan, dtype=torch.float64)])

    inputs = LossInputs(
        pack("prev"), pack("generation"), pack("reference"), pack("advantages"),
        pack("token_mask").nan_to_num(0.0),
        SequenceIndex(torch.cat([rows, torch.zeros(5, dtype=torch.int64)]), 8, batch["sample_mask"]),
        staleness=pack("staleness"),
    )  # fmt: skip
    packed = ClippedPGLossFn(config)(pack("curr"), inputs)
    torch.testing.assert_close(packed.loss_sum, padded.loss_sum, rtol=1e-13, atol=0)
    assert packed.num_tokens == padded.num_tokens
    assert values(packed) == pytest.approx(values(padded), rel=1e-12)


def test_micro_batch_without_valid_tokens(config: ClippedPGLossConfig) -> None:
    batch = random_batch()
    batch["token_mask"][:] = 0
    curr = batch["curr"].requires_grad_()
    output = micro_batch_loss(config, batch)
    output.loss_sum.backward()
    assert output.loss_sum.item() == 0
    assert output.num_tokens.item() == 0
    assert curr.grad.abs().max() == 0
    assert values(output)["loss"] is None
    assert values(output)["num_valid_tokens"] == 0


# --- masks and garbage


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30, -1e30])
def test_garbage_at_masked_positions_changes_nothing(config: ClippedPGLossConfig, garbage: float) -> None:
    clean = random_batch()
    dirty: Batch = {name: x.clone() for name, x in clean.items()}
    masked = (clean["token_mask"] * clean["sample_mask"][:, None]) == 0
    for name in ("curr", "prev", "generation", "reference", "advantages", "staleness"):
        dirty[name][masked] = garbage
    loss, gradient, (output,) = loss_and_gradient(config, clean)
    dirty_loss, dirty_gradient, (dirty_output,) = loss_and_gradient(config, dirty)
    assert torch.equal(loss, dirty_loss)
    assert torch.equal(gradient, dirty_gradient)
    assert values(output) == values(dirty_output)


@pytest.mark.parametrize("name", ["curr", "prev", "generation", "reference"])
def test_non_finite_token_is_dropped_and_counted(name: str) -> None:
    for config in (ClippedPGLossConfig(), ClippedPGLossConfig(token_level_loss=False)):
        batch, without = random_batch(), random_batch()
        assert batch["token_mask"][0, 4] == batch["token_mask"][1, 3] == 1
        for where in ((0, 4), (1, 3)):  # row 1 has no other token
            batch[name][where] = -math.inf
            without["token_mask"][where] = 0
        loss, gradient, (output,) = loss_and_gradient(config, batch)
        expected, expected_gradient, (expected_output,) = loss_and_gradient(config, without)
        assert torch.equal(loss, expected)
        assert torch.equal(gradient, expected_gradient)
        assert values(output) == {**values(expected_output), "num_dropped_tokens": 2.0}


def test_reference_of_a_loss_without_kl_is_not_looked_at() -> None:
    batch = random_batch()
    batch["reference"][:] = math.nan
    assert values(micro_batch_loss(ClippedPGLossConfig(**NO_KL), batch))["num_dropped_tokens"] == 0


def test_tensors_of_other_shapes_are_refused_by_name() -> None:
    one = torch.zeros(3)
    sequences = SequenceIndex(torch.zeros(3, dtype=torch.int64), 1, torch.ones(1))
    inputs = LossInputs(
        one, one, one, torch.ones(3, 1), torch.ones(3), sequences
    )  # would broadcast to [3, 3]
    with pytest.raises(ValueError, match=r"advantages has the shape \[3, 1\] and curr_logprobs \[3\]"):
        ClippedPGLossFn(ClippedPGLossConfig())(one, inputs)


def test_missing_logprobs_are_refused_by_name() -> None:
    x = torch.zeros(2)
    sequences = SequenceIndex(torch.zeros(2, dtype=torch.int64), 1, torch.ones(1))
    with pytest.raises(ValueError, match="prev_logprobs is missing"):
        ClippedPGLossFn(ClippedPGLossConfig(**NO_KL))(x, LossInputs(None, x, None, x, x, sequences))
    with pytest.raises(ValueError, match=r"reference_policy_kl_penalty is 0.01"):
        ClippedPGLossFn(ClippedPGLossConfig())(x, LossInputs(x, x, None, x, x, sequences))


def test_on_policy_needs_no_previous_logprobs() -> None:
    batch = random_batch()
    config = ClippedPGLossConfig(force_on_policy_ratio=True)
    _, gradient, _ = loss_and_gradient(config, batch)
    batch["prev"] = torch.full_like(batch["prev"], math.nan)
    assert torch.equal(loss_and_gradient(config, batch)[1], gradient)


# --- ratios and corrections


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_log_ratio_gives_finite_value_and_gradient(
    config: ClippedPGLossConfig, log_ratio: float, advantage: float, dtype: torch.dtype
) -> None:
    prev = torch.full((5,), -101.0, dtype=dtype)
    keys = config.model_dump()
    output, gradient = one_sequence(prev + log_ratio, prev, prev + log_ratio / 2, advantage, **keys)
    assert output.loss_sum.isfinite()
    assert gradient.isfinite().all()
    assert all(math.isfinite(v) for v in values(output).values() if v is not None)


def test_gspo_weight_of_a_long_sequence_does_not_underflow() -> None:
    prev = torch.full((3000,), -1.001)
    keys = {"token_level_loss": False, "sequence_level_importance_ratios": True, **NO_KL,
            "use_importance_sampling_correction": True}  # fmt: skip
    output, _ = one_sequence(prev, prev, prev + 0.001, 1.0, **keys)
    assert values(output)["sampling_importance_ratio"] == pytest.approx(0.999, abs=1e-4)
    assert values(output)["loss"] == pytest.approx(-0.999, abs=1e-4)


def test_cispo_gradient_is_clipped_weight_times_advantage() -> None:
    curr = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    log_ratio = torch.tensor([0.5, -0.5, 0.1], dtype=torch.float64)
    keys = {"use_cispo": True, **NO_KL}
    output, gradient = one_sequence(curr, curr - log_ratio, curr, 2.0, **keys)
    expected = -2.0 * torch.tensor([1.2, 0.8, math.exp(0.1)], dtype=torch.float64) / 3
    torch.testing.assert_close(gradient, expected, rtol=1e-14, atol=0)
    assert values(output)["clip_fraction_low"] == values(output)["clip_fraction_high"] == pytest.approx(1 / 3)


def test_cispo_on_stale_data_carries_the_weight_against_the_generating_policy() -> None:
    curr = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    generation = curr - torch.tensor([0.3, -0.2], dtype=torch.float64)
    keys = {"use_cispo": True, "use_importance_sampling_correction": True, **NO_KL}
    _, gradient = one_sequence(curr, curr, generation, 1.0, **keys)
    torch.testing.assert_close(
        gradient, -torch.tensor([0.3, -0.2], dtype=torch.float64).exp() / 2, rtol=1e-14, atol=0
    )


@pytest.mark.parametrize("high", [None, 1.05])
@pytest.mark.parametrize("surrogate", ["disable_ppo_ratio", "use_cispo", "force_on_policy_ratio"])
def test_importance_weights_carry_no_gradient(surrogate: str, high: float | None) -> None:
    """The live log-probs are also the previous ones, and the engine's are a leaf: weights are constants even so."""
    truncation = {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": high}
    config = ClippedPGLossConfig(
        **{surrogate: True}, use_importance_sampling_correction=True, **(truncation if high else {}), **NO_KL
    )
    batch = random_batch()
    curr, generation = batch["curr"].requires_grad_(), batch["generation"].requires_grad_()
    output = micro_batch_loss(config, {**batch, "curr": curr, "prev": curr, "generation": generation})
    output.loss_sum.backward()
    weight = (curr - generation).detach().exp().clamp(max=high or math.inf)
    valid = batch["token_mask"] * batch["sample_mask"][:, None]
    torch.testing.assert_close(curr.grad, -batch["advantages"] * weight * valid, rtol=1e-13, atol=0)
    assert generation.grad is None or generation.grad.abs().max() == 0


def test_first_update_has_ratio_one_and_no_clipping() -> None:
    batch = random_batch()
    batch["prev"] = batch["curr"].clone()
    got = values(micro_batch_loss(ClippedPGLossConfig(ratio_clip_min=0.0, ratio_clip_max=0.0), batch))
    assert [got[f"probs_ratio{x}"] for x in ("", "_min", "_max", "_clamped")] == [1.0, 1.0, 1.0, 1.0]
    assert got["clip_fraction_low"] == got["clip_fraction_high"] == 0.0


def test_dual_clip_bounds_the_loss_of_a_negative_advantage_only() -> None:
    prev = torch.full((1,), -3.0, dtype=torch.float64)
    curr = prev + math.log(5.0)
    negative, gradient = one_sequence(curr, prev, prev, -2.0, ratio_clip_c=3.0, **NO_KL)
    assert values(negative)["loss"] == pytest.approx(6.0)
    assert gradient.item() == 0
    assert values(negative)["clip_fraction_dual"] == 1.0
    positive, _ = one_sequence(curr, prev, prev, 2.0, ratio_clip_c=3.0, **NO_KL)
    assert values(positive)["loss"] == pytest.approx(-2.4)
    assert values(positive)["clip_fraction_high"] == 1.0
    assert values(positive)["clip_fraction_dual"] == 0.0


def test_reinforce_has_no_ratio_metrics_and_kl_metric_needs_a_kl_term() -> None:
    batch = random_batch()
    reinforce = values(micro_batch_loss(ClippedPGLossConfig(disable_ppo_ratio=True), batch))
    assert not [name for name in reinforce if name.startswith(("probs_ratio", "clip_fraction"))]
    assert "kl_penalty" in reinforce
    in_reward = ClippedPGLossConfig(use_kl_in_reward=True)
    assert "kl_penalty" not in values(micro_batch_loss(in_reward, batch))
    assert not ClippedPGLossFn(in_reward).needs_reference_policy


# --- metrics that the golden files do not hold


def test_weight_staleness_and_sequence_error_metrics() -> None:
    log_weight = torch.tensor([math.log(2.0), math.log(0.5), 0.0, 0.0], dtype=torch.float64)
    prev = torch.full((4,), -1.0, dtype=torch.float64)
    inputs = LossInputs(
        prev, prev - log_weight, None, torch.ones(4), torch.tensor([1, 1, 1, 0]),
        SequenceIndex(torch.tensor([0, 0, 1, 1]), 2, torch.ones(2)),
        staleness=torch.tensor([0, 1, 2, 9]),
    )  # fmt: skip
    config = ClippedPGLossConfig(
        use_importance_sampling_correction=True, truncated_importance_sampling_type="tis",
        truncated_importance_sampling_ratio=1.5, **NO_KL,
    )  # fmt: skip
    got = values(ClippedPGLossFn(config)(prev, inputs))
    assert got["importance_weight_min"] == pytest.approx(0.5)
    assert got["importance_weight_max"] == pytest.approx(2.0)
    assert got["sampling_importance_ratio"] == pytest.approx((1.5 + 0.5 + 1.0) / 3)
    assert got["importance_weight_ess"] == pytest.approx(3.0**2 / (1.5**2 + 0.5**2 + 1.0))
    assert got["importance_weight_out_of_bounds"] == pytest.approx(1 / 3)
    assert (got["staleness_mean"], got["staleness_max"]) == (1.0, 2.0)
    assert got["seq_logprob_error_mean"] == pytest.approx((2.0 + 1.0) / 2)
    assert got["seq_logprob_error_max"] == pytest.approx(2.0)
