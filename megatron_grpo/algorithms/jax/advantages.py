"""Advantages from rewards: GRPO, GDPO and Reinforce++, with statistics per group id.

All arithmetic is in float64 if JAX has it enabled, else in float32. Of arrays that are sharded over ``Auto`` mesh
axes, ``jax.jit`` computes the statistics over all devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ops import segment_max, segment_sum

from megatron_grpo.config.grpo import GRPOConfig
from megatron_grpo.config.loss import ClippedPGLossConfig

_STD_EPSILON = 1e-6
_VARIANCE_FLOOR = 1e-8
_ROUNDING_STEPS = 64


class AdvantageInputs(NamedTuple):
    """The rows of the step.

    Attributes:
        rewards: ``[B]``, total rewards.
        group_ids: ``[B]`` integers, given when the prompt was drawn, in any order.
        sample_mask: ``[B]``, 0 for a row that is in no statistic.
        token_mask: ``[B, S]``, nonzero at response tokens.
        components: ``reward/<name>`` to ``[B]``, for gdpo.
        kl: ``[B, S]`` KL to the reference policy, without its coefficient, for ``use_kl_in_reward``; a token whose
            KL is NaN is left out.
    """

    rewards: Array
    group_ids: Array
    sample_mask: Array
    token_mask: Array
    components: Mapping[str, Array] | None = None
    kl: Array | None = None


class Advantages(NamedTuple):
    """``values`` ``[B, S]`` in the type of the rewards, 0 at masked tokens; counts of groups with a valid row.

    A degenerate group has one valid row, or one distinct value in every reward (component).
    """

    values: Array
    num_groups: Array
    num_degenerate_groups: Array


@dataclass(frozen=True)
class _Groups:
    """Of each row's group: ``count`` ``[B, 1]``; ``sum``, unbiased ``std``, ``degenerate`` ``[B, K]``."""

    count: Array
    sum: Array
    std: Array
    degenerate: Array
    num_groups: Array
    num_degenerate_groups: Array


def check_rewards(config: GRPOConfig, inputs: AdvantageInputs) -> None:
    """Looks at concrete values, so call it outside ``jax.jit``, before ``advantages``.

    Raises:
        ValueError: a reward (gdpo: a component) of a valid row is not finite; the message names it.
    """
    rewards = {"the reward": inputs.rewards}
    if config.adv_estimator.name == "gdpo":
        rewards = dict(_components(inputs))
    for name, values in sorted(rewards.items()):
        count = int((~jnp.isfinite(values) & (inputs.sample_mask != 0)).sum())
        if count:
            raise ValueError(
                f"{name} is not finite in {count} rollouts of this step; an environment must return a number, "
                "or report an error"
            )


def advantages(config: GRPOConfig, loss_config: ClippedPGLossConfig, inputs: AdvantageInputs) -> Advantages:
    """Advantages by ``grpo.adv_estimator``, clipped; a reward that is not finite spoils its whole group.

    Raises:
        ValueError: the KL or the components that the configuration needs are missing.
    """
    valid = inputs.sample_mask != 0  # [B]
    tokens = (inputs.token_mask != 0) & valid[:, None]  # [B, S]
    dtype = jnp.result_type(float)  # the widest that is enabled
    name = config.adv_estimator.name
    penalty = _penalty(loss_config, inputs, tokens, dtype)
    if name == "gdpo":
        if loss_config.use_kl_in_reward:
            raise ValueError("loss_fn.use_kl_in_reward is true with gdpo, whose rewards are components; "
                             "set it to false")  # fmt: skip
        components = _components(inputs)
        values = jnp.stack([components[key] for key in sorted(components)], 1)
    else:
        values = inputs.rewards[:, None]
    values = jnp.where(valid[:, None], values, 0).astype(dtype)  # [B, K]

    if name == "grpo":
        values = values - penalty.sum(1, keepdims=True)
    groups = _group_statistics(values, inputs.group_ids, valid)
    if name == "grpo":
        result = _group_relative(config, values, groups)
    elif name == "gdpo":
        result = _standardised(config, _group_relative(config, values, groups), groups, valid)
    else:
        result = _whitened(config, values, penalty, groups, tokens)

    low, high = config.advantage_clip_low, config.advantage_clip_high
    if low is not None or high is not None:
        result = jnp.clip(result, low, high)
    result = jnp.where(tokens, result, 0).astype(inputs.rewards.dtype)
    return Advantages(result, groups.num_groups, groups.num_degenerate_groups)


