"""Times the GRPO advantage estimator against a loop over the prompts.

    python tools/bench/advantages.py --rows 4096 65536 1048576 --tokens 1

Groups of 16 rollouts, shuffled, normalised with a leave-one-out baseline, on one rank. The two variants take turns,
so that other work on the machine meets both alike; their advantages are compared. One thread.

CPU ms
    Process CPU time of a call: median over the rounds. The estimator is called five times in its turn: ``first`` is
    the first call, with caches full of the loop's things; the other four are the steady state.
peak MiB
    High-water mark of resident memory (``VmHWM``, reset through ``clear_refs`` before each call) over resident
    memory before it, in calls of their own: largest of three. What fits into memory that the allocator
    already holds shows as 0. Linux only.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megatron_grpo.algorithms.advantage_estimator import AdvantageInputs, make_advantage_estimator
from megatron_grpo.config.grpo import GRPOConfig
from megatron_grpo.config.loss import ClippedPGLossConfig

GROUP = 16
Estimate = Callable[[AdvantageInputs], Tensor]


def loop_over_prompts(inputs: AdvantageInputs) -> Tensor:
    """The definition, one prompt after the other; ``[B, S]``."""
    advantages = torch.zeros(len(inputs.rewards), dtype=torch.float64)
    for group_id in inputs.group_ids.unique():
        rows = (inputs.group_ids == group_id) & inputs.valid_rows
        rewards = inputs.rewards[rows].double()
        if len(rewards) < 2 or rewards.min() == rewards.max():
            continue
        baseline = (rewards.sum() - rewards) / (len(rewards) - 1)
        advantages[rows] = (rewards - baseline) / (rewards.std() + 1e-6)
    return torch.where(inputs.valid_tokens, advantages[:, None], 0.0).to(inputs.rewards.dtype)


def _estimator() -> Estimate:
    config = GRPOConfig(max_num_steps=1, num_prompts_per_step=1, num_generations_per_prompt=GROUP)
    estimator = make_advantage_estimator(config, ClippedPGLossConfig(), None)
    return lambda inputs: estimator(inputs)[0]


def _inputs(rows: int, tokens: int) -> AdvantageInputs:
    generator = torch.Generator().manual_seed(0)
    group_ids = (torch.arange(rows) // GROUP)[torch.randperm(rows, generator=generator)]
    rewards = torch.rand(rows, generator=generator)
    return AdvantageInputs(rewards, group_ids, torch.ones(rows), torch.ones(rows, tokens))


def _resident_kib(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0])


def _cpu_ms(estimate: Estimate, inputs: AdvantageInputs) -> float:
    start = time.process_time()
    estimate(inputs)
    return (time.process_time() - start) * 1e3


def _peak_mib(estimate: Estimate, inputs: AdvantageInputs) -> float:
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_kib("VmRSS")
    result = estimate(inputs)
    peak = _resident_kib("VmHWM")
    del result
    return max(0, peak - before) / 1024


def _row(rows: int, tokens: int, rounds: int, with_loop: bool) -> str:
    variants: list[Estimate] = [_estimator(), *([loop_over_prompts] if with_loop else [])]
    inputs = _inputs(rows, tokens)
    expected = [estimate(inputs) for estimate in variants]  # also warms up
    for other in expected[1:]:
        torch.testing.assert_close(other, expected[0], rtol=1e-6, atol=1e-6)
    del expected
    estimator = variants[0]
    first, steady, loop = [], [], []
    for _ in range(rounds):
        first.append(_cpu_ms(estimator, inputs))
        steady += [_cpu_ms(estimator, inputs) for _ in range(4)]
        loop += [_cpu_ms(estimate, inputs) for estimate in variants[1:]]
    median = statistics.median(steady)
    peaks = [max(_peak_mib(estimate, inputs) for _ in range(3)) for estimate in variants]
    cells = [f"{rows:,}", f"{tokens:,}", f"{statistics.median(first):.2f}", f"{median:.2f}"]
    cells += [f"{median / rows * 1e6:.0f}", f"{peaks[0]:.1f}"]
    if with_loop:
        cells += [
            f"{statistics.median(loop):.1f}",
            f"{peaks[1]:.1f}",
            f"{statistics.median(loop) / median:.0f}",
        ]
    else:
        cells += ["not run"] * 3
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 16384, 65536, 262144, 1048576])
    parser.add_argument("--tokens", type=int, default=1, help="length of a response")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--max-loop-rows", type=int, default=65536, help="the loop is quadratic")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "| rows | tokens | first CPU ms | CPU ms | ns / row | peak MiB | loop CPU ms | peak MiB | loop / estimator |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    for rows in args.rows:
        sys.stdout.write(_row(rows, args.tokens, args.rounds, rows <= args.max_loop_rows) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
