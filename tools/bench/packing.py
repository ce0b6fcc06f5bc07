"""Packs sequences of long-tailed lengths into micro-batches and compares with first-fit decreasing and next-fit.

    python tools/bench/packing.py --sequences 1024 4096 --budgets 16384 32768 --dp 8 32

No process group is needed: packing is a function of the lengths. A sequence of l tokens costs l + l^2 / (12 x hidden).
First-fit decreasing and next-fit bins are dealt to the ranks in the order in which they were filled, and completed
with empty ones to a multiple of DP.

over bound
    Bins, before completing the multiple, over the lower bound ceil(tokens / budget): worst case of the seeds. ``pack``
    always completes it: the fewest bins that its number can come from are counted.
ms
    Process CPU time, median over the seeds.
lockstep
    Ranks that wait for each other in every micro-batch take, for each index, as long as the dearest bin of that index;
    the sum of that over the total cost / DP. Median and worst case.
least
    What no packing can be below, worst case: the index that holds the longest sequence costs at least that much, and
    the budget limits how much of the work of the others fits beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.policy.packing import Bins, MicroBatchRule, pack

Lengths = NDArray[np.int64]


def _lengths(name: str, size: int, longest: int, seed: int) -> Lengths:
    rng = np.random.default_rng(seed)
    if name == "lognormal":
        values = rng.lognormal(6.5, 1.0, size)
    elif name == "pareto":
        values = 200 * (1 + rng.pareto(1.3, size))
    elif name == "exponential":
        values = 50 + rng.exponential(1200, size)
    elif name == "bimodal":
        values = np.where(rng.random(size) < 0.8, rng.normal(500, 150, size), rng.normal(6000, 1500, size))
    else:  # uniform, and 3 % that are long
        values = np.where(
            rng.random(size) < 0.97, rng.uniform(50, 2000, size), rng.uniform(2000, longest, size)
        )
    return values.clip(16, longest).astype(np.int64)


def _pack(lengths: Lengths, rule: MicroBatchRule, dp: int) -> Bins:
    return pack(lengths, rule, dp)


def _first_fit_decreasing(lengths: Lengths, rule: MicroBatchRule, dp: int) -> Bins:
    bins: Bins = []
    room = np.empty(0, dtype=np.int64)
    for row in np.argsort(-lengths, kind="stable").tolist():
        fits = room >= lengths[row]
        b = int(fits.argmax()) if fits.any() else len(bins)
        if b == len(bins):
            bins.append([])
            room = np.append(room, rule.tokens)
        bins[b].append(row)
        room[b] -= lengths[row]
    return bins


def _next_fit(lengths: Lengths, rule: MicroBatchRule, dp: int) -> Bins:
    bins: Bins = [[]]
    room = rule.tokens or 0
    for row, length in enumerate(lengths.tolist()):
        if length > room:
            bins.append([])
            room = rule.tokens or 0
        bins[-1].append(row)
        room -= length
    return bins


_METHODS: dict[str, Callable[[Lengths, MicroBatchRule, int], Bins]] = {
    "pack": _pack,
    "first-fit decreasing": _first_fit_decreasing,
    "next-fit": _next_fit,
}
_DISTRIBUTIONS = ["lognormal", "pareto", "exponential", "bimodal", "uniform + tail"]


def _lockstep(bins: Bins, costs: NDArray[np.float64], dp: int) -> float:
    per_bin = np.array([costs[rows].sum() for rows in bins] + [0.0] * (-len(bins) % dp))
    return float(per_bin.reshape(-1, dp).max(1).sum() / (per_bin.sum() / dp))


def _least(lengths: Lengths, costs: NDArray[np.float64], budget: int, dp: int) -> float:
    order = np.argsort(-lengths)
    within = lengths[order].cumsum() <= dp * budget  # the dearest tokens that one index could hold
    beside = min(costs[order][within].sum() + costs[order][~within][:1].sum(), dp * costs.max())
    ideal = costs.sum() / dp
    return max(1.0, float((costs.max() + (costs.sum() - beside) / dp) / ideal))


def _run(args: argparse.Namespace, budget: int, dp: int, size: int, distribution: str) -> None:
    rule = MicroBatchRule(tokens=budget, attention_cost=1 / (12 * args.hidden))
    for label, method in _METHODS.items():
        over, exceeded, milliseconds, lockstep, least = [], 0, [], [], []
        for seed in range(args.seeds):
            lengths = _lengths(distribution, size, args.longest, seed)
            start = time.process_time()
            bins = method(lengths, rule, dp)
            milliseconds.append(1e3 * (time.process_time() - start))
            if sorted(row for rows in bins for row in rows) != list(range(size)):
                raise ValueError(f"{label}: not every sequence is in one bin, seed {seed}")
            exceeded += sum(int(lengths[rows].sum()) > budget for rows in bins)
            fewest = -(-int(lengths.sum()) // budget)
            over.append(max(0, len(bins) - (dp - 1 if method is _pack else 0) - fewest))
            costs = rule.cost(lengths)
            lockstep.append(_lockstep(bins, costs, dp))
            least.append(_least(lengths, costs, budget, dp))
        sys.stdout.write(
            f"| {distribution} | {size} | {budget} | {dp} | {label} | {max(over)} | {exceeded} | "
            f"{statistics.median(milliseconds):.1f} | {statistics.median(lockstep):.4f} | {max(lockstep):.4f} | "
            f"{max(least):.4f} |\n"
        )
    sys.stdout.flush()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--sequences", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--budgets", nargs="+", type=int, default=[16384, 32768])
    parser.add_argument("--dp", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--longest", type=int, default=8192, help="longer sequences are cut to this")
    parser.add_argument("--hidden", type=int, default=2048, help="of the model whose costs are compared")
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args()
    sys.stdout.write(
        "| lengths | sequences | budget | DP | method | over bound | over budget | ms | lockstep | worst | least |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|\n"
    )
    for budget in args.budgets:
        for dp in args.dp:
            for size in args.sequences:
                for distribution in _DISTRIBUTIONS:
                    _run(args, budget, dp, size, distribution)


if __name__ == "__main__":
    main()
