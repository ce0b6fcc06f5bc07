"""Advantages from rewards: GRPO, GDPO and Reinforce++, with group statistics over all data parallel ranks.

All arithmetic is in float64; the result has the type of the rewards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_grpo.algorithms.group_statistics import GroupStatistics, all_reduce, group_statistics
from megatron_grpo.config.grpo import GRPOConfig
from megatron_grpo.config.loss import ClippedPGLossConfig
from megatron_grpo.parallel.reductions import Metrics, Reduction, masked_max, masked_mean, masked_min

REWARD_COMPONENT_PREFIX = "reward/"
_STD_EPSILON = 1e-6
_VARIANCE_FLOOR = 1e-8
_ROUNDING = 64 * torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class AdvantageInputs:
    """This data parallel rank's rows of the step; the rollouts of one group may be on several ranks.

    Worked example: two rollouts of one prompt, of which the second was right, 3 and 2 response tokens::

        AdvantageInputs(rewards=[0., 1.], group_ids=[7, 7], sample_mask=[1, 1],
                        token_mask=[[0, 1, 1, 1], [0, 1, 1, 0]])

    Attributes:
        rewards: ``[B]``, total rewards.
        group_ids: ``[B]`` int64, given when the prompt was drawn.
        sample_mask: ``[B]``, 0 for a row that is in no statistic.
        token_mask: ``[B, S]``, nonzero at response tokens.
        components: ``reward/<name>`` to ``[B]``; the same names on all ranks.
        kl: ``[B, S]`` KL to the reference policy, without its coefficient, for ``use_kl_in_reward``; a token whose
            KL is NaN is left out, and counted.

    Raises:
        ValueError: a shape or dtype that does not fit, by name.
    """

    rewards: Tensor
    group_ids: Tensor
    sample_mask: Tensor
    token_mask: Tensor
    components: Mapping[str, Tensor] = field(default_factory=dict)
    kl: Tensor | None = None

    def __post_init__(self) -> None:
        per_token = [self.token_mask] if self.kl is None else [self.token_mask, self.kl]
        if any(values.dim() != 2 or values.shape != self.token_mask.shape for values in per_token):
            raise ValueError(
                f"token_mask (and kl) have the shapes {[list(v.shape) for v in per_token]}; it must be [B, S]"
            )
        rows = len(self.token_mask)
        rewards = {"rewards": self.rewards, **self.components}
        for name, values in {"group_ids": self.group_ids, "sample_mask": self.sample_mask, **rewards}.items():
            if values.shape != (rows,):
                raise ValueError(f"{name} has the shape {list(values.shape)}; token_mask makes it [{rows}]")
        for name, values in rewards.items():
            if not values.is_floating_point():
                raise ValueError(
                    f"{name} is {values.dtype}, and advantages have its type; give floating-point rewards"
                )
        if self.group_ids.dtype != torch.int64:
            raise ValueError(f"group_ids is {self.group_ids.dtype}; it must be torch.int64")

    @property
    def valid_rows(self) -> Tensor:
        return self.sample_mask.bool()

    @property
    def valid_tokens(self) -> Tensor:
        return self.token_mask.bool() & self.valid_rows[:, None]


def get_gdpo_reward_component_keys(batch: Iterable[str]) -> list[str]:
    """The keys of ``batch`` that are reward components (``reward/<name>``), sorted."""
    return sorted(key for key in batch if key.startswith(REWARD_COMPONENT_PREFIX))


def make_advantage_estimator(
    config: GRPOConfig, loss_config: ClippedPGLossConfig, dp_group: ProcessGroup | None
) -> AdvantageEstimator:
    """The estimator of ``grpo.adv_estimator.name``."""
    estimators: dict[str, type[AdvantageEstimator]] = {
        "grpo": GRPOAdvantageEstimator,
        "gdpo": GDPOAdvantageEstimator,
        "reinforce_plus_plus": ReinforcePlusPlusAdvantageEstimator,
    }
    return estimators[config.adv_estimator.name](config, loss_config, dp_group)


class AdvantageEstimator(ABC):
    """What the estimators share; a call is collective over the data parallel group of the estimator."""

    def __init__(
        self, config: GRPOConfig, loss_config: ClippedPGLossConfig, dp_group: ProcessGroup | None
    ) -> None:
        self.config = config
        self.use_kl_in_reward = loss_config.use_kl_in_reward
        self.kl_coefficient = loss_config.reference_policy_kl_penalty
        self.dp_group = dp_group

    @abstractmethod
    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Metrics]:
        """Advantages ``[B, S]`` in the type of the rewards, 0 at masked tokens, and metrics.

        Raises:
            ValueError: on all ranks: a reward of a valid row is not finite, or an input is missing.
        """

    def _statistics(self, values: Tensor, inputs: AdvantageInputs) -> GroupStatistics:
        return group_statistics(values, inputs.group_ids, inputs.valid_rows, self.dp_group)

    def _group_relative(self, values: Tensor, groups: GroupStatistics) -> Tensor:
        """``[B, K]`` rewards less their baseline, optionally over the group's standard deviation."""
        config = self.config.adv_estimator
        if config.use_leave_one_out_baseline:
            baseline = (groups.sum - values) / (groups.count - 1).clamp(min=1)
        else:
            baseline = groups.sum / groups.count.clamp(min=1)
        advantages = values - baseline
        if config.normalize_rewards:
            # of the whole group: a leave-one-out deviation is next to 0 for the odd one out, and explodes
            advantages = advantages / (groups.std + _STD_EPSILON)
        return torch.where(groups.degenerate, 0.0, advantages)

    def _penalty(self, inputs: AdvantageInputs) -> Tensor:
        """``[B, S]`` the KL per token times its coefficient, 0 at masked tokens; ``[B, 1]`` zeros without it."""
        if not self.use_kl_in_reward:
            return inputs.rewards.new_zeros(len(inputs.rewards), 1, dtype=torch.float64)
        if inputs.kl is None:
            raise ValueError(
                "loss_fn.use_kl_in_reward is true but the batch has no KL; compute the reference policy's "
                "log-probs, or set it to false"
            )
        return torch.where(
            inputs.valid_tokens & inputs.kl.isfinite(), self.kl_coefficient * inputs.kl.double(), 0.0
        )

    def _check_finite(self, names: list[str], values: Tensor, inputs: AdvantageInputs) -> Tensor:
        """``[B, K]`` values in float64, 0 in rows that do not count; raises on all ranks or on none."""
        valid = inputs.valid_rows[:, None]
        broken = all_reduce((~values.isfinite() & valid).sum(0), self.dp_group).tolist()
        for name, count in zip(names, broken, strict=True):
            if count:
                raise ValueError(
                    f"{name} is not finite in {count} rollouts of this step; an environment must return a "
                    "number, or report an error"
                )
        return torch.where(valid, values.double(), 0.0)

    def _finish(
        self, advantages: Tensor, groups: GroupStatistics, inputs: AdvantageInputs
    ) -> tuple[Tensor, Metrics]:
        """Clip, spread over the valid tokens and report. ``advantages`` is ``[B, 1]`` or ``[B, S]``."""
        low, high = self.config.advantage_clip_low, self.config.advantage_clip_high
        if low is not None or high is not None:
            advantages = advantages.clamp(low, high)
        mask = inputs.valid_tokens
        result = torch.where(mask, advantages.to(inputs.rewards.dtype), 0.0)
        # of a row that has one advantage, the tokens need only be counted
        weights = mask.sum(1, keepdim=True, dtype=torch.int32) if advantages.size(1) == 1 else mask
        counted = weights > 0
        # Whole rows, the same on context parallel ranks: hence over sequences. The group counts are known to
        # all data parallel ranks: one of them reports them.
        reports = self.dp_group is None or self.dp_group.rank() == 0
        total = advantages.new_tensor(groups.num_groups * reports)
        degenerate = advantages.new_tensor(groups.num_degenerate_groups * reports)
        metrics: Metrics = {
            "num_groups": Reduction.total(total, "groups"),
            "num_degenerate_groups": Reduction.total(degenerate, "groups"),
            "groups/degenerate_fraction": Reduction.mean(degenerate, total, "groups"),
            "advantage_mean": Reduction.mean((advantages * weights).sum(), weights.sum(), "sequences"),
            "advantage_min": masked_min(advantages, counted, "sequences"),
            "advantage_max": masked_max(advantages, counted, "sequences"),
        }
        if self.use_kl_in_reward and inputs.kl is not None:
            finite = inputs.kl.isfinite()
            metrics["kl_penalty"] = masked_mean(inputs.kl, mask & finite, "sequences")
            metrics["num_dropped_kl_tokens"] = Reduction.total((mask & ~finite).sum(), "sequences")
        return result, metrics


