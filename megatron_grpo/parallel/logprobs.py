"""Log-probs of given tokens from logits that are split over the vocabulary."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # [..., vocab / tp]
        labels: Tensor,  # [...]
        group: dist.ProcessGroup | None,
        temperature: float,
        vocab_size: int,
    ) -> Tensor:
        width = logits.size(-1)
        first = width * (group.rank() if group else 0)
        columns = min(max(vocab_size - first, 0), width)  # columns of this shard that are no padding

        # the one buffer of logits' size: scaled logits, then exp, then softmax; never the caller's logits
        buffer = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True).div_(temperature)
        buffer[..., columns:] = -math.inf

        local = labels - first
        here = (local >= 0) & (local < columns)
        index = torch.where(here, local, 0).unsqueeze(-1)  # [..., 1]
        target = torch.where(here, buffer.gather(-1, index).squeeze(-1), -math.inf)
        peak_and_target = torch.stack([buffer.amax(-1), target])
        if group:
            dist.all_reduce(peak_and_target, op=dist.ReduceOp.MAX, group=group)
        peak, target = peak_and_target.unbind()

        total = buffer.sub_(peak.unsqueeze(-1)).exp_().sum(-1)
        if group:
            dist.all_reduce(total, group=group)
        softmax = buffer.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, index, here)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return target - peak - total.log()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        softmax, index, here = ctx.saved_tensors
        scaled = (grad / ctx.temperature).unsqueeze(-1)
        # reuses the saved softmax: a second backward over this graph fails with torch's in-place error
        grad_logits = softmax.mul_(-scaled)
        grad_logits.scatter_add_(-1, index, torch.where(here.unsqueeze(-1), scaled, 0))
        return grad_logits.to(ctx.dtype), None, None, None, None


def vocab_parallel_logprobs(
    logits: Tensor,
    labels: Tensor,
    tp_group: dist.ProcessGroup | None,
    temperature: float,
    vocab_size: int,
) -> Tensor:
    """``log_softmax(logits / temperature)`` at ``labels``; each shard's gradient is its slice of the whole.

    Args:
        logits: ``[..., vocab / tp]``, this rank's columns of the (padded) vocabulary; left unmodified.
        labels: ``[...]`` int64 global token ids, the same on all ranks of ``tp_group``.
        tp_group: ranks that hold the other columns; None: all columns are here.
        temperature: the sampling temperature, positive.
        vocab_size: columns from here on are padding: in no softmax, and with a gradient of exactly zero.

    Returns:
        ``[...]`` in float32 (float64 for float64 logits), the same on all ranks of ``tp_group``. A label
        outside ``[0, vocab_size)`` has log-prob -inf.

    Raises:
        ValueError: temperature not positive, shapes that do not fit, fewer columns than ``vocab_size``, or logits that
            were gathered over ``tp_group``.
    """
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature {temperature} has no log-probs to train on; use a positive number")
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels {tuple(labels.shape)} do not fit logits {tuple(logits.shape)}: each row needs one label"
        )
    group = tp_group if tp_group is not None and tp_group.size() > 1 else None
    if group is not None and logits.size(-1) >= vocab_size:
        raise ValueError(
            f"logits {tuple(logits.shape)} have the whole vocabulary of {vocab_size} on each of {group.size()} "
            "tensor-parallel ranks: gathered logits would lose most of their gradient; pass this rank's columns"
        )
    columns = logits.size(-1) * (group.size() if group else 1)
    if not 0 < vocab_size <= columns:
        raise ValueError(f"vocab_size {vocab_size} is not between 1 and the {columns} columns of the logits")
    result: Tensor = _VocabParallelLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, labels, group, temperature, vocab_size
    )
    return result
