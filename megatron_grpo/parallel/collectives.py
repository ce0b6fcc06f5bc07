"""Collectives beyond torch's: a sum that knows its gradient, and a gather of unequal parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # every rank's loss is a term of the one total loss, and each of them depends on this rank's x
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def all_reduce_sum(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum of ``x`` over the ranks of ``group``; differentiable.

    The backward pass all-reduces too: the quantity that is differentiated is the sum of all ranks' losses.
    All ranks must therefore run backward, or none. ``group`` None means this rank alone.
    """
    if group is None or group.size() == 1:
        return x
    result: Tensor = _AllReduceSum.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def all_gather_rows(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The ``[rows, ...]`` tensors of all ranks of ``group``, in rank order; rows may differ. No gradient."""
    if group.size() == 1:
        return [x]
    counts = torch.empty(group.size(), dtype=torch.int64, device=x.device)
    dist.all_gather_into_tensor(counts, torch.full_like(counts[:1], len(x)), group=group)
    longest = int(counts.max())
    if longest == 0:
        return [x] * group.size()
    padded = torch.cat([x, x.new_zeros(longest - len(x), *x.shape[1:])])
    gathered = x.new_empty(group.size() * longest, *x.shape[1:])
    dist.all_gather_into_tensor(gathered, padded, group=group)
    return [part[:count] for part, count in zip(gathered.chunk(group.size()), counts.tolist(), strict=True)]
