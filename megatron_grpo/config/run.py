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
    distributed_timeout_s: PositiveFloat = Field(
        1800,
        description="deadline of every collective; other ranks wait in one while a leader samples, so it exceeds "
        "generation.vllm.request_timeout_s + env.timeout_s",
    )
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
        for key in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
            if (value := getattr(self.policy, key)) and not self.loss_fn.token_level_loss:
                raise ValueError(
                    f"policy.{key} is {value} and loss_fn.token_level_loss is false; the router's losses are means "
                    "over tokens: set the former to 0 or the latter to true"
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
        if self.grpo.adv_estimator.name == "gdpo" and self.env.name == "reasoning_gym":
            raise ValueError(
                "grpo.adv_estimator.name is gdpo and env.name is reasoning_gym, which gives one reward and no "
                "components; set the first to grpo, or env.name to custom with a class that returns two or more"
            )
        if (
            self.grpo.val_at_start or self.grpo.val_at_end or self.grpo.val_period
        ) and not self.data.validation:
            raise ValueError(
                "grpo.val_period, val_at_start or val_at_end ask for an evaluation but data.validation is null; "
                "give a validation dataset or switch them off"
            )
        return self

    @model_validator(mode="after")
    def _engines_have_the_precision(self) -> RunConfig:
        if self.policy.precision == "fp64":
            raise ValueError(
                "policy.precision is fp64, which engines do not sample in; set it to fp32 (megatron-grpo doctor "
                "parallel computes in float64 whatever the precision of the run)"
            )
        return self

    @model_validator(mode="after")
    def _collectives_outwait_leaders(self) -> RunConfig:
        vllm, env = self.generation.vllm, self.env
        for first, second, engine_s, env_s in (
            ("generation.vllm.request_timeout_s", "env.timeout_s", vllm.request_timeout_s, env.timeout_s),
            (
                "generation.vllm.startup_timeout_s", "env.startup_timeout_s",
                vllm.startup_timeout_s, env.startup_timeout_s,
            ),
        ):  # fmt: skip
            if self.distributed_timeout_s <= engine_s + env_s:
                raise ValueError(
                    f"distributed_timeout_s {self.distributed_timeout_s:g} must exceed {first} {engine_s:g} + "
                    f"{second} {env_s:g} = {engine_s + env_s:g}: other ranks wait in a collective while a leader "
                    "waits for these; raise the first or lower the others"
                )
        return self

    @model_validator(mode="after")
    def _training_is_synchronous(self) -> RunConfig:
        if not self.grpo.async_grpo.enabled:
            return self
        if not self.loss_fn.use_importance_sampling_correction:
            raise ValueError(
                "grpo.async_grpo.enabled is true and loss_fn.use_importance_sampling_correction is false: rollouts "
                "of older weights need the correction; set the latter to true"
            )
        raise ValueError(
            "grpo.async_grpo.enabled is true, but this version trains synchronously only; set it to false"
        )

    def check_world_size(self, world_size: int) -> None:
        """Rules that need the number of ranks.

        Raises:
            ValueError: names the keys, the values and the mend.
        """
        dp = self.policy.parallel.data_parallel_size(world_size)
        packed = self.policy.sequence_packing.enabled
        for key, value in (
            ("grpo.num_prompts_per_step", self.grpo.num_prompts_per_step),
            ("policy.train_global_batch_size", self.policy.train_global_batch_size),
        ):
            if value % dp and not (packed and key == "policy.train_global_batch_size"):
                raise ValueError(
                    f"{key} {value} is not a multiple of the data-parallel size {dp} (world size {world_size} over "
                    f"{self.policy.parallel.model_parallel_size} ranks per replica); use a multiple of {dp}"
                )
        if packed:
            return  # replicas may hold different numbers of sequences, and micro-batches too
        for size_key, size, total_key, total in (
            (
                "policy.train_micro_batch_size", self.policy.train_micro_batch_size,
                "policy.train_global_batch_size", self.policy.train_global_batch_size,
            ),
            (
                "policy.logprob_batch_size" if self.policy.logprob_batch_size else "policy.train_micro_batch_size",
                self.policy.forward_batch_size,
                "grpo.num_prompts_per_step x grpo.num_generations_per_prompt", self.grpo.rollouts_per_step,
            ),
        ):  # fmt: skip
            self._check_micro_batches(size_key, size, total_key, total, dp)

    def _check_micro_batches(self, size_key: str, size: int, total_key: str, total: int, dp: int) -> None:
        """Megatron's schedules take micro-batches of one size, and interleaving takes PP at a time."""
        parallel, rows = self.policy.parallel, total // dp
        interleaved = (parallel.virtual_pipeline_model_parallel_size or 1) > 1
        at_a_time = parallel.pipeline_model_parallel_size if interleaved else 1
        works = [s for s in range(1, rows + 1) if rows % (s * at_a_time) == 0]
        if size in works:
            return
        what = f"{total_key} {total} / data-parallel size {dp} = {rows} sequences"
        why = (
            f" into a multiple of PP {at_a_time} micro-batches, which interleaving needs"
            if interleaved
            else ""
        )
        if not works:
            raise ValueError(
                f"no {size_key} divides {what}{why}; use a total that is a multiple of {dp * at_a_time}"
            )
        near = [s for s in works if s < size][-1:] + [s for s in works if s > size][:1]
        raise ValueError(f"{size_key} {size} does not divide {what}{why}; use {' or '.join(map(str, near))}")
