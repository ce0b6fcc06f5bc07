"""The data types that travel between the layers, from a prompt to a micro-batch.

Worked example, one prompt sampled twice::

    prompt = Prompt("train:17", (1, 40, 41, 2), "What is 3 + 4?", {"answer": "7"})
    good = Rollout(prompt, 5, 0, (9, 2), (-0.1, -0.02), (3, 3), "stop", "7")
    bad = Rollout(prompt, 5, 1, (8, 8), (-2.3, -1.9), (3, 3), "length", "66")
    group = RolloutGroup(5, prompt, (good, bad))
    # rewards 1 and 0; as a batch of [B, S] = [2, 6] the response tokens are columns 4 and 5, and the
    # log-prob of column 4 is that of token 9 (row 0) given columns 0 to 3.

This module imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """One prompt of a dataset, rendered by the chat template.

    Attributes:
        prompt_id: name within the data, ``"<split>:<index>"``; errors about this prompt carry it.
        token_ids: the rendered prompt, generation prompt included.
        text: the user's question as the dataset gave it.
        metadata: what the environment needs to score a response (answer, dataset entry, ...).
    """

    prompt_id: str
    token_ids: tuple[int, ...]
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rollout:
    """One sampled response. Every per-token tuple has one entry for each of ``token_ids``.

    Attributes:
        prompt: what was asked.
        group_id: the group of this rollout; unique in the run, given once when the prompt was drawn.
        sample_index: position inside the group, 0 to num_generations_per_prompt - 1.
        token_ids: the sampled tokens, exactly as the engine sampled them (never re-encoded text).
        logprobs: log-prob of each token under the generating engine, in nats.
        weight_versions: version of the weights that sampled each token.
        finish_reason: "stop" when the end token was sampled, "length" when the limit was reached.
        text: the response decoded without special tokens, for environments and for people.
    """

    prompt: Prompt
    group_id: int
    sample_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    finish_reason: FinishReason
    text: str

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.logprobs), len(self.weight_versions)}
        if len(lengths) != 1:
            raise ValueError(
                f"rollout of prompt {self.prompt.prompt_id}: {len(self.token_ids)} token ids, "
                f"{len(self.logprobs)} log-probs and {len(self.weight_versions)} weight versions; "
                "each token needs one of each"
            )


@dataclass(frozen=True)
class RolloutGroup:
    """All rollouts of one draw of one prompt. Two prompts with the same text are two groups."""

    group_id: int
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
