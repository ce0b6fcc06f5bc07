"""One clipped policy-gradient loss for PPO, GRPO, RLOO, DAPO, GSPO, CISPO, dual clip and REINFORCE."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient

from megatron_grpo.algorithms.jax.importance_sampling import (
    bound,
    bounded_exp,
    importance_weights,
    sequence_mean,
)
from megatron_grpo.algorithms.jax.kl import kl_penalty
from megatron_grpo.config.loss import ClippedPGLossConfig


class LossInputs(NamedTuple):
    """What a batch of whole sequences knows beside the current log-probs; ``[B, S]`` unless said otherwise.

    Entry t belongs to input token t: its log-prob is that of token t given the tokens before it. Values at
    masked tokens are never looked at.

    Attributes:
        prev_logprobs: under the training engine before the step; None only with ``force_on_policy_ratio``.
        generation_logprobs: under the generating engine.
        reference_policy_logprobs: None if the loss has no KL term.
        advantages: one value per token.
        token_mask: nonzero at the response tokens that train.
        sample_mask: ``[B]``, 0 for a sequence that is in no loss.
    """

    prev_logprobs: Array | None
    generation_logprobs: Array
    reference_policy_logprobs: Array | None
    advantages: Array
    token_mask: Array
    sample_mask: Array


class LossOutput(NamedTuple):
    """Scalars of one micro-batch: the loss is the sum of all ``loss_sum`` over the sum of all ``num_tokens``.

    For a mean over sequences, tokens come divided by the length of their sequence and ``num_tokens`` is the
    number of sequences. ``actor_sum`` and ``kl_sum`` (before its coefficient) have the same denominator.
    ``num_dropped`` counts the unmasked tokens that were left out because a log-prob is not finite.
    """

    loss_sum: Array
    num_tokens: Array
    actor_sum: Array
    kl_sum: Array
    num_dropped: Array


def clipped_pg_loss(config: ClippedPGLossConfig, curr_logprobs: Array, inputs: LossInputs) -> LossOutput:
    """The loss that ``config`` describes; differentiable in ``curr_logprobs`` ``[B, S]``.

    Of arrays that are sharded over ``Auto`` mesh axes, ``jax.jit`` computes the sums over all devices.

    Raises:
        ValueError: an input that ``config`` needs is None.
    """
    tokens, valid, num_dropped = _finite_tokens(config, curr_logprobs, inputs)
    c = tokens["curr"]
    p = stop_gradient(c) if config.force_on_policy_ratio else tokens["prev"]
    log_ratio = c - p
    if config.sequence_level_importance_ratios:
        log_ratio = sequence_mean(log_ratio, valid)  # [B, 1]
    actor = _surrogate(config, c, bounded_exp(log_ratio), tokens["advantages"])
    if config.use_importance_sampling_correction:
        actor = actor * importance_weights(config, p - tokens["generation"], valid).truncated

    kl = jnp.zeros_like(c)
    if "reference" in tokens:
        kl = kl_penalty(config, c, tokens["reference"], tokens["generation"])

    length = valid.sum(-1)  # [B]
    if config.token_level_loss:
        share, num_tokens = jnp.ones((len(length), 1), c.dtype), length.sum()
    else:
        share, num_tokens = 1 / jnp.maximum(length, 1).astype(c.dtype)[:, None], (length > 0).sum()
    actor_sum, kl_sum = ((share * jnp.where(valid, term, 0)).sum() for term in (actor, kl))
    loss_sum = actor_sum + config.reference_policy_kl_penalty * kl_sum
    return LossOutput(loss_sum, num_tokens, stop_gradient(actor_sum), stop_gradient(kl_sum), num_dropped)


def _surrogate(config: ClippedPGLossConfig, c: Array, ratio: Array, advantages: Array) -> Array:
    """``[B, S]`` actor term per token, before importance weights; ``ratio`` ``[B, S]`` or ``[B, 1]``."""
    if config.disable_ppo_ratio:
        return -advantages * c
    clipped = bound(ratio, 1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
    if config.use_cispo:
        return -advantages * stop_gradient(clipped) * c
    plain, pessimistic = -advantages * ratio, -advantages * clipped
    # not jnp.maximum, which halves the gradient between two equal terms
    surrogate = jnp.where(plain >= pessimistic, plain, pessimistic)
    if config.ratio_clip_c is not None:
        ceiling = -advantages * config.ratio_clip_c
        surrogate = jnp.where((advantages < 0) & (surrogate > ceiling), ceiling, surrogate)
    return surrogate


def _finite_tokens(
    config: ClippedPGLossConfig, curr_logprobs: Array, inputs: LossInputs
) -> tuple[dict[str, Array], Array, Array]:
    """Inputs with 0 at all tokens that do not count, so that no garbage enters any arithmetic or gradient.

    Returns:
        Arrays by name; ``[B, S]`` bool of the tokens that count; how many were dropped as not finite.
    """
    logprobs = {"curr": curr_logprobs, "generation": inputs.generation_logprobs}
    if not config.force_on_policy_ratio:
        logprobs["prev"] = _required(inputs.prev_logprobs, "prev_logprobs", "force_on_policy_ratio to true")
    if config.reference_policy_kl_penalty > 0 and not config.use_kl_in_reward:
        logprobs["reference"] = _required(
            inputs.reference_policy_logprobs, "reference_policy_logprobs", "reference_policy_kl_penalty to 0"
        )
    asked = (inputs.token_mask != 0) & (inputs.sample_mask != 0)[:, None]
    valid = asked
    for values in logprobs.values():
        valid &= jnp.isfinite(values)
    dtype = jnp.promote_types(curr_logprobs.dtype, jnp.float32)
    arrays = {**logprobs, "advantages": inputs.advantages}
    clean = {name: jnp.where(valid, values, 0).astype(dtype) for name, values in arrays.items()}
    return clean, valid, (asked & ~valid).sum()


def _required(values: Array | None, name: str, mend: str) -> Array:
    if values is None:
        raise ValueError(f"{name} is None but the loss needs it; compute it, or set loss_fn.{mend}")
    return values
