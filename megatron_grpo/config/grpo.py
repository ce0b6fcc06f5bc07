"""``grpo``: the algorithm around the loss - steps, groups, advantages, the log-prob error monitor."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megatron_grpo.config.base import Config


class AdvEstimatorConfig(Config):
    """Which advantage estimator, and its switches."""

    name: Literal["grpo", "gdpo", "reinforce_plus_plus"] = "grpo"
    use_leave_one_out_baseline: bool = Field(True, description="grpo and gdpo: the others' mean (RLOO)")
    normalize_rewards: bool = Field(True, description="grpo and gdpo: divide by the group's std")
    minus_baseline: bool = Field(True, description="reinforce_plus_plus: subtract the group mean first")


class AsyncGRPOConfig(Config):
    """Rollouts by weights that are some steps old; not in this version, which trains synchronously."""

    enabled: bool = Field(False, description="must be false: this version trains synchronously")
    max_trajectory_age_steps: PositiveInt = Field(
        1, description="oldest weights that a rollout may come from"
    )


class GRPOConfig(Config):
    """The outer loop."""

    seed: NonNegativeInt = Field(
        0, lt=2**31, description="of prompt order, sampling and the cut into mini-batches"
    )
    max_num_steps: PositiveInt = Field(description="rollout steps of the whole run, resumed or not")
    num_prompts_per_step: PositiveInt = Field(description="groups per step; a multiple of the DP size")
    num_generations_per_prompt: PositiveInt = Field(ge=2, description="rollouts per group")
    adv_estimator: AdvEstimatorConfig = AdvEstimatorConfig()
    use_dynamic_sampling: bool = Field(
        False,
        description="sample until num_prompts_per_step groups have more than one distinct reward; those left "
        "over train in the next step",
    )
    dynamic_sampling_max_gen_batches: PositiveInt = Field(
        10,
        description="rounds of num_prompts_per_step groups in a step; after the last, groups without a signal fill it",
    )
    async_grpo: AsyncGRPOConfig = AsyncGRPOConfig()
    advantage_clip_low: float | None = Field(None, description="advantages are clamped to it from below")
    advantage_clip_high: float | None = Field(None, description="advantages are clamped to it from above")
    seq_logprob_error_threshold: float = Field(
        1.5, gt=1.0, description="flags sequences whose mean exp(abs(trainer - engine log-prob)) exceeds it"
    )
    seq_logprob_error_action: Literal["flag", "mask", "stop"] = Field(
        "flag",
        description="flag: warn; mask: leave them out of the step; stop: end the run, see max_fraction",
    )
    seq_logprob_error_max_fraction: float = Field(
        0.1, ge=0.0, le=1.0, description="action stop: stop once this fraction of sequences is exceeded"
    )
    val_period: NonNegativeInt = Field(0, description="greedy evaluation every N steps; 0: none in between")
    val_at_start: bool = Field(False, description="greedy evaluation before the first step")
    val_at_end: bool = Field(False, description="greedy evaluation after the last step")

    @property
    def rollouts_per_step(self) -> int:
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @model_validator(mode="after")
    def _clip_bounds_ordered(self) -> GRPOConfig:
        low, high = self.advantage_clip_low, self.advantage_clip_high
        if low is not None and high is not None and low > high:
            raise ValueError(f"advantage_clip_low {low} is above advantage_clip_high {high}; swap them")
        for key, bound, wrong in (("low", low, (low or 0) > 0), ("high", high, (high or 0) < 0)):
            if wrong or low == high == 0:
                raise ValueError(
                    f"advantage_clip_{key} is {bound}: 0 must lie inside the bounds, and they must differ, or groups "
                    "without a signal would train and the others would not; use bounds around 0, for example -5 and 5"
                )
        return self

    @model_validator(mode="after")
    def _dynamic_sampling_is_synchronous(self) -> GRPOConfig:
        if self.use_dynamic_sampling and self.async_grpo.enabled:
            raise ValueError(
                "use_dynamic_sampling is true and async_grpo.enabled is true: dynamic sampling decides per step, "
                "which asynchronous rollouts do not have; set one of them to false"
            )
        return self
