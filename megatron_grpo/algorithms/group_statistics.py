"""Statistics per rollout group, where the rollouts of one prompt may sit on different data parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class GroupStatistics:
    """Of ``[B, K]`` values over the valid rows of each row's group, given back for each row of this rank.

    Attributes:
        count: ``[B, 1]`` valid rows of the row's group.
        sum, std: ``[B, K]``; std is unbiased, 0 for a group of one.
        degenerate: ``[B, K]`` bool, the group has at most one valid row, or one distinct value.
        num_groups: groups with a valid row, on all ranks.
        num_degenerate_groups: those that are degenerate in every one of the K values.
    """

    count: Tensor
    sum: Tensor
    std: Tensor
    degenerate: Tensor
    num_groups: int
    num_degenerate_groups: int


def group_statistics(
    values: Tensor, group_ids: Tensor, valid: Tensor, dp_group: ProcessGroup | None
) -> GroupStatistics:
    """Collective over ``dp_group``; rows of the same group id are one group, on whatever rank they are.

    Two passes (the mean, then the squared deviations from it), since E[x^2] - E[x]^2 cancels.

    Args:
        values: ``[B, K]`` float64; K the same on all ranks, B as it comes, also 0.
        group_ids: ``[B]`` int64.
        valid: ``[B]`` bool; other rows are in no statistic, and may hold anything.
    """
    ids = _all_ids(group_ids, dp_group)
    row = torch.searchsorted(ids, group_ids)  # [B] into the groups of all ranks
    values = torch.where(valid[:, None], values, 0.0)
    zeros = values.new_zeros(len(ids), values.size(1) + 1)

    ones = valid[:, None].to(values.dtype)
    totals = all_reduce(zeros.index_add(0, row, torch.cat([ones, values], 1)), dp_group)
    count, total = totals[:, :1], totals[:, 1:]  # [G, 1], [G, K]
    mean = total / count.clamp(min=1)

    deviations = torch.where(valid[:, None], (values - mean[row]).square(), 0.0)
    squares = all_reduce(zeros[:, 1:].index_add(0, row, deviations), dp_group)
    std = (squares / (count - 1).clamp(min=1)).sqrt()

    # the minimum as the maximum of the negative: one collective for both
    both = torch.cat([values, -values], 1).masked_fill(~valid[:, None], -torch.inf)
    lowest = both.new_full((len(ids), both.size(1)), -torch.inf)
    extremes = lowest.scatter_reduce(0, row[:, None].expand_as(both), both, "amax")
    high, minus_low = all_reduce(extremes, dp_group, dist.ReduceOp.MAX).chunk(2, 1)
    degenerate = (count <= 1) | (high == -minus_low)

    present = count.squeeze(1) > 0
    return GroupStatistics(
        count[row], total[row], std[row], degenerate[row],
        int(present.sum()), int((present & degenerate.all(1)).sum()),
    )  # fmt: skip


def all_reduce(
    x: Tensor, group: ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """``x`` reduced over ``group`` in place; None: this rank alone."""
    if group is not None and group.size() > 1:
        dist.all_reduce(x, op=op, group=group)
    return x


def _all_ids(group_ids: Tensor, dp_group: ProcessGroup | None) -> Tensor:
    """The distinct ids of all ranks, sorted."""
    ids: Tensor = torch.unique(group_ids)
    if dp_group is None or dp_group.size() == 1:
        return ids
    size = ids.new_tensor([len(ids)])
    longest = int(all_reduce(size.clone(), dp_group, dist.ReduceOp.MAX))
    padded = torch.cat([size, ids, ids.new_zeros(longest - len(ids))])
    gathered = [torch.empty_like(padded) for _ in range(dp_group.size())]
    dist.all_gather(gathered, padded, group=dp_group)
    distinct: Tensor = torch.unique(torch.cat([part[1 : 1 + int(part[0])] for part in gathered]))
    return distinct