class GRPOAdvantageEstimator(AdvantageEstimator):
    """Reward less the group's mean, or less the mean of the others (leave-one-out, RLOO).

    With ``use_kl_in_reward`` the reward first loses the coefficient times the KL of the whole response.
    """

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Metrics]:
        rewards = self._check_finite(["the reward"], inputs.rewards[:, None], inputs)  # [B, 1]
        rewards = rewards - self._penalty(inputs).sum(1, keepdim=True)
        groups = self._statistics(rewards, inputs)
        return self._finish(self._group_relative(rewards, groups), groups, inputs)


class GDPOAdvantageEstimator(AdvantageEstimator):
    """GRPO per reward component, summed, then brought to mean 0 and unbiased deviation 1 over the batch.

    Raises:
        ValueError: ``use_kl_in_reward``, fewer than two components, or one with a NaN or an infinity.
    """

    def __init__(
        self, config: GRPOConfig, loss_config: ClippedPGLossConfig, dp_group: ProcessGroup | None
    ) -> None:
        super().__init__(config, loss_config, dp_group)
        if self.use_kl_in_reward:
            raise ValueError(
                "loss_fn.use_kl_in_reward is true and grpo.adv_estimator.name is gdpo, whose rewards are components; "
                "set the first to false, and the KL stays in the loss"
            )

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Metrics]:
        names = get_gdpo_reward_component_keys(inputs.components)
        if len(names) < 2:
            raise ValueError(
                f"grpo.adv_estimator.name is gdpo but the environment returns {len(names)} reward components "
                f"({', '.join(names) or 'none'}) and it needs two or more; set it to grpo for a single reward"
            )
        rewards = self._check_finite(names, torch.stack([inputs.components[n] for n in names], 1), inputs)
        groups = self._statistics(rewards, inputs)  # [B, K]
        parts = self._group_relative(rewards, groups)
        return self._finish(self._standardised(parts, groups, inputs), groups, inputs)

    def _standardised(self, parts: Tensor, groups: GroupStatistics, inputs: AdvantageInputs) -> Tensor:
        """``[B, 1]`` from the advantages ``[B, K]`` of the components.

        They may cancel in every row of the batch. What is then left is rounding, and the epsilon of the normalisation,
        neither of which must be scaled up to 1.
        """
        total = parts.sum(1, keepdim=True)
        mean, squares, count = masked_moments(total, inputs.valid_rows[:, None], self.dp_group)
        left = torch.full_like(parts, _ROUNDING)
        if self.config.adv_estimator.normalize_rewards:
            left += _STD_EPSILON / groups.std.clamp(min=torch.finfo(parts.dtype).tiny)
        leftovers = (left * parts.abs()).sum(1)
        leftover = torch.cat([leftovers, parts.new_zeros(1)]).max()  # a rank may hold no row
        all_reduce(leftover, self.dp_group, dist.ReduceOp.MAX)
        nothing = groups.degenerate.all(1, keepdim=True) | (squares <= count * leftover.square())
        std = (squares / (count - 1).clamp(min=1)).sqrt()
        return torch.where(nothing, 0.0, (total - mean) / torch.where(std > 0, std, 1.0))


