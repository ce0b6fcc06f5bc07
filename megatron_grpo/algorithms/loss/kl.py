"""Per-token estimators of KL(policy || reference) from its samples (Schulman, "Approximating KL")."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from megatron_grpo.algorithms.loss.importance_sampling import bounded_exp
from megatron_grpo.config.loss import ClippedPGLossConfig

KLType = Literal["k1", "k2", "k3"]


def kl_estimate(log_ratio: Tensor, kl_type: KLType) -> Tensor:
    """k1, k2 or k3 of ``log_ratio`` = log(reference / policy); same shape."""
    if kl_type == "k1":
        return -log_ratio
    if kl_type == "k2":
        return log_ratio.square() / 2
    # up to the largest exponent that does not overflow: where no clamp is configured, the gradient stays finite
    return log_ratio.clamp(max=math.log(torch.finfo(log_ratio.dtype).max) - 1).expm1() - log_ratio


def kl_penalty(
    config: ClippedPGLossConfig, logprobs: Tensor, reference_logprobs: Tensor, generation_logprobs: Tensor
) -> Tensor:
    """The KL term of the loss, before its coefficient; ``[tokens]``, differentiable in ``logprobs``.

    The expectation is under the current policy, so the estimate carries a weight with the value 1 (or, for
    tokens of an older policy, exp(c - g)) whose gradient is the score-function term. Where the input clamp
    bit, the weight is detached.
    """
    log_ratio = reference_logprobs - logprobs
    behaviour = generation_logprobs if config.use_on_policy_kl_approximation else logprobs.detach()
    weight = bounded_exp(logprobs - behaviour)
    if config.kl_input_clamp_value is not None:
        saturated = log_ratio.abs() > config.kl_input_clamp_value
        weight = torch.where(saturated, weight.detach(), weight)
    estimate = kl_estimate(_clamped(log_ratio, config.kl_input_clamp_value), config.reference_policy_kl_type)
    return _bounded(config, weight * estimate)


def kl_in_reward(config: ClippedPGLossConfig, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """The KL estimate that goes into the reward (``use_kl_in_reward``), before its coefficient; no gradient.

    Args:
        logprobs, reference_logprobs: same shape; of the policy before the step, and the reference.

    Returns:
        NaN where one of them is not finite: the estimators leave such a token out.
    """
    log_ratio = (reference_logprobs - logprobs).detach()
    estimate = kl_estimate(_clamped(log_ratio, config.kl_input_clamp_value), config.reference_policy_kl_type)
    return torch.where(log_ratio.isfinite(), _bounded(config, estimate), torch.nan)


def _bounded(config: ClippedPGLossConfig, kl: Tensor) -> Tensor:
    return _clamped(kl, config.kl_output_clamp_value).nan_to_num()


def _clamped(x: Tensor, limit: float | None) -> Tensor:
    return x if limit is None else x.clamp(-limit, limit)
