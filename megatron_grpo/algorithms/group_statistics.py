"""Statistics per rollout group, where the rollouts of one prompt may sit on different data parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_MAX_ID_RANGE = 2**16


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
    num_groups, row = _numbered(group_ids, dp_group)
    mask = valid[:, None]
    values = torch.where(mask, values, 0.0)
    zeros = values.new_zeros(num_groups, values.size(1) + 1)

    totals = all_reduce(zeros.index_add(0, row, torch.cat([mask.to(values.dtype), values], 1)), dp_group)
    count, total = totals[:, :1], totals[:, 1:]  # [G, 1], [G, K]
    mean = total / count.clamp(min=1)

    deviations = torch.where(mask, (values - mean.index_select(0, row)).square(), 0.0)
    squares = all_reduce(zeros[:, 1:].index_add(0, row, deviations), dp_group)
    std = (squares / (count - 1).clamp(min=1)).sqrt()

    # the minimum as the maximum of the negative: one collective for both
    both = torch.where(valid, torch.cat([values.T, -values.T]), -torch.inf)  # [2 K, B]
    lowest = both.new_full((len(both), num_groups), -torch.inf)
    extremes = lowest.scatter_reduce(1, row.expand_as(both), both, "amax")
    high, minus_low = all_reduce(extremes, dp_group, dist.ReduceOp.MAX).chunk(2)
    degenerate = (count <= 1) | (high == -minus_low).T

    present = count.squeeze(1) > 0
    num_groups, num_degenerate = torch.stack([present, present & degenerate.all(1)]).sum(1).tolist()
    return GroupStatistics(
        count=count.index_select(0, row),
        sum=total.index_select(0, row),
        std=std.index_select(0, row),
        degenerate=degenerate.index_select(0, row),
        num_groups=num_groups,
        num_degenerate_groups=num_degenerate,
    )


def all_reduce(
    x: Tensor, group: ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """``x`` reduced over ``group`` in place; None: this rank alone."""
    if group is not None and group.size() > 1:
        dist.all_reduce(x, op=op, group=group)
    return x


def _numbered(group_ids: Tensor, dp_group: ProcessGroup | None) -> tuple[int, Tensor]:
    """How many numbers, the same on all ranks, and ``[B]`` the number of each row's group.

    Ids of a step are next to each other as a rule: then their distance from the lowest numbers them, without
    a sort, and a number that no row has is an empty group.
    """
    bounds = group_ids.new_tensor([torch.iinfo(torch.int64).min] * 2)  # of no rows
    if len(group_ids):
        low, high = group_ids.aminmax()
        bounds = torch.stack([~low, high])  # ~x = -x - 1, which cannot overflow
    not_lowest, highest = all_reduce(bounds, dp_group, dist.ReduceOp.MAX).tolist()
    lowest = ~not_lowest
    if 0 <= highest - lowest < _MAX_ID_RANGE:
        return highest - lowest + 1, group_ids - lowest
    ids, row = torch.unique(group_ids, return_inverse=True)
    if dp_group is None or dp_group.size() == 1:
        return len(ids), row
    size = ids.new_tensor([len(ids)])
    longest = int(all_reduce(size.clone(), dp_group, dist.ReduceOp.MAX))
    padded = torch.cat([size, ids, ids.new_zeros(longest - len(ids))])
    gathered = [torch.empty_like(padded) for _ in range(dp_group.size())]
    dist.all_gather(gathered, padded, group=dp_group)
    distinct = torch.unique(torch.cat([part[1 : 1 + int(part[0])] for part in gathered]))
    return len(distinct), torch.searchsorted(distinct, ids)[row]
