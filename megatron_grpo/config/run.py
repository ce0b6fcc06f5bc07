"""The whole configuration of a run: ``RunConfig``, and the rules that cross sections."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatron_grpo.config.base import Config
from megatron_grpo.config.data import DataConfig, EnvConfig
from megatron_grpo.config.generation import GenerationConfig
from megatron_grpo.config.grpo import GRPOConfig
from megatron_grpo.config.loss import ClippedPGLossConfig
from megatron_grpo.config.policy import PolicyConfig


class CheckpointingConfig(Config):
    """Megatron distributed checkpoints under ``<run_dir>/checkpoints``."""

    save_period: NonNegativeInt = Field(0, description="every N steps; 0: only at the end")
    keep_latest_k: PositiveInt = Field(2, description="older checkpoints are deleted")
    resume: Literal["auto", "never"] = Field("auto", description="auto: continue from the latest checkpoint")
    export_hf: bool = Field(True, description="write a Hugging Face directory at the end of the run")


class LoggerConfig(Config):
    """Where metrics go, besides the console and ``metrics.jsonl``."""

    tensorboard: bool = Field(True, description="also write event files to run_dir/tensorboard")
    report: bool = Field(True, description="write report.html at the end of the run")


class RunConfig(Config):
    """One training run."""

    run_dir: Path = Field(description="everything the run writes goes below this directory")
    distributed_timeout_s: PositiveFloat = Field(600, description="deadline of every collective")
    grpo: GRPOConfig
    loss_fn: ClippedPGLossConfig = ClippedPGLossConfig()
    policy: PolicyConfig
    generation: GenerationConfig
    data: DataConfig
    env: EnvConfig
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    logger: LoggerConfig = LoggerConfig()

    @property
    def optimizer_steps_per_rollout(self) -> int:
        return self.grpo.rollouts_per_step // self.policy.train_global_batch_size

    @model_validator(mode="after")
    def _sections_agree(self) -> RunConfig:
        rollouts, batch = self.grpo.rollouts_per_step, self.policy.train_global_batch_size
        if rollouts % batch:
            raise ValueError(
                f"policy.train_global_batch_size {batch} does not divide grpo.num_prompts_per_step "
                f"{self.grpo.num_prompts_per_step} x grpo.num_generations_per_prompt "
                f"{self.grpo.num_generations_per_prompt} = {rollouts}; use a divisor of it"
            )
        if self.loss_fn.force_on_policy_ratio and rollouts != batch:
            raise ValueError(
                f"loss_fn.force_on_policy_ratio needs one optimizer step per rollout batch, but "
                f"policy.train_global_batch_size {batch} makes {rollouts // batch} of {rollouts} rollouts; "
                f"set it to {rollouts}"
            )
        if self.generation.max_new_tokens >= self.policy.max_total_sequence_length:
            raise ValueError(
                f"generation.max_new_tokens {self.generation.max_new_tokens} leaves no room for a prompt in "
                f"policy.max_total_sequence_length {self.policy.max_total_sequence_length}; lower the first or "
                "raise the second"
            )
        if self.loss_fn.use_kl_in_reward and self.grpo.adv_estimator.name == "gdpo":
            raise ValueError(
                "loss_fn.use_kl_in_reward is true and grpo.adv_estimator.name is gdpo, which has no single reward "
                "to put the KL into; use the KL penalty of the loss (use_kl_in_reward: false)"
            )
        if (
            self.grpo.val_at_start or self.grpo.val_at_end or self.grpo.val_period
        ) and not self.data.validation:
            raise ValueError(
                "grpo.val_period, val_at_start or val_at_end ask for an evaluation but data.validation is null; "
                "give a validation dataset or switch them off"
            )
        return self

    def check_world_size(self, world_size: int) -> None:
        """Rules that need the number of ranks.

        Raises:
            ValueError: names the keys, the values and the mend.
        """
        dp = self.policy.parallel.data_parallel_size(world_size)
        for key, value in (
            ("grpo.num_prompts_per_step", self.grpo.num_prompts_per_step),
            ("policy.train_global_batch_size", self.policy.train_global_batch_size),
        ):
            if value % dp:
                raise ValueError(
                    f"{key} {value} is not a multiple of the data-parallel size {dp} (world size {world_size} over "
                    f"{self.policy.parallel.model_parallel_size} ranks per replica); use a multiple of {dp}"
                )
