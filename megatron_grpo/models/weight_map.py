"""Weight maps: which Hugging Face tensors one Megatron parameter is made of, and how TP cuts it.

A model family lists one :class:`ParamMapping` per Megatron parameter, in the order in which weights are
exported. Parameter names are global (layers counted over all pipeline stages, experts over all EP ranks) and in
the spelling of the local layer spec, which keeps layer norms and experts apart; :func:`canonical_name` translates
Transformer Engine's fused spelling. Loading, export, refit and the tools all go through these mappings.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
# A full HF tensor, or safetensors' lazy slice of one: rows and columns are read when they are indexed.
Source = Any

_FUSED_LAYER_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)
# Transformer Engine's grouped GEMM holds the weights of all local experts in one module
_GROUPED_EXPERT = re.compile(r"(mlp\.experts)\.(linear_fc[12])\.weight(\d+)$")


def canonical_name(name: str) -> str:
    """The local spec's spelling of a Megatron parameter name.

    ``...linear_fc1.layer_norm_weight`` becomes ``...pre_mlp_layernorm.weight``, and
    ``...experts.linear_fc1.weight3`` becomes ``...experts.local_experts.3.linear_fc1.weight``.
    """
    for fused, separate in _FUSED_LAYER_NORMS:
        name = name.replace(fused, separate)
    return _GROUPED_EXPERT.sub(r"\1.local_experts.\3.\2.weight", name)


@dataclass(frozen=True)
class HFTensor:
    """Name and full shape of one tensor of a Hugging Face model."""

    name: str
    shape: Shape


@dataclass(frozen=True)
class ParamMapping(ABC):
    """One Megatron parameter and the HF tensors that it holds.

    Attributes:
        param: canonical global name of the Megatron parameter.
        hf: its HF tensors, in the order that :meth:`to_megatron` reads and :meth:`to_hf` returns.
        is_copy: another mapping exports these HF tensors already. Such a parameter may be absent: the
            last pipeline stage's copy of a tied embedding exists only with PP.
        expert: index of the expert that the parameter belongs to. Experts are dealt to the EP ranks in runs, and
            cut over expert-TP where other parameters are cut over TP.
    """

    param: str
    hf: tuple[HFTensor, ...]
    is_copy: bool = False
    expert: int | None = None

    #: whether each TP rank holds a different part
    sharded = True

    def local_param(self, experts_per_rank: int) -> str:
        """``param`` as the EP rank that holds it names it: every rank counts its own experts from 0."""
        if self.expert is None:
            return self.param
        return self.param.replace(
            f".local_experts.{self.expert}.", f".local_experts.{self.expert % experts_per_rank}."
        )

    @abstractmethod
    def shard_shape(self, tp: int) -> Shape:
        """Shape of one TP rank's part."""

    @abstractmethod
    def to_megatron(self, sources: Sequence[Source], shard: Tensor, tp_rank: int, tp: int) -> None:
        """Fill ``shard``, this TP rank's part, reading only the rows or columns that it needs."""

    @abstractmethod
    def to_hf(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The full HF tensors, contiguous, from the parts of all TP ranks in rank order.

        Results may be views of a part; the caller owns the parts.
        """


@dataclass(frozen=True)
class Replicated(ParamMapping):
    """The same on every TP rank: norms."""

    sharded = False

    def shard_shape(self, tp: int) -> Shape:
        return self.hf[0].shape

    def to_megatron(self, sources: Sequence[Source], shard: Tensor, tp_rank: int, tp: int) -> None:
        shard.copy_(sources[0][:])

    def to_hf(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (shards[0],)


@dataclass(frozen=True)
class ColumnParallel(ParamMapping):
    """Output features (rows of the weight, or the bias) cut over TP."""

    def shard_shape(self, tp: int) -> Shape:
        rows, *rest = self.hf[0].shape
        return (rows // tp, *rest)

    def to_megatron(self, sources: Sequence[Source], shard: Tensor, tp_rank: int, tp: int) -> None:
        shard.copy_(_rows(sources[0], tp_rank * shard.shape[0], shard.shape[0]))

    def to_hf(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (_concatenated(shards, 0),)


@dataclass(frozen=True)
class RowParallel(ParamMapping):
    """Input features (columns of the weight) cut over TP."""

    def shard_shape(self, tp: int) -> Shape:
        rows, columns = self.hf[0].shape
        return (rows, columns // tp)

    def to_megatron(self, sources: Sequence[Source], shard: Tensor, tp_rank: int, tp: int) -> None:
        columns = shard.shape[1]
        shard.copy_(sources[0][:, tp_rank * columns : (tp_rank + 1) * columns])

    def to_hf(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (_concatenated(shards, 1),)


@dataclass(frozen=True)
class GatedMLP(ParamMapping):
    """HF gate and up projections stacked; each TP rank holds ``[gate part; up part]``."""

    def shard_shape(self, tp: int) -> Shape:
        rows, *rest = self.hf[0].shape
        return (2 * rows // tp, *rest)

    def to_megatron(self, sources: Sequence[Source], shard: Tensor, tp_rank: int, tp: int) -> None:
        for part, source in zip(shard.chunk(2), sources, strict=True):
            part.copy_(_rows(source, tp_rank * part.shape[0], part.shape[0]))

    def to_hf(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        halves = [shard.chunk(2) for shard in shards]
        return tuple(_concatenated([half[i] for half in halves], 0) for i in (0, 1))


@dataclass(frozen=True)
class QKV(ParamMapping):
    """HF query, key and value projections interleaved by query group, the groups cut over TP.

    Megatron's rows are ``[q_0 ... q_(n-1), k, v]`` of head_dim rows each for group 0, then group 1, where
    ``n`` is the number of query heads per group. Holds weights ``[rows, hidden]`` and biases ``[rows]``.
    """

    num_query_groups: int = 0
    head_dim: int = 0

    @property
    def _heads(self) -> list[int]:
        """Heads per query group in q, k and v."""
        return [self.hf[0].shape[0] // (self.num_query_groups * self.head_dim), 1, 1]

    def shard_shape(self, tp: int) -> Shape:
        groups, rest = self.num_query_groups // tp, self.hf[0].shape[1:]
        return (groups * sum(self._heads) * self.head_dim, *rest)

    def _by_group(self, shard: Tensor) -> tuple[Tensor, ...]:
        """Views of q, k and v: ``[groups, heads, head_dim, ...]``."""
        heads = sum(self._heads)
        grouped = shard.view(-1, heads, self.head_dim, *shard.shape[1:])
        parts: tuple[Tensor, ...] = grouped.split(self._heads, dim=1)  # type: ignore[no-untyped-call]
        return parts

    def to_megatron(self, sources: Sequence[Source], shard: Tensor, tp_rank: int, tp: int) -> None:
        for part, source in zip(self._by_group(shard), sources, strict=True):
            rows = math.prod(part.shape[:3])
            part.copy_(_rows(source, tp_rank * rows, rows).view(part.shape))

    def to_hf(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        parts = zip(*(self._by_group(shard) for shard in shards), strict=True)
        return tuple(
            _concatenated(part, 0).reshape(tensor.shape) for part, tensor in zip(parts, self.hf, strict=True)
        )


@dataclass(frozen=True)
class VocabParallel(ParamMapping):
    """Vocabulary rows cut over TP, padded to ``padded_vocab_size``.

    Padding rows are zero in Megatron and are in no HF tensor.
    """

    padded_vocab_size: int = 0

    def shard_shape(self, tp: int) -> Shape:
        return (self.padded_vocab_size // tp, *self.hf[0].shape[1:])

    def to_megatron(self, sources: Sequence[Source], shard: Tensor, tp_rank: int, tp: int) -> None:
        first = tp_rank * shard.shape[0]
        real = max(0, min(shard.shape[0], self.hf[0].shape[0] - first))
        shard[real:].zero_()
        if real:
            shard[:real].copy_(_rows(sources[0], first, real))

    def to_hf(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (_concatenated(shards, 0)[: self.hf[0].shape[0]],)


def padded_vocab_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """``vocab_size`` rounded up to a multiple of ``divisible_by * tp``, Megatron-LM's rule."""
    multiple = divisible_by * tp
    return math.ceil(vocab_size / multiple) * multiple


def _rows(source: Source, first: int, count: int) -> Tensor:
    rows: Tensor = source[first : first + count]
    return rows


def _concatenated(parts: Sequence[Tensor], dim: int) -> Tensor:
    import torch

    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts), dim)
