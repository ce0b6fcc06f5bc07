"""Megatron's data-parallel wrapper, optimizer and learning-rate schedule around the model chunks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron_grpo.config import PolicyConfig

log = logging.getLogger(__name__)


class LossContractError(ValueError):
    """Megatron is set up so that the loss or its gradient would be scaled wrongly."""


class NonFiniteGradientError(FloatingPointError):
    """A gradient is NaN or inf; raised on all ranks before the optimizer changes any weight."""


def wrap_ddp(
    chunks: Sequence[torch.nn.Module], config: TransformerConfig, policy: PolicyConfig
) -> list[DistributedDataParallel]:
    """Wrap model chunks in Megatron DDP; bf16 chunks in ``Float16Module`` first.

    Weights must be loaded before: the optimizer copies its float32 main parameters from them.
    """
    bf16 = policy.precision == "bf16"
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=policy.optimizer.use_distributed_optimizer,
        grad_reduce_in_fp32=policy.precision != "fp64",
        check_for_nan_in_grad=False,  # one rank alone would raise; require_finite_gradients raises on all
    )
    wrapped = [
        DistributedDataParallel(
            config, ddp_config, Float16Module(config, chunk) if bf16 else chunk, disable_bucketing=index > 0
        )
        for index, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    return wrapped


def build_optimizer(
    chunks: Sequence[DistributedDataParallel],
    config: TransformerConfig,
    policy: PolicyConfig,
    total_optimizer_steps: int,
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Adam (the fused one of Transformer Engine or Apex when present, else torch's) and its schedule.

    Args:
        total_optimizer_steps: default length of the decay, in optimizer steps.
    """
    opt = policy.optimizer
    bf16 = policy.precision == "bf16"
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=opt.lr,
            min_lr=opt.min_lr,
            weight_decay=opt.weight_decay,
            adam_beta1=opt.adam_beta1,
            adam_beta2=opt.adam_beta2,
            adam_eps=opt.adam_eps,
            clip_grad=opt.clip_grad,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=opt.use_distributed_optimizer,
        ),
        list(chunks),
    )
    if dist.get_rank() == 0:
        inner = getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer
        log.info("optimizer: %s of %s", type(inner).__name__, type(inner).__module__)
    decay_iters = policy.scheduler.lr_decay_iters or total_optimizer_steps
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=opt.lr,
        min_lr=opt.min_lr,
        lr_warmup_steps=policy.scheduler.lr_warmup_iters,
        lr_decay_steps=max(decay_iters, policy.scheduler.lr_warmup_iters + 1),
        lr_decay_style=policy.scheduler.lr_decay_style,
        start_wd=opt.weight_decay,
        end_wd=opt.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # a resumed run follows its configuration; the checkpoint gives the position in the schedule only
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    config.finalize_model_grads_func = _finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return optimizer, scheduler


def _finalize_model_grads(
    model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **kwargs: Any
) -> None:
    # Megatron takes the reciprocal in float32 when the count is an integer
    finalize_model_grads(model, None if num_tokens is None else num_tokens.double(), **kwargs)


def ensure_state(optimizer: MegatronOptimizer) -> None:
    """Give an optimizer that has not taken a step the state it starts from: it could not be saved without one.

    Adam makes its state in its first step; this one has gradients and a learning rate of 0, and is not counted.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        if inner is None or inner.state:
            continue
        rates = [group["lr"] for group in inner.param_groups]
        for group in inner.param_groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        inner.step()
        inner.zero_grad()
        for group, rate in zip(inner.param_groups, rates, strict=True):
            group["lr"] = rate
            if "step" in group:  # fused Adam counts per group, torch's per parameter
                group["step"] = 0
        for state in inner.state.values():
            if "step" in state:
                state["step"].zero_()


def check_loss_contract(chunks: Sequence[DistributedDataParallel]) -> None:
    """Megatron must sum gradients and divide once, by the token count that the loss returns.

    Raises:
        LossContractError: a chunk averages per micro-batch, or its gradient buffers are pre-scaled.
    """
    for index, chunk in enumerate(chunks):
        if not chunk.config.calculate_per_token_loss:
            raise LossContractError(
                f"model chunk {index} has calculate_per_token_loss false: Megatron would average the loss over "
                "micro-batches of unequal token counts; build its TransformerConfig with "
                "calculate_per_token_loss=True"
            )
        for buffer in gradient_buffers(chunk):
            factor = buffer.gradient_scaling_factor
            if factor != 1.0:
                raise LossContractError(
                    f"model chunk {index}: DDP pre-scales gradients by {factor}, the per-token contract needs 1.0; "
                    "do not set average_in_collective"
                )


def gradient_buffers(chunk: DistributedDataParallel) -> list[Any]:
    """Megatron's gradient buffers of one chunk, experts' included."""
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def require_finite_gradients(chunks: Sequence[DistributedDataParallel], where: str) -> None:
    """Collective over all ranks.

    Raises:
        NonFiniteGradientError: on every rank when any rank holds a non-finite gradient.
    """
    sums = [buffer.grad_data.sum() for chunk in chunks for buffer in gradient_buffers(chunk)]
    bad = torch.stack([~torch.isfinite(s) for s in sums]).any().float()
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    if bad.item():
        raise NonFiniteGradientError(
            f"{where}: the gradient is NaN or inf; the weights were not changed. Look at the log-probs and "
            "advantages of this step's metrics, lower policy.optimizer.lr, or resume from the last checkpoint"
        )
