"""Typed reductions: each metric says what it sums, divides by and over what, so none is scaled twice."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo.parallel import platform
from megatron_grpo.parallel.layout import ParallelLayout

Over = Literal["tokens", "sequences", "groups"]
Kind = Literal["sum", "mean", "min", "max", "effective_size"]


@dataclass(frozen=True)
class Reduction:
    """One rank's part of one metric of one micro-batch; detached 0-dim float64 tensors.

    ``over`` says which ranks hold different parts. "tokens": every data and context parallel rank has its
    own. "sequences" and "groups": every data parallel rank has its own, and its context parallel ranks all
    hold the same. Tensor parallel ranks always hold the same.

    The value, over all parts: ``sum`` and ``mean`` are the summed numerators, for a mean divided by the
    summed denominators; ``min`` and ``max`` are over the numerators; ``effective_size`` is Kish's
    (sum w)^2 / sum w^2 with numerator sum w and denominator sum w^2.
    """

    numerator: Tensor
    denominator: Tensor | None
    over: Over
    kind: Kind

    @classmethod
    def mean(cls, numerator: Tensor, denominator: Tensor, over: Over = "tokens") -> Reduction:
        return cls(_scalar(numerator), _scalar(denominator), over, "mean")

    @classmethod
    def total(cls, value: Tensor, over: Over = "tokens") -> Reduction:
        return cls(_scalar(value), None, over, "sum")

    @classmethod
    def minimum(cls, value: Tensor, over: Over = "tokens") -> Reduction:
        """``value`` is +inf where there is nothing."""
        return cls(_scalar(value), None, over, "min")

    @classmethod
    def maximum(cls, value: Tensor, over: Over = "tokens") -> Reduction:
        """``value`` is -inf where there is nothing."""
        return cls(_scalar(value), None, over, "max")

    @classmethod
    def effective_size(cls, weights: Tensor, over: Over = "tokens") -> Reduction:
        """Of importance weights of any shape; an excluded weight is 0."""
        weights = weights.detach().double()
        return cls(weights.sum(), weights.square().sum(), over, "effective_size")

    def merged_with(self, other: Reduction) -> Reduction:
        """Both parts as one, on this rank."""
        if (self.over, self.kind) != (other.over, other.kind):
            raise ValueError(
                f"a {self.kind} over {self.over} cannot be merged with a {other.kind} over {other.over}; "
                "give the two metrics different names"
            )
        if self.kind == "min":
            numerator = torch.minimum(self.numerator, other.numerator)
        elif self.kind == "max":
            numerator = torch.maximum(self.numerator, other.numerator)
        else:
            numerator = self.numerator + other.numerator
        if self.denominator is None or other.denominator is None:
            return Reduction(numerator, None, self.over, self.kind)
        return Reduction(numerator, self.denominator + other.denominator, self.over, self.kind)

    def value(self) -> float | None:
        """The value if this is the only part; None for a mean, minimum or maximum of nothing."""
        numerator = self.numerator.item()
        if self.kind in ("min", "max"):
            nothing = math.inf if self.kind == "min" else -math.inf
            return None if numerator == nothing else numerator
        if self.denominator is None:
            return numerator
        denominator = self.denominator.item()
        if denominator == 0:
            return None
        return (numerator if self.kind == "mean" else numerator**2) / denominator


Metrics = dict[str, Reduction]


def _scalar(value: Tensor) -> Tensor:
    return value.detach().double()


def masked_mean(values: Tensor, mask: Tensor, over: Over = "tokens") -> Reduction:
    """Mean of ``values`` where ``mask``."""
    return Reduction.mean(torch.where(mask, values.detach().double(), 0.0).sum(), mask.sum(), over)


def masked_min(values: Tensor, mask: Tensor, over: Over = "tokens") -> Reduction:
    """Minimum of ``values`` where ``mask``."""
    return Reduction.minimum(-_highest(-values, mask), over)


def masked_max(values: Tensor, mask: Tensor, over: Over = "tokens") -> Reduction:
    """Maximum of ``values`` where ``mask``."""
    return Reduction.maximum(_highest(values, mask), over)


def _highest(values: Tensor, mask: Tensor) -> Tensor:
    values = values.detach().double()
    nothing = values.new_full((1,), -math.inf)  # a shard may hold no token at all
    return torch.cat([torch.where(mask, values, -math.inf).flatten(), nothing]).amax()


class MetricReducer:
    """Turns the metrics of all micro-batches on all ranks into numbers that do not depend on the layout."""

    def __init__(self, layout: ParallelLayout) -> None:
        self.layout = layout

    @staticmethod
    def merge(parts: Sequence[Metrics]) -> Metrics:
        """The metrics of several micro-batches of this rank as one; a name may be missing in some of them."""
        merged: Metrics = {}
        for part in parts:
            for name, reduction in part.items():
                merged[name] = merged[name].merged_with(reduction) if name in merged else reduction
        return merged

    def reduce(self, metrics: Metrics) -> dict[str, float]:
        """The value of every metric, the same on every rank. Collective over all ranks.

        The values are those of the last pipeline stage, which computes the losses; other stages pass ``{}``
        (what they pass is not looked at). A metric over nothing (a mean with denominator 0, a minimum of no
        element) has no value and is left out.

        Raises:
            ValueError: ranks of the last stage hold metrics of different names; raised on all of them.
        """
        values = [self._reduce(metrics) if self.layout.is_last_stage else {}]
        if self.layout.pp > 1:
            dist.broadcast_object_list(values, group=self.layout.pp_group, group_src=self.layout.pp - 1)
        return values[0]

    def _reduce(self, metrics: Metrics) -> dict[str, float]:
        names = sorted(metrics)
        self._agree_on(names, metrics)
        # Sequence and group metrics are the same on all context parallel ranks: the first counts them. So one
        # group serves all, with one sum and one maximum (a minimum is the maximum of the negative).
        sums: list[Tensor] = []
        maxima: list[Tensor] = []
        zero = torch.zeros((), dtype=torch.float64, device=platform.device())
        for name in names:
            metric = metrics[name]
            if metric.kind in ("min", "max"):
                maxima.append(metric.numerator if metric.kind == "max" else -metric.numerator)
                continue
            counts = metric.over == "tokens" or self.layout.cp_rank == 0
            for part in (metric.numerator, metric.denominator):
                sums.append(part if counts and part is not None else zero)
        summed = iter(self._all_reduce(sums, dist.ReduceOp.SUM))
        highest = iter(self._all_reduce(maxima, dist.ReduceOp.MAX))
        values: dict[str, float] = {}
        for name in names:
            metric = metrics[name]
            if metric.kind in ("min", "max"):
                extreme = next(highest)
                whole = replace(metric, numerator=extreme if metric.kind == "max" else -extreme)
            else:
                numerator, denominator = next(summed), next(summed)
                whole = replace(
                    metric,
                    numerator=numerator,
                    denominator=None if metric.denominator is None else denominator,
                )
            value = whole.value()
            if value is not None:
                values[name] = value
        return values

    def _all_reduce(self, parts: list[Tensor], op: dist.ReduceOp.RedOpType) -> list[Tensor]:
        """0-dim tensors on the host."""
        if not parts:
            return []
        stacked = torch.stack([part.to(platform.device()) for part in parts])
        dist.all_reduce(stacked, op=op, group=self.layout.dp_cp_group)
        return list(stacked.cpu().unbind())

    def _agree_on(self, names: list[str], metrics: Mapping[str, Reduction]) -> None:
        # without this, ranks with different names would add one metric to another, or wait for ever
        described = [f"{name}:{metrics[name].kind}:{metrics[name].over}" for name in names]
        checksum = float(zlib.crc32("\n".join(described).encode()))
        check = torch.tensor([checksum, -checksum], dtype=torch.float64, device=platform.device())
        dist.all_reduce(check, op=dist.ReduceOp.MAX, group=self.layout.dp_cp_group)
        highest, lowest = check.tolist()
        if highest != -lowest:
            raise ValueError(
                f"data and context parallel ranks hold different metrics; rank {self.layout.rank} holds "
                f"{', '.join(described) or 'none'}. Every rank must report the same names in one call"
            )