class ReinforcePlusPlusAdvantageEstimator(AdvantageEstimator):
    """Reward, less the group's mean, less the KL per token, whitened over the valid tokens of the batch."""

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Metrics]:
        rewards = self._check_finite(["the reward"], inputs.rewards[:, None], inputs)  # [B, 1]
        groups = self._statistics(rewards, inputs)
        if self.config.adv_estimator.minus_baseline:
            centred = rewards - groups.sum / groups.count.clamp(min=1)
            rewards = torch.where(groups.degenerate, 0.0, centred)
        per_token = rewards - self._penalty(inputs)  # [B, S]
        mean, squares, count = masked_moments(per_token, inputs.valid_tokens, self.dp_group)
        variance = squares / count.clamp(min=1)
        return self._finish((per_token - mean) * variance.clamp(min=_VARIANCE_FLOOR).rsqrt(), groups, inputs)


def masked_moments(x: Tensor, mask: Tensor, dp_group: ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, sum of squared deviations and count of ``x`` where ``mask``, over all ranks, in two passes."""
    sums = all_reduce(torch.stack([torch.where(mask, x, 0.0).sum(), mask.sum().to(x.dtype)]), dp_group)
    mean, count = sums[0] / sums[1].clamp(min=1), sums[1]
    squares = all_reduce(torch.where(mask, (x - mean).square(), 0.0).sum(), dp_group)
    return mean, squares, count
