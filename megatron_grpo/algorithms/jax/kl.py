"""Per-token estimators of KL(policy || reference) from its samples (Schulman, "Approximating KL")."""

from __future__ import annotations

import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import stop_gradient

from megatron_grpo.algorithms.jax.importance_sampling import bound, bounded_exp
from megatron_grpo.config.loss import ClippedPGLossConfig


def kl_estimate(log_ratio: Array, kl_type: Literal["k1", "k2", "k3"]) -> Array:
    """k1, k2 or k3 of ``log_ratio`` = log(reference / policy); same shape."""
    if kl_type == "k1":
        return -log_ratio
    if kl_type == "k2":
        return log_ratio**2 / 2
    # the largest exponent that does not overflow: where nothing clamps the input, the gradient stays finite
    largest = math.log(np.finfo(log_ratio.dtype).max) - 1
    return jnp.expm1(jnp.where(log_ratio > largest, largest, log_ratio)) - log_ratio


def kl_penalty(
    config: ClippedPGLossConfig, logprobs: Array, reference_logprobs: Array, generation_logprobs: Array
) -> Array:
    """The KL term of the loss before its coefficient, differentiable in ``logprobs``; all shapes alike.

    The expectation is under the current policy, so the estimate carries a weight of value 1 (or, for tokens
    of an older policy, exp(c - g)) whose gradient is the score-function term. Where the input clamp bit, the
    weight is detached.
    """
    log_ratio = reference_logprobs - logprobs
    sampler = generation_logprobs if config.use_on_policy_kl_approximation else stop_gradient(logprobs)
    weight = bounded_exp(logprobs - sampler)
    limit = config.kl_input_clamp_value
    if limit is not None:
        weight = jnp.where(jnp.abs(log_ratio) > limit, stop_gradient(weight), weight)
        log_ratio = bound(log_ratio, -limit, limit)
    return _bounded_output(config, weight * kl_estimate(log_ratio, config.reference_policy_kl_type))


def kl_in_reward(config: ClippedPGLossConfig, logprobs: Array, reference_logprobs: Array) -> Array:
    """The KL estimate that goes into the reward (``use_kl_in_reward``), before its coefficient; no gradient.

    Args:
        logprobs, reference_logprobs: same shape; of the policy before the step, and the reference.

    Returns:
        NaN where one of them is not finite: the estimators leave such a token out.
    """
    log_ratio = stop_gradient(reference_logprobs - logprobs)
    limit = config.kl_input_clamp_value
    bounded = log_ratio if limit is None else bound(log_ratio, -limit, limit)
    estimate = _bounded_output(config, kl_estimate(bounded, config.reference_policy_kl_type))
    return jnp.where(jnp.isfinite(log_ratio), estimate, jnp.nan)


def _bounded_output(config: ClippedPGLossConfig, kl: Array) -> Array:
    limit = config.kl_output_clamp_value
    return jnp.nan_to_num(kl if limit is None else bound(kl, -limit, limit))
