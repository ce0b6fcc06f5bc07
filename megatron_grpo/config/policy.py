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


class SequencePackingConfig(Config):
    """Micro-batches by tokens: whole sequences one after the other instead of rows padded to one length."""

    enabled: bool = False
    train_mb_tokens: PositiveInt | None = Field(
        None,
        description="tokens of a micro-batch over its CP ranks; null: train_micro_batch_size x "
        "max_total_sequence_length",
    )
    logprob_mb_tokens: PositiveInt | None = Field(
        None,
        description="the same for log-prob passes; null: logprob_batch_size x max_total_sequence_length",
    )


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
    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    precision: Literal["bf16", "fp32", "fp64"] = Field(
        "bf16",
        description="bf16 keeps fp32 main parameters; fp64 is refused for a run: doctor parallel compares in it",
    )
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig = SchedulerConfig()
    moe_aux_loss_coeff: NonNegativeFloat = Field(
        0.0,
        description="load-balancing loss of each sequence over its trained tokens; with experts, without packing",
    )
    moe_z_loss_coeff: NonNegativeFloat = Field(
        0.0,
        description="mean squared log-sum-exp of the router's logits over the trained tokens; with experts",
    )
    make_vocab_size_divisible_by: PositiveInt = Field(
        128, description="the vocabulary is padded to a multiple of this times TP"
    )
    recompute_granularity: Literal["full", "selective"] | None = Field(
        None, description="activations computed again in the backward pass: every layer, or attention only"
    )
    layer_spec: Literal["auto", "transformer_engine", "local"] = Field(
        "auto", description="auto: Transformer Engine when a GPU and TE are there"
    )

    @model_validator(mode="after")
    def _aux_loss_sees_sequences(self) -> PolicyConfig:
        if self.moe_aux_loss_coeff and self.sequence_packing.enabled:
            raise ValueError(
                f"moe_aux_loss_coeff is {self.moe_aux_loss_coeff} and sequence_packing.enabled is true; Megatron does "
                "not tell the router where packed sequences end: set the former to 0 or the latter to false"
            )
        return self

    @property
    def forward_batch_size(self) -> int:
        """Sequences per micro-batch of a forward-only pass."""
        return self.logprob_batch_size or self.train_micro_batch_size

    @property
    def longest_sequence(self) -> int:
        """``max_total_sequence_length`` with the padding that the layout needs."""
        multiple = self.parallel.sequence_multiple
        return -(-self.max_total_sequence_length // multiple) * multiple

    @property
    def train_mb_tokens(self) -> int | None:
        """Token budget of a packed micro-batch; None: micro-batches are padded."""
        return self._budget(self.sequence_packing.train_mb_tokens, self.train_micro_batch_size)

    @property
    def logprob_mb_tokens(self) -> int | None:
        """Token budget of a packed micro-batch of a forward-only pass; None: micro-batches are padded."""
        return self._budget(self.sequence_packing.logprob_mb_tokens, self.forward_batch_size)

    def _budget(self, tokens: int | None, sequences: int) -> int | None:
        if not self.sequence_packing.enabled:
            return None
        return tokens or sequences * self.longest_sequence

    @model_validator(mode="after")
    def _budgets_hold_a_sequence(self) -> PolicyConfig:
        packing, longest = self.sequence_packing, self.longest_sequence
        for key in ("train_mb_tokens", "logprob_mb_tokens"):
            value = getattr(packing, key)
            if packing.enabled and value is not None and value < longest:
                padding = longest - self.max_total_sequence_length
                raise ValueError(
                    f"sequence_packing.{key} {value} is below max_total_sequence_length "
                    f"{self.max_total_sequence_length}"
                    + (f" + {padding} of padding for context and sequence parallelism" if padding else "")
                    + f"; raise it to at least {longest}"
                )
            if not packing.enabled and value is not None:
                raise ValueError(
                    f"sequence_packing.{key} is {value} but sequence_packing.enabled is false; set enabled to true "
                    f"or remove {key}"
                )
        return self
