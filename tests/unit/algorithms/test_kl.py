from __future__ import annotations

import math

import pytest
import torch

from megatron_grpo.algorithms.loss.kl import kl_estimate, kl_in_reward, kl_penalty
from megatron_grpo.config.loss import ClippedPGLossConfig

REFERENCE = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()


def exact_kl_gradient(logits: torch.Tensor) -> torch.Tensor:
    logp = logits.log_softmax(0)
    (gradient,) = torch.autograd.grad((logp.exp() * (logp - REFERENCE)).sum(), logits)
    return gradient


@pytest.mark.parametrize("kl_type", ["k1", "k3"])
@pytest.mark.parametrize("stale", [False, True])
def test_expected_gradient_is_that_of_the_kl(kl_type: str, stale: bool) -> None:
    """Enumerates a vocabulary of 3; with stale samples the expectation is under the generating policy."""
    config = ClippedPGLossConfig(reference_policy_kl_type=kl_type, use_on_policy_kl_approximation=stale)
    logits = torch.tensor([0.4, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
    current = logits.log_softmax(0)
    sampler = torch.tensor([0.5, 0.1, 0.4], dtype=torch.float64).log() if stale else current.detach()
    expected_penalty = (sampler.exp() * kl_penalty(config, current, REFERENCE, sampler)).sum()
    (gradient,) = torch.autograd.grad(expected_penalty, logits)
    torch.testing.assert_close(gradient, exact_kl_gradient(logits), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("kl_type", "expected"), [("k1", -0.5), ("k2", 0.125), ("k3", math.exp(0.5) - 1.5)])
def test_estimates(kl_type: str, expected: float) -> None:
    assert kl_estimate(torch.tensor(0.5, dtype=torch.float64), kl_type).item() == pytest.approx(expected)


def test_clamps_bound_value_and_gradient() -> None:
    config = ClippedPGLossConfig(kl_input_clamp_value=2.0, kl_output_clamp_value=1.0)
    logprobs = torch.tensor([-50.0, -0.1], requires_grad=True)
    kl = kl_penalty(config, logprobs, torch.tensor([-0.1, -50.0]), torch.zeros(2))
    assert kl.tolist() == pytest.approx([1.0, 1.0])  # k3 of 2 is 4.39, of -2 it is 1.14
    kl.sum().backward()
    assert logprobs.grad.tolist() == [0.0, 0.0]


def test_weight_is_detached_where_the_input_clamp_bit() -> None:
    config = ClippedPGLossConfig(
        kl_input_clamp_value=2.0, kl_output_clamp_value=None, reference_policy_kl_type="k1"
    )
    logprobs = torch.tensor([-5.0, -1.0], requires_grad=True)
    kl_penalty(config, logprobs, torch.tensor([-1.0, -0.5]), torch.zeros(2)).sum().backward()
    assert logprobs.grad.tolist() == [0.0, pytest.approx(-0.5 + 1.0)]  # score term times k1, and its own


def test_kl_in_reward_is_clamped_finite_and_without_gradient() -> None:
    config = ClippedPGLossConfig(use_kl_in_reward=True)
    logprobs = torch.tensor([-1.0, -300.0, math.nan], requires_grad=True)
    kl = kl_in_reward(config, logprobs, torch.tensor([-0.5, -0.1, 0.0]))
    # NaN, which the estimators leave out: 0 or the bound would be taken for a KL
    assert kl.tolist() == pytest.approx([math.exp(0.5) - 1.5, 10.0, math.nan], nan_ok=True)
    assert not kl.requires_grad


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clamp", [20.0, None])
def test_a_log_prob_that_is_not_finite_has_no_kl(broken: float, clamp: float | None) -> None:
    config = ClippedPGLossConfig(
        use_kl_in_reward=True, kl_input_clamp_value=clamp, kl_output_clamp_value=clamp
    )
    one, other = torch.tensor([-1.0]), torch.tensor([broken])
    assert kl_in_reward(config, one, other).isnan().all()
    assert kl_in_reward(config, other, one).isnan().all()


@pytest.mark.parametrize("clamps", [(None, 10.0), (100.0, 10.0), (None, None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("on_policy", [False, True])
def test_exp_that_would_overflow_has_a_finite_gradient(
    clamps: tuple[float | None, float | None], dtype: torch.dtype, on_policy: bool
) -> None:
    config = ClippedPGLossConfig(
        kl_input_clamp_value=clamps[0],
        kl_output_clamp_value=clamps[1],
        use_on_policy_kl_approximation=on_policy,
    )
    logprobs = torch.tensor([-1000.0, -95.0, -0.5], dtype=dtype, requires_grad=True)
    kl = kl_penalty(config, logprobs, torch.zeros(3, dtype=dtype), torch.full((3,), -0.5, dtype=dtype))
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    assert kl.isfinite().all()
    assert gradient.isfinite().all()
    assert gradient[2] != 0
    if clamps[1] is not None:
        assert kl.tolist()[:2] == [10.0, 10.0]
        assert gradient.tolist()[:2] == [0.0, 0.0]


def test_k3_of_nearly_equal_log_probs_in_float32() -> None:
    """exp(l) - 1 - l would be all rounding, and negative for one of them."""
    small = torch.tensor([1e-4, -1e-4, 1e-6])
    assert kl_estimate(small, "k3").tolist() == pytest.approx([5e-9, 5e-9, 5e-13], rel=0.2)
