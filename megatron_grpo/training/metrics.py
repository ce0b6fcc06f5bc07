"""Metrics of a batch of rollouts: rewards and lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_grpo.parallel.reductions import Metrics, Reduction
from megatron_grpo.policy.experience import Experience


def batch_metrics(batch: Experience) -> Metrics:
    """This data-parallel rank's part."""
    rows = torch.tensor(len(batch))
    lengths = batch.token_mask.sum(1)

    def mean(values: Tensor) -> Reduction:
        return Reduction.mean(values.double().sum(), rows, "sequences")

    metrics = {
        "reward/mean": mean(batch.rewards),
        "reward/min": Reduction.minimum(batch.rewards.min(), "sequences"),
        "reward/max": Reduction.maximum(batch.rewards.max(), "sequences"),
        "response_length/mean": mean(lengths),
        "response_length/max": Reduction.maximum(lengths.max(), "sequences"),
        "response_length/truncated_fraction": mean(batch.truncated),
    }
    return metrics | {name: mean(values) for name, values in batch.components.items()}
