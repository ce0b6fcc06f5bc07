"""Reference weights: a host copy of the starting policy, swapped in for a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class ReferenceWeights:
    """Host copies of this rank's parameter shards (one model's worth of host memory per replica)."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._chunks = chunks
        self._weights = [p.detach().to("cpu", copy=True) for p in self._parameters()]

    def _parameters(self) -> list[Tensor]:
        return [p for chunk in self._chunks for p in chunk.parameters()]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model computes with the reference weights inside; the policy's return, bit for bit, whatever
        happens inside."""
        parameters = self._parameters()
        policy = [p.detach().clone() for p in parameters]
        try:
            _copy(self._weights, parameters)
            yield
        finally:
            _copy(policy, parameters)


@torch.no_grad()
def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
