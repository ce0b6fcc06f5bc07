"""The order in which prompts are drawn: deterministic, and resumable from a few numbers."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from typing import Any

from megatron_grpo.types import Prompt


class PromptSampler:
    """Draws prompts without end, each epoch in an order that depends on (seed, epoch) only.

    Every draw gets a group id, 0, 1, 2, ... through the whole run, resumed or not: two draws of one prompt,
    or of two prompts with the same text, are two groups.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        if not prompts:
            raise ValueError("there are no prompts to sample from; check data.train")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._position = 0
        self._order: tuple[int, Sequence[int]] = (-1, ())  # of one epoch, made when it is reached
        self._identity = {
            "seed": seed,
            "shuffle": shuffle,
            "num_prompts": len(prompts),
            "fingerprint": fingerprint(prompts),
        }

    def next(self, n: int) -> list[tuple[int, Prompt]]:
        """The next ``n`` draws as (group id, prompt); may pass the end of an epoch."""
        drawn = [(group_id, self.prompt(group_id)) for group_id in range(self._position, self._position + n)]
        self._position += n
        return drawn

    def prompt(self, group_id: int) -> Prompt:
        """The prompt of one draw, past or future."""
        epoch, index = divmod(group_id, len(self._prompts))
        if self._order[0] != epoch:
            self._order = (epoch, self._epoch_order(epoch))
        return self._prompts[self._order[1][index]]

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values: the position, and what it is a position in."""
        return {"position": self._position, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken; costs no replay of earlier draws.

        Raises:
            ValueError: the prompts, the seed or shuffle are not those of ``state``.
        """
        names = {
            "seed": "grpo.seed",
            "shuffle": "data.shuffle",
            "num_prompts": "the number of prompts of data.train",
            "fingerprint": "the fingerprint of data.train's prompts",
        }
        for key, name in names.items():
            if state[key] != self._identity[key]:
                raise ValueError(
                    f"can't resume: {name} was {state[key]} when the checkpoint was saved and is "
                    f"{self._identity[key]} now; restore the configuration (dataset, tokenizer, system "
                    "prompt), or start a new run with the checkpoint's weights as policy.model_path"
                )
        self._position = state["position"]

    def _epoch_order(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._prompts))
        # random() of a string seed is the one sequence that Python promises to keep between versions.
        key = random.Random(f"{self._seed}:{epoch}").random
        return sorted(range(len(self._prompts)), key=lambda _: key())


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """16 hex digits over the ids and tokens of all prompts, in order; ranks with the same data agree."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.prompt_id} {len(prompt.token_ids)} ".encode())
        digest.update(array("q", prompt.token_ids))
    return digest.hexdigest()[:16]
