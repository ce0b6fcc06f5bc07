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
    assert kl.tolist() == pytest.approx([math.exp(0.5) - 1.5, 10.0, 0.0])
    assert not kl.requires_grad