def _group_statistics(values: Array, group_ids: Array, valid: Array) -> _Groups:
    """Two passes (mean, then squared deviations from it), since E[x^2] - E[x]^2 cancels.

    ``values`` ``[B, K]``, 0 where not ``valid`` ``[B]``. There are at most B groups, which fixes the shapes.
    """
    rows = len(values)
    _, row = jnp.unique(group_ids, return_inverse=True, size=rows)  # [B], each row's group in 0 .. B - 1
    mask = valid[:, None]

    def per_group(x: Array) -> Array:
        return segment_sum(x, row, rows)

    count, total = per_group(mask.astype(values.dtype)), per_group(values)
    mean = total / jnp.maximum(count, 1)
    squares = per_group(jnp.where(mask, (values - mean[row]) ** 2, 0))
    std = jnp.sqrt(squares / jnp.maximum(count - 1, 1))
    # the minimum as the maximum of the negative: one pass for both
    both = jnp.where(mask, jnp.concatenate([values, -values], 1), -jnp.inf)
    high, minus_low = jnp.split(segment_max(both, row, rows), 2, 1)
    degenerate = (count <= 1) | (high == -minus_low)
    present = count[:, 0] > 0
    return _Groups(
        count[row], total[row], std[row], degenerate[row],
        present.sum(), (present & degenerate.all(1)).sum(),
    )  # fmt: skip


def _group_relative(config: GRPOConfig, values: Array, groups: _Groups) -> Array:
    """``[B, K]`` values less their baseline, optionally over the group's standard deviation."""
    if config.adv_estimator.use_leave_one_out_baseline:
        baseline = (groups.sum - values) / jnp.maximum(groups.count - 1, 1)
    else:
        baseline = groups.sum / jnp.maximum(groups.count, 1)
    relative = values - baseline
    if config.adv_estimator.normalize_rewards:
        # of the whole group: a leave-one-out deviation is next to 0 for the odd one out, and explodes
        relative = relative / (groups.std + _STD_EPSILON)
    return jnp.where(groups.degenerate, 0, relative)


def _standardised(config: GRPOConfig, parts: Array, groups: _Groups, valid: Array) -> Array:
    """``[B, 1]`` sum of the components' advantages, to mean 0 and unbiased deviation 1 over the valid rows.

    They may cancel in every row of the batch. What is then left is rounding, and the epsilon of the normalisation,
    neither of which must be scaled up to 1.
    """
    total = parts.sum(1, keepdims=True)
    mean, squares, count = _moments(total, valid[:, None])
    left = jnp.full_like(parts, _ROUNDING_STEPS * np.finfo(parts.dtype).eps)
    if config.adv_estimator.normalize_rewards:
        left += _STD_EPSILON / jnp.maximum(groups.std, np.finfo(parts.dtype).tiny)
    leftover = (left * jnp.abs(parts)).sum(1).max(initial=0)
    nothing = groups.degenerate.all(1, keepdims=True) | (squares <= count * leftover**2)
    std = jnp.sqrt(squares / jnp.maximum(count - 1, 1))
    return jnp.where(nothing, 0, (total - mean) / jnp.where(std > 0, std, 1))


def _whitened(config: GRPOConfig, values: Array, penalty: Array, groups: _Groups, tokens: Array) -> Array:
    """``[B, S]`` reward, less the group's mean, less the KL, whitened over the valid tokens of the batch."""
    if config.adv_estimator.minus_baseline:
        values = jnp.where(groups.degenerate, 0, values - groups.sum / jnp.maximum(groups.count, 1))
    per_token = values - penalty
    mean, squares, count = _moments(per_token, tokens)
    variance = squares / jnp.maximum(count, 1)
    return (per_token - mean) / jnp.sqrt(jnp.maximum(variance, _VARIANCE_FLOOR))


def _moments(x: Array, mask: Array) -> tuple[Array, Array, Array]:
    """Mean, sum of squared deviations and count of ``x`` where ``mask``."""
    count = mask.sum()
    mean = jnp.where(mask, x, 0).sum() / jnp.maximum(count, 1)
    return mean, jnp.where(mask, (x - mean) ** 2, 0).sum(), count


def _penalty(
    loss_config: ClippedPGLossConfig, inputs: AdvantageInputs, tokens: Array, dtype: jax.typing.DTypeLike
) -> Array:
    """``[B, S]`` the KL per token times its coefficient, 0 at masked tokens."""
    if not loss_config.use_kl_in_reward:
        return jnp.zeros(tokens.shape, dtype)
    if inputs.kl is None:
        raise ValueError(
            "loss_fn.use_kl_in_reward is true but the batch has no KL; compute the reference policy's log-probs, "
            "or set it to false"
        )
    known = tokens & jnp.isfinite(inputs.kl)
    return jnp.where(known, loss_config.reference_policy_kl_penalty * inputs.kl.astype(dtype), 0)


def _components(inputs: AdvantageInputs) -> Mapping[str, Array]:
    components = {
        name: values for name, values in (inputs.components or {}).items() if name.startswith("reward/")
    }
    if len(components) < 2:
        raise ValueError(
            f"grpo.adv_estimator.name is gdpo but there are {len(components)} reward components "
            f"({', '.join(sorted(components)) or 'none'}) and it needs two or more; set it to grpo for a single reward"
        )
    return components
