"""Metrics of a batch of rollouts: rewards and lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_grpo.parallel.reductions import Metrics, Reduction, masked_max, masked_min
from megatron_grpo.policy.experience import Experience


def batch_metrics(batch: Experience) -> Metrics:
    """This data-parallel rank's part."""
    rows = torch.tensor(len(batch))
    every = torch.ones_like(batch.rewards, dtype=torch.bool)  # none, when another rank holds all rows
    lengths = batch.token_mask.sum(1)

    def mean(values: Tensor) -> Reduction:
        return Reduction.mean(values.double().sum(), rows, "sequences")

    metrics = {
        "reward/mean": mean(batch.rewards),
        "reward/min": masked_min(batch.rewards, every, "sequences"),
        "reward/max": masked_max(batch.rewards, every, "sequences"),
        "response_length/mean": mean(lengths),
        "response_length/max": masked_max(lengths, every, "sequences"),
        "response_length/truncated_fraction": mean(batch.truncated),
    }
    return metrics | {name: mean(values) for name, values in batch.components.items()}
