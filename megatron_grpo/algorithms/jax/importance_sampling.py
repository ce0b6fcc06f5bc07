"""Importance weights between the training and the generating engine, and their truncation."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient

from megatron_grpo.config.loss import ClippedPGLossConfig

LOG_RATIO_LIMIT = 20.0


def bound(x: Array, low: float, high: float) -> Array:
    """``x`` clamped to ``[low, high]``, with gradient 1 on the bounds, as torch has it (``jnp.clip``: one half)."""
    return jnp.where(x < low, low, jnp.where(x > high, high, x))


def bounded_exp(log_ratio: Array) -> Array:
    """``exp`` of ``log_ratio`` clamped to [-20, 20]: value and gradient are always finite."""
    return jnp.exp(bound(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def sequence_mean(per_token: Array, valid: Array) -> Array:
    """``[B, 1]`` mean of ``[B, S]`` over the tokens of ``valid`` (bool); 0 for a row without any."""
    length = valid.sum(-1, keepdims=True)
    return jnp.where(valid, per_token, 0.0).sum(-1, keepdims=True) / jnp.maximum(length, 1)


class ImportanceWeights(NamedTuple):
    """Weights of the actor term; no gradient.

    Attributes:
        raw: exp(p - g) ``[B, S]``, or for sequence-level ratios exp of its token mean, ``[B, 1]``.
        truncated: what the actor term is multiplied by; shape of ``raw``.
        outside: bool, where the truncation took effect: ``[B, 1]`` if it judges sequences, else ``[B, S]``;
            None without a truncation.
    """

    raw: Array
    truncated: Array
    outside: Array | None


def importance_weights(config: ClippedPGLossConfig, log_weight: Array, valid: Array) -> ImportanceWeights:
    """The weights that ``config`` asks for.

    tis clamps a weight to [min or 0, max]; icepop gives 0 to the tokens, seq-mask-tis to the sequences whose
    (geometric mean) weight is outside [min, max], and leaves the others as they are.

    Args:
        log_weight: ``[B, S]`` p - g, finite.
        valid: ``[B, S]`` bool.
    """
    kind = config.truncated_importance_sampling_type
    log_weight = stop_gradient(log_weight)
    # a mean of logarithms: the product of a sequence's weights under- or overflows with its length
    of_sequence = bounded_exp(sequence_mean(log_weight, valid))
    raw = of_sequence if config.sequence_level_importance_ratios else bounded_exp(log_weight)
    high = config.truncated_importance_sampling_ratio
    if kind is None or high is None:
        return ImportanceWeights(raw, raw, None)
    low = config.truncated_importance_sampling_ratio_min or 0.0
    judged = of_sequence if kind == "seq-mask-tis" else raw
    outside = (judged < low) | (judged > high)
    truncated = bound(raw, low, high) if kind == "tis" else jnp.where(outside, 0.0, raw)
    return ImportanceWeights(raw, truncated, outside)


def sequence_logprob_error(prev_logprobs: Array, generation_logprobs: Array, token_mask: Array) -> Array:
    """``[B]`` mean of exp|p - g| over the tokens of ``token_mask``; all arguments ``[B, S]``.

    1 is perfect agreement, and the value of a sequence without response tokens. A difference that is not
    finite counts as the largest one, exp(20): broken log-probs must not look healthy.
    """
    valid = token_mask != 0
    difference = jnp.abs(jnp.where(valid, prev_logprobs - generation_logprobs, 0.0))
    error = bounded_exp(jnp.where(jnp.isnan(difference), LOG_RATIO_LIMIT, difference))
    return jnp.where(valid.any(-1), sequence_mean(error, valid)[:, 0], 1.0)
