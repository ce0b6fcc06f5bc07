"""``Experience``: one step's rollouts of this data-parallel rank as [B, S] tensors, and its micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass
class Experience:
    """Rollouts of one step on one data-parallel rank, right-padded; every rank of a replica holds the same.

    Rows are ordered by mini-batch: optimizer step k of the step trains rows
    ``[k * B / num_minibatches, (k + 1) * B / num_minibatches)``. Entry t of any ``*_logprobs`` tensor is the
    log-prob of input token t given the tokens before it; entry 0 is unused. The loop fills the tensors that
    start as None.

    Attributes:
        tokens: [B, S] int64, prompt then response then padding.
        token_mask: [B, S] float32, 1 on response tokens (the end token included).
        sample_mask: [B] float32, 0 for rows that must not train.
        generation_logprobs: [B, S] under the generating engine.
        weight_versions: [B, S] int64, version of the weights that sampled each response token.
        group_ids: [B] int64. Groups straddle data-parallel ranks.
        rewards: [B] float64; ``components``: ``reward/<name>`` of environments with several, and
            ``environment/<name>``, their metrics; each [B].
        truncated: [B] float32, 1 where the response ended by the length limit.
        num_minibatches: optimizer steps that this batch is cut into.
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
    num_minibatches: int = 1
    components: dict[str, Tensor] = field(default_factory=dict)
    prev_logprobs: Tensor | None = None
    reference_policy_logprobs: Tensor | None = None
    advantages: Tensor | None = None

    def __len__(self) -> int:
        return self.tokens.size(0)

    def rows(self, start: int, stop: int) -> Experience:
        """Rows [start, stop) as views, one mini-batch."""
        tensors = {name: value[start:stop] for name, value in vars(self).items() if torch.is_tensor(value)}
        components = {name: value[start:stop] for name, value in self.components.items()}
        return replace(self, **tensors, components=components, num_minibatches=1)

    def minibatches(self) -> Iterator[Experience]:
        """The batches of the optimizer steps, in order."""
        size = len(self) // self.num_minibatches
        for index in range(self.num_minibatches):
            yield self.rows(index * size, (index + 1) * size)

    def microbatches(self, size: int) -> list[Experience]:
        """Cut into micro-batches of at most ``size`` rows."""
        return [self.rows(start, min(start + size, len(self))) for start in range(0, len(self), size)]
