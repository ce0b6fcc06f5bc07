"""Collectives that know their gradient, and the token order of context parallelism."""

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


def split_for_context_parallel(x: Tensor, cp_rank: int, cp_size: int, dim: int) -> Tensor:
    """This rank's part of ``x``: of ``2 * cp_size`` chunks along ``dim``, ``cp_rank`` and its mirror image.

    Megatron's load-balanced order: early chunks are cheap under causal attention and late ones dear.

    Raises:
        ValueError: the length along ``dim`` is not a multiple of ``2 * cp_size``.
    """
    if cp_size == 1:
        return x
    if x.size(dim) % (2 * cp_size):
        raise ValueError(
            f"length {x.size(dim)} of dimension {dim} cannot be split for context parallel size {cp_size}: "
            f"pad it to a multiple of {2 * cp_size}"
        )
    chunks = x.chunk(2 * cp_size, dim)
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]], dim)


def gather_from_context_parallel(x: Tensor, cp_group: dist.ProcessGroup | None, dim: int) -> Tensor:
    """The whole tensor from the parts of :func:`split_for_context_parallel`, on every rank; no gradient."""
    if cp_group is None or cp_group.size() == 1:
        return x
    size = cp_group.size()
    x = x.detach().contiguous()
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x, group=cp_group)
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], dim)
