"""Which rows form which micro-batch, on which data-parallel rank: from their lengths alone.

A packed micro-batch holds as many whole sequences as fit a budget of tokens. All ranks run equally many
micro-batches per optimizer step, and those of the same index cost about the same: ranks that wait for each other in
every micro-batch (expert parallelism, interleaved pipelines) then wait little.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_grpo.config import PolicyConfig
from megatron_grpo.parallel.layout import ParallelLayout

Bins = list[list[int]]


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


def sequence_multiple(layout: ParallelLayout, sequence_parallel: bool) -> int:
    """Sequences are padded to a multiple of this: 2 x CP chunks, and TP equal parts under SP."""
    return (2 * layout.cp if layout.cp > 1 else 1) * (layout.tp if sequence_parallel else 1)


def train_rule(policy: PolicyConfig, layout: ParallelLayout) -> MicroBatchRule:
    """Of forward and backward passes."""
    return MicroBatchRule(
        multiple=sequence_multiple(layout, policy.parallel.sequence_parallel),
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
            costs = rule.cost(padded[minibatch])
            dealt = _deal(np.array([costs[rows].sum() for rows in bins]), dp)
            per_rank = [[bins[i] for i in mine] for mine in dealt.tolist()]
        for rank, microbatches in enumerate(per_rank):
            assignment[rank].append([minibatch[rows].tolist() for rows in microbatches])
    return assignment


def _deal(costs: NDArray[np.float64], dp: int) -> NDArray[np.int64]:
    """``[dp, len(costs) / dp]``: items of similar cost at the same index, the dearest first.

    Of the items of one index, the dearest goes to the rank that has been dealt the least.
    """
    groups = np.argsort(-costs, kind="stable").reshape(-1, dp)
    dealt = np.empty_like(groups)
    total = np.zeros(dp)
    for index, group in enumerate(groups):
        ranks = np.argsort(total, kind="stable")
        dealt[index, ranks] = group
        total[ranks] += costs[group]
    return dealt.T


def pack(lengths: NDArray[np.int64], rule: MicroBatchRule, dp: int = 1) -> Bins:
    """Bins of at most ``rule.tokens`` tokens; their number is a multiple of ``dp * rule.at_a_time``.

    Args:
        lengths: [n] tokens of each sequence, padded.

    Returns:
        Indices into ``lengths``, each once. Bins may be empty, to complete the multiple.

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
    order = np.argsort(-lengths, kind="stable").tolist()
    step = dp * rule.at_a_time
    fewest = max(1, -(-int(lengths.sum()) // max(budget, 1)))
    for count in itertools.count(-(-fewest // step) * step, step):
        for fill in (_fill_by_cost, _fill_by_fit):
            bins = fill(order, lengths.tolist(), costs.tolist(), budget, count, dp)
            if bins is not None:
                return bins
    raise AssertionError  # one bin for each sequence always does


def _fill_by_cost(
    order: list[int], lengths: list[int], costs: list[float], budget: int, count: int, dp: int
) -> Bins | None:
    """Longest first, each into the cheapest bin with room; None: there is no room."""
    bins: Bins = [[] for _ in range(count)]
    room = [budget] * count
    heap = [(0.0, b) for b in range(count)]
    for item in order:
        length = lengths[item]
        full = []
        while heap and room[heap[0][1]] < length:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, b = heap[0]
        heapq.heapreplace(heap, (cost + costs[item], b))
        bins[b].append(item)
        room[b] -= length
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _fill_by_fit(
    order: list[int], lengths: list[int], costs: list[float], budget: int, count: int, dp: int
) -> Bins | None:
    """Bin by bin, each with the longest sequence that fits, over and over; None: some are left."""
    left = order[::-1]  # shortest first
    keys = [lengths[i] for i in left]
    bins: Bins = []
    while left and len(bins) < count:
        bins.append([])
        room = budget
        while position := bisect_right(keys, room):
            room -= keys.pop(position - 1)
            bins[-1].append(left.pop(position - 1))
    return None if left else bins + [[] for _ in range(count - len(bins))]


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
