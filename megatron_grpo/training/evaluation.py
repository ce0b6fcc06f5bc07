"""Greedy evaluation on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_grpo.parallel import platform
from megatron_grpo.parallel.agreement import agree
from megatron_grpo.parallel.layout import ParallelLayout
from megatron_grpo.rollout.client import SamplingParams
from megatron_grpo.training.rollout_feed import RolloutDriver
from megatron_grpo.types import Prompt


def evaluate(
    prompts: Sequence[Prompt],
    driver: RolloutDriver | None,
    layout: ParallelLayout,
    max_new_tokens: int,
    version: int,
) -> dict[str, float]:
    """One greedy response per prompt; ``validation/accuracy`` is the mean reward. Collective over all ranks.

    Each replica's leader takes every dp-th prompt; ``driver`` is None on other ranks.
    """
    error: Exception | None = None
    sums = torch.zeros(3, dtype=torch.float64)  # reward, response tokens, count
    if driver is not None:
        mine = [(index, prompt) for index, prompt in enumerate(prompts)][layout.dp_rank :: layout.dp]
        try:
            groups = driver.sample(mine, 1, SamplingParams(max_new_tokens, temperature=0.0), version)
            for (scored,) in groups:
                sums += torch.tensor([scored.reward, len(scored.rollout.token_ids), 1.0], dtype=torch.float64)
        except Exception as caught:  # noqa: BLE001 - agreed with all ranks, and raised again there
            error = caught
    agree(error, "evaluation")
    sums = sums.to(platform.device())
    dist.all_reduce(sums)
    reward, tokens, count = sums.tolist()
    return {"validation/accuracy": reward / count, "validation/response_length": tokens / count}
