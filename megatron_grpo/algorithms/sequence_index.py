"""Which sequence each token of a flat token tensor belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_grpo.parallel.collectives import all_reduce_sum


@dataclass(frozen=True)
class SequenceIndex:
    """Sums per sequence and back, for padded and packed micro-batches alike, over all CP shards.

    Worked example, two sequences of 2 and 3 tokens packed into one row with one padding token::

        SequenceIndex(index=[0, 0, 1, 1, 1, 1], num_sequences=2, sample_mask=[1, 1], cp_group=None)

    Padding belongs to any sequence; the token mask excludes it.

    Attributes:
        index: ``[tokens]`` int64, the sequence of each token of this shard, in ``[0, num_sequences)``.
        num_sequences: sequences of the micro-batch; the same, and in the same order, on all ranks of
            ``cp_group``, also on one that holds no token of some of them.
        sample_mask: ``[num_sequences]``, 0 for a sequence that is in no loss and no statistic.
        cp_group: the ranks that hold the other tokens of these sequences; None: all tokens are here.
    """

    index: Tensor
    num_sequences: int
    sample_mask: Tensor
    cp_group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.sample_mask.shape != (self.num_sequences,):
            raise ValueError(
                f"sample_mask has shape {tuple(self.sample_mask.shape)}; {self.num_sequences} sequences need "
                "one value each"
            )

    @property
    def counts_sequences(self) -> bool:
        """Whether this rank's part of a denominator counts sequences, so that each counts once."""
        return self.cp_group is None or self.cp_group.rank() == 0

    def token_mask(self, token_mask: Tensor) -> Tensor:
        """``[tokens]`` bool: tokens of ``token_mask`` in sequences of ``sample_mask``."""
        return token_mask.bool() & self.expand(self.sample_mask.bool())

    def expand(self, per_sequence: Tensor) -> Tensor:
        """``[num_sequences]`` to ``[tokens]``."""
        return per_sequence.index_select(0, self.index)

    def sum(self, per_token: Tensor) -> Tensor:
        """``[tokens, ...]`` to ``[num_sequences, ...]``, over all shards; differentiable."""
        zeros = per_token.new_zeros(self.num_sequences, *per_token.shape[1:])
        return all_reduce_sum(zeros.index_add(0, self.index, per_token), self.cp_group)

    def mean(self, per_token: Tensor, lengths: Tensor) -> Tensor:
        """Sums over all shards divided by ``lengths`` ``[num_sequences]``; 0 for an empty sequence."""
        return self.sum(per_token) / lengths.clamp(min=1)

    def lengths(self, mask: Tensor) -> Tensor:
        """``[num_sequences]`` int64: tokens of ``mask`` (``[tokens]``) per sequence, over all shards."""
        return self.sum(mask.to(torch.int64))
