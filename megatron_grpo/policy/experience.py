"""``Experience``: one step's rollouts of this data-parallel rank as [B, S] tensors; ``MicroBatch``: rows of it as the
model sees them, padded or packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_grpo.policy.packing import MicroBatchRule, local_tokens


@dataclass
class Experience:
    """Rollouts of one step on one data-parallel rank, right-padded; every rank of a replica holds the same.

    Rows are ordered by optimizer step, and by micro-batch in it. Entry t of any ``*_logprobs`` tensor is the log-prob
    of input token t given the tokens before it; entry 0 is unused. The loop fills the tensors that start as None.

    Attributes:
        tokens: [B, S] int64, prompt then response then padding. B may be 0, when another rank holds all rows.
        token_mask: [B, S] float32, 1 on response tokens (the end token included).
        sample_mask: [B] float32, 0 for rows that must not train.
        generation_logprobs: [B, S] under the generating engine.
        weight_versions: [B, S] int64, version of the weights that sampled each response token.
        group_ids: [B] int64. Groups straddle data-parallel ranks.
        rewards: [B] float64; ``components``: ``reward/<name>`` of environments with several, and
            ``environment/<name>``, their metrics; each [B].
        truncated: [B] float32, 1 where the response ended by the length limit.
        microbatch_sizes: for each optimizer step, the rows of each of its micro-batches. ((2, 1, 0), (3, 2, 2)): the
            first step trains rows 0 to 2 in two micro-batches and an empty one, the second rows 3 to 9 in three.
            None: one step, which the policy cuts as its configuration says.
        prev_logprobs, reference_policy_logprobs: [B, S], trainer side.
        advantages: [B, S].
    """

    tokens: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    generation_logprobs: Tensor
    weight_versions: Tensor
    group_ids: Tensor
    rewards: Tensor
    truncated: Tensor
    microbatch_sizes: tuple[tuple[int, ...], ...] | None = None
    components: dict[str, Tensor] = field(default_factory=dict)
    prev_logprobs: Tensor | None = None
    reference_policy_logprobs: Tensor | None = None
    advantages: Tensor | None = None

    def __len__(self) -> int:
        return self.tokens.size(0)

    @property
    def lengths(self) -> Tensor:
        """[B] int64: tokens of each row up to its last response token; what follows changes nothing."""
        return _lengths(self.token_mask)

    def rows(self, start: int, stop: int) -> Experience:
        """Rows [start, stop) as views, for one optimizer step."""
        tensors = {name: value[start:stop] for name, value in vars(self).items() if torch.is_tensor(value)}
        components = {name: value[start:stop] for name, value in self.components.items()}
        return replace(self, **tensors, components=components, microbatch_sizes=None)

    def minibatches(self) -> Iterator[Experience]:
        """The batches of the optimizer steps, in order."""
        if self.microbatch_sizes is None:
            yield self
            return
        start = 0
        for sizes in self.microbatch_sizes:
            stop = start + sum(sizes)
            yield replace(self.rows(start, stop), microbatch_sizes=(sizes,))
            start = stop


def _lengths(token_mask: Tensor) -> Tensor:
    return (token_mask > 0).mul(torch.arange(1, token_mask.size(1) + 1)).amax(1).clamp(min=1)


@dataclass(frozen=True)
class MicroBatch:
    """Rows of an experience as the model sees them: padded to [b, S], or packed into [1, T].

    Worked example, rows of 3 and 2 tokens packed for a multiple of 4, without context parallelism::

        lengths=[4, 4], sequence=[[0, 0, 0, 0, 1, 1, 1, 1]], position=[[0, 1, 2, 3, 0, 1, 2, 3]]

    On a context-parallel rank ``sequence`` and ``position`` are those of its tokens. A micro-batch without rows is
    one sequence of padding: the model runs, so that no other rank waits, and nothing counts.

    Attributes:
        experience: where the rows are.
        rows: [n] int64 row numbers.
        lengths: [n] int64 tokens of each sequence with its padding, over all context-parallel ranks.
        packed: whether the model must be told where sequences begin.
        sequence: [b, s] int64, index into ``rows`` of each token.
        position: [b, s] int64, position of each token in its sequence.
    """

    experience: Experience
    rows: Tensor
    lengths: Tensor
    packed: bool
    sequence: Tensor
    position: Tensor

    @classmethod
    def of(
        cls, experience: Experience, rows: Sequence[int], rule: MicroBatchRule, cp_rank: int, cp: int
    ) -> MicroBatch:
        """``rows`` of ``experience`` for one context-parallel rank."""
        index, packed = torch.tensor(rows, dtype=torch.int64), rule.tokens is not None
        if not len(index):
            lengths = torch.tensor([rule.multiple])
        elif packed:
            lengths = torch.from_numpy(rule.padded(_lengths(experience.token_mask[index]).numpy()))
        else:
            lengths = torch.full((len(index),), experience.tokens.size(1))
        sequence, position = (torch.from_numpy(x) for x in local_tokens(lengths.numpy(), cp_rank, cp))
        shape = (1 if packed else len(lengths), -1)
        return cls(experience, index, lengths, packed, sequence.view(shape), position.view(shape))

    def take_next(self, x: Tensor) -> Tensor:
        """[b, s] from [B, S]: at each token the value of the next one in its sequence, 0 after the last.

        What predicts the next token is aligned with it, also at the ends of packed sequences and of
        context-parallel chunks.
        """
        return self._take(x, self.position + 1)

    def take(self, x: Tensor) -> Tensor:
        """[b, s] from [B, S]: the value of each token."""
        return self._take(x, self.position)

    def _take(self, x: Tensor, position: Tensor) -> Tensor:
        if not len(self.rows):
            return x.new_zeros(self.sequence.shape)
        inside = position < x.size(1)
        return torch.where(inside, x[self.rows[self.sequence], position.where(inside, 0)], 0)

    def put(self, values: Tensor, x: Tensor) -> None:
        """Write [b, s] values of the tokens into their places in [B, S] ``x``."""
        if len(self.rows):
            x[self.rows[self.sequence].to(x.device), self.position.to(x.device)] = values.to(x.dtype)

    @property
    def sample_mask(self) -> Tensor:
        """[n] float32, 0 for sequences that must not train; zero for the padding of an empty micro-batch."""
        return self.experience.sample_mask[self.rows] if len(self.rows) else torch.zeros(1)
