"""Which rows form which micro-batch, on which data-parallel rank: from their lengths alone.

A packed micro-batch holds as many whole sequences as fit a budget of tokens. All ranks run equally many
micro-batches per optimizer step, and those of the same index cost about the same: ranks that wait for each other in
every micro-batch (expert parallelism, interleaved pipelines) then wait little.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_grpo.config import PolicyConfig
from megatron_grpo.parallel.layout import ParallelLayout

Bins = list[list[int]]

# Tried in this order: the more of the tokens fill gaps, the fuller bins can be and the less alike.
_FITTED_SHARES = (0.0, 0.05, 0.15, 0.3, 0.5, 1.0)
# Many bins that would be fuller than this are hard to fill and far from alike: one more is added.
_FULL, _MANY = 0.995, 20
_ALIKE = 1.01  # time over ideal of ranks that wait for each other in every micro-batch: good enough


@dataclass(frozen=True)
class MicroBatchRule:
    """How a pass over the model wants its rows.

    Attributes:
        multiple: a sequence is padded to a multiple of this many tokens.
        rows: of a padded micro-batch.
        tokens: budget of a packed micro-batch, over its CP ranks, after padding each sequence; None: padded.
        at_a_time: the number of micro-batches is a multiple of this.
        attention_cost: a sequence of l tokens costs l + attention_cost * l^2. Per token, a dense layer takes about
            24 x hidden^2 operations and causal attention 2 x hidden x l: 1 / (12 x hidden).
    """

    multiple: int = 1
    rows: int = 1
    tokens: int | None = None
    at_a_time: int = 1
    attention_cost: float = 1 / (12 * 2048)

    def padded(self, lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens that sequences of ``lengths`` take."""
        return -(-np.asarray(lengths, dtype=np.int64) // self.multiple) * self.multiple

    def cost(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Of each sequence, in tokens without attention."""
        return lengths + self.attention_cost * lengths.astype(np.float64) ** 2


def train_rule(policy: PolicyConfig, layout: ParallelLayout) -> MicroBatchRule:
    """Of forward and backward passes."""
    return MicroBatchRule(
        multiple=policy.parallel.sequence_multiple,
        rows=policy.train_micro_batch_size,
        tokens=policy.train_mb_tokens,
        at_a_time=layout.pp if layout.vpp > 1 else 1,
    )


def logprob_rule(policy: PolicyConfig, layout: ParallelLayout) -> MicroBatchRule:
    """Of passes that are forward only."""
    return replace(
        train_rule(policy, layout), rows=policy.forward_batch_size, tokens=policy.logprob_mb_tokens
    )


def assign_rows(
    lengths: Sequence[int] | NDArray[np.int64], dp: int, num_minibatches: int, seed: int, rule: MicroBatchRule
) -> list[list[Bins]]:
    """The rows of each micro-batch of each optimizer step, for every data-parallel rank.

    Mini-batches are drawn from all rows by ``seed`` and do not depend on ``dp``.

    Args:
        lengths: [R] tokens of each row, not padded.

    Returns:
        ``[rank][optimizer step][micro-batch]`` row numbers, each row once. A packed micro-batch may be empty.

    Raises:
        ValueError: the rows do not split evenly (padded micro-batches: into ranks; always: into optimizer steps).
    """
    size, left = divmod(len(lengths), num_minibatches)
    if left or (rule.tokens is None and size % dp):
        raise ValueError(
            f"{len(lengths)} rollouts do not split into {num_minibatches} mini-batches on {dp} replicas; "
            "use a multiple of their product"
        )
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed))
    padded = rule.padded(lengths)
    assignment: list[list[Bins]] = [[] for _ in range(dp)]
    for minibatch in order.numpy().reshape(num_minibatches, size):
        if rule.tokens is None:
            dealt = _deal(padded[minibatch].astype(np.float64), dp)
            per_rank = [
                [rows[i : i + rule.rows] for i in range(0, len(rows), rule.rows)] for rows in dealt.tolist()
            ]
        else:
            bins = pack(padded[minibatch], rule, dp)
            dealt = _deal(_bin_costs(bins, rule.cost(padded[minibatch])), dp)
            per_rank = [[bins[i] for i in mine] for mine in dealt.tolist()]
        for rank, microbatches in enumerate(per_rank):
            assignment[rank].append([minibatch[rows].tolist() for rows in microbatches])
    return assignment


def _deal(costs: NDArray[np.float64], dp: int) -> NDArray[np.int64]:
    """``[dp, len(costs) / dp]``: items of similar cost at the same index, the dearest first.

    Of the items of one index, the dearest goes to the rank that has been dealt the least.
    """
    groups = np.argsort(-costs, kind="stable").reshape(-1, dp)
    if dp == 1:
        return groups.T
    dealt = np.empty_like(groups)
    total = np.zeros(dp)
    for index, group in enumerate(groups):
        ranks = np.argsort(total, kind="stable")
        dealt[index, ranks] = group
        total[ranks] += costs[group]
    return dealt.T


def pack(lengths: NDArray[np.int64], rule: MicroBatchRule, dp: int = 1) -> Bins:
    """Bins of at most ``rule.tokens`` tokens; their number is a multiple of ``dp * rule.at_a_time``.

    As few as the budget allows, or one more before rounding up, and such that the bins of each index are close to each
    other in cost.

    Args:
        lengths: [n] tokens of each sequence, padded.

    Returns:
        Indices into ``lengths``, each once; the ``dp`` bins of an index side by side, those of the dearest index
        first. Bins may be empty, to complete the multiple.

    Raises:
        ValueError: a sequence is longer than the budget.
    """
    budget = rule.tokens or 0
    if len(lengths) and lengths.max() > budget:
        raise ValueError(
            f"a sequence of {lengths.max()} tokens, with its padding, exceeds the budget of {budget} of a packed "
            "micro-batch; raise policy.sequence_packing.train_mb_tokens and logprob_mb_tokens"
        )
    costs = rule.cost(lengths)
    order = np.argsort(lengths, kind="stable")
    ascending = order.tolist(), lengths[order].tolist(), costs[order].tolist()
    step = dp * rule.at_a_time
    full = int(lengths.sum()) / max(budget, 1)
    fewest = max(1, math.ceil(full))
    if fewest > _MANY and full > _FULL * fewest:
        fewest += 1
    best: tuple[float, Bins] | None = None
    while best is None:
        for share in _FITTED_SHARES:
            bins = _fill(*ascending, budget, -(-fewest // step) * step, dp, share)
            if bins is None:
                continue
            bins, bin_costs = _even_out(bins, lengths, costs, budget, dp)
            time = float(bin_costs.reshape(-1, dp).max(1).sum())  # an index takes as long as its dearest bin
            if best is None or time < best[0]:
                best = time, bins
            if time * dp <= _ALIKE * costs.sum():
                break
        else:
            fewest = sum(map(bool, _fill(*ascending, budget, len(lengths), dp, 1.0) or []))
    return best[1]


def _bin_costs(bins: Bins, costs: NDArray[np.float64]) -> NDArray[np.float64]:
    owner = np.repeat(np.arange(len(bins)), [len(rows) for rows in bins])
    each = costs[np.fromiter(itertools.chain(*bins), np.int64)]
    return np.bincount(owner, each, minlength=len(bins)).astype(np.float64)


def _fill(
    rows: list[int], lengths: list[int], costs: list[float], budget: int, count: int, dp: int, share: float
) -> Bins | None:
    """``count`` bins of sequences in ascending order; None: they do not fit.

    The longest are spread over the bins by cost. The shortest, ``share`` of all tokens, then fill bin after bin, which
    finds room where the tokens almost fill the budgets.
    """
    rows, lengths, costs = rows[:], lengths[:], costs[:]
    bins: Bins = []
    left = sum(costs)
    # sequences dearer than the average bin: the others of the same index are made as dear as the budget allows
    while rows and share < 1 and len(bins) < count and costs[-1] * (count - len(bins)) > left:
        level = costs[-1]
        for _ in range(dp):
            bins.append([])
            left -= _top_up(bins[-1], rows, lengths, costs, budget, level)
    fitted = bisect_right(list(itertools.accumulate(lengths)), share * sum(lengths))
    spread = _spread(rows[fitted:], lengths[fitted:], costs[fitted:], budget, count - len(bins))
    if spread is None:
        return None
    del rows[fitted:], lengths[fitted:], costs[fitted:]
    for _, room, bin_ in sorted(spread, key=lambda entry: -entry[0]):
        _top_up(bin_, rows, lengths, costs, room, np.inf)
        bins.append(bin_)
    return None if rows else bins


def _even_out(
    bins: Bins, lengths: NDArray[np.int64], costs: NDArray[np.float64], budget: int, dp: int
) -> tuple[Bins, NDArray[np.float64]]:
    """The bins and their costs, dearest first, after swaps of sequences between dearest and cheapest bin of an index.

    Each swap halves their distance as well as it can. An index is left as it is once its dearest bin exceeds the
    average of the index by no more than a thousandth of an ideal rank's time.
    """
    bin_costs = _bin_costs(bins, costs)
    order = np.argsort(-bin_costs, kind="stable")
    bins, bin_costs = [bins[b] for b in order], bin_costs[order]
    enough = bin_costs.sum() / dp / 1000
    for first in range(0, len(bins), dp):
        index = bin_costs[first : first + dp]
        for _ in range(2 * dp):
            dear, cheap = first + int(index.argmax()), first + int(index.argmin())
            gap = bin_costs[dear] - bin_costs[cheap]
            if bin_costs[dear] - index.mean() <= enough or not bins[cheap]:
                break
            out, back = np.array(bins[dear]), np.array(bins[cheap])
            back = back[np.argsort(lengths[back], kind="stable")]
            # for each sequence that may go out, the two that may come back for it with the best difference in cost
            wanted = np.searchsorted(costs[back], costs[out] - gap / 2)
            shortest = np.searchsorted(lengths[back], lengths[out] - (budget - lengths[back].sum()))
            choices = np.maximum([wanted - 1, wanted], shortest)
            possible = choices < len(back)
            choices = np.where(possible, choices, 0)
            off = np.where(possible, abs(costs[out] - costs[back[choices]] - gap / 2), np.inf)
            side, i = divmod(int(off.argmin()), len(out))
            if off[side, i] > 0.45 * gap:  # a swap that hardly helps
                break
            coming = int(back[choices[side, i]])
            bins[dear][i], bins[cheap][bins[cheap].index(coming)] = coming, int(out[i])
            moved = costs[out[i]] - costs[coming]
            bin_costs[dear] -= moved
            bin_costs[cheap] += moved
    return bins, bin_costs


def _top_up(
    bin_: list[int], rows: list[int], lengths: list[int], costs: list[float], room: int, level: float
) -> float:
    """Move the longest sequence that fits ``room`` and cost ``level`` into the bin, over and over; what they cost."""
    cost = 0.0
    while position := min(bisect_right(lengths, room), bisect_right(costs, level - cost)):
        bin_.append(rows.pop(position - 1))
        room -= lengths.pop(position - 1)
        cost += costs.pop(position - 1)
    return cost


def _spread(
    rows: list[int], lengths: list[int], costs: list[float], budget: int, count: int
) -> list[tuple[float, int, list[int]]] | None:
    """Longest first, each into the cheapest bin with room; cost, room and rows of each bin. None: there is no room."""
    bins: Bins = [[] for _ in range(count)]
    room, cost = [budget] * count, [0.0] * count
    cheapest = [(0.0, b) for b in range(count)]
    waiting: list[tuple[int, int]] = []  # without room for the sequence at hand, the roomiest first
    for row, length, price in zip(reversed(rows), reversed(lengths), reversed(costs), strict=True):
        while waiting and -waiting[0][0] >= length:
            b = heapq.heappop(waiting)[1]
            heapq.heappush(cheapest, (cost[b], b))
        while cheapest and room[cheapest[0][1]] < length:
            b = heapq.heappop(cheapest)[1]
            heapq.heappush(waiting, (-room[b], b))
        if not cheapest:
            return None
        b = cheapest[0][1]
        bins[b].append(row)
        room[b] -= length
        cost[b] += price
        heapq.heapreplace(cheapest, (cost[b], b))
    return list(zip(cost, room, bins, strict=True))


def local_tokens(
    lengths: Sequence[int] | NDArray[np.int64], cp_rank: int, cp: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which tokens of packed sequences a context-parallel rank holds, in order.

    Of the 2 x cp chunks of each sequence it holds ``cp_rank`` and its mirror image, as Megatron splits them.

    Args:
        lengths: [n] tokens of each sequence, a multiple of ``2 * cp`` with ``cp > 1``.

    Returns:
        The sequence of each token, and its position in it: [tokens / cp] each.
    """
    whole = np.asarray(lengths, dtype=np.int64)
    local = whole // cp
    sequence = np.repeat(np.arange(len(whole)), local)
    position = np.arange(local.sum()) - (local.cumsum() - local)[sequence]
    if cp > 1:
        chunk = (local // 2)[sequence]
        # the mirror's chunk 2 x cp - 1 - rank follows at once, at local position ``chunk``
        position += chunk * np.where(position < chunk, cp_rank, 2 * cp - 2 - cp_rank)
    return sequence, position
