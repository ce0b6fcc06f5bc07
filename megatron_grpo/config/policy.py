"""``policy``: the model, its layout, micro-batches, optimizer and schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatron_grpo.config.base import Config
from megatron_grpo.config.parallel import ParallelConfig


class OptimizerConfig(Config):
    """Adam with decoupled weight decay; names are Megatron's."""

    lr: PositiveFloat = Field(description="peak learning rate")
    min_lr: NonNegativeFloat = Field(0.0, description="learning rate at the end of the decay")
    weight_decay: NonNegativeFloat = 0.01
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    adam_eps: PositiveFloat = 1e-8
    clip_grad: NonNegativeFloat = Field(1.0, description="global gradient norm; 0 disables")
    use_distributed_optimizer: bool = Field(
        True, description="optimizer state and main parameters are split over DP"
    )

    @model_validator(mode="after")
    def _min_below_lr(self) -> OptimizerConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is above lr {self.lr}; lower min_lr")
        return self


class SchedulerConfig(Config):
    """Learning rate over optimizer steps (not rollout steps)."""

    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_iters: NonNegativeInt = Field(0, description="linear warm-up from 0, in optimizer steps")
    lr_decay_iters: PositiveInt | None = Field(None, description="null: all optimizer steps of the run")


class PolicyConfig(Config):
    """The trained model."""

    model_path: Path = Field(description="Hugging Face directory: config.json, tokenizer, safetensors")
    max_total_sequence_length: PositiveInt = Field(description="prompt plus response, in tokens")
    train_global_batch_size: PositiveInt = Field(description="sequences per optimizer step, over all ranks")
    train_micro_batch_size: PositiveInt = Field(
        1, description="sequences per forward and backward pass of a replica"
    )
    logprob_batch_size: PositiveInt | None = Field(
        None, description="sequences per log-prob pass; null: as training"
    )
    precision: Literal["bf16", "fp32"] = Field("bf16", description="bf16 keeps fp32 main parameters")
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig = SchedulerConfig()
    make_vocab_size_divisible_by: PositiveInt = Field(
        128, description="the vocabulary is padded to a multiple of this times TP"
    )
    recompute_granularity: Literal["full", "selective"] | None = Field(
        None, description="activations computed again in the backward pass: every layer, or attention only"
    )
    layer_spec: Literal["auto", "transformer_engine", "local"] = Field(
        "auto", description="auto: Transformer Engine when a GPU and TE are there"
    )

    @property
    def forward_batch_size(self) -> int:
        """Sequences per micro-batch of a forward-only pass."""
        return self.logprob_batch_size or self.train_micro_batch_size
