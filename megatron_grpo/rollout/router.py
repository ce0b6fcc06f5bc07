"""Shares prompts out over a pool of engines: the least loaded one first."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence

from megatron_grpo.rollout.client import Completion, EngineClient, SamplingParams
from megatron_grpo.rollout.errors import EngineError
from megatron_grpo.types import Prompt, Rollout, RolloutGroup


def group_seed(seed: int, group_id: int) -> int:
    """Seed of one group (62 bits): distinct for every (run seed, group id), the same on every engine."""
    digest = hashlib.blake2b(f"{seed}:{group_id}".encode(), digest_size=8).digest()
    # The engine adds the sample's index; the top bit is kept free for that.
    return int.from_bytes(digest, "big") >> 2


class EngineRouter:
    """Samples groups from a pool of engines.

    Args:
        clients: the engines; all must serve the same weights.
        decode: token ids of a response -> text without special tokens.
    """

    def __init__(self, clients: Sequence[EngineClient], decode: Callable[[Sequence[int]], str]) -> None:
        if not clients:
            raise ValueError("the list of engines is empty; give at least one")
        self.clients = tuple(clients)
        self._decode = decode
        self._in_flight = [0] * len(clients)

    async def sample(
        self,
        prompts: Sequence[tuple[Prompt, int]],
        n: int,
        sampling: SamplingParams,
        seed: int,
        expected_version: int | None = None,
    ) -> list[RolloutGroup]:
        """``n`` rollouts of each (prompt, group id), in the order of ``prompts``.

        Args:
            seed: the run's; each group draws from its own :func:`group_seed`.
            expected_version: version that every token must come from; None accepts any.

        Raises:
            EngineError: an engine failed or served other weights. The other requests are cancelled: a batch
                is whole or it is an error.
        """
        tasks = [
            asyncio.ensure_future(self._sample_group(prompt, group_id, n, sampling, seed, expected_version))
            for prompt, group_id in prompts
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample_group(
        self,
        prompt: Prompt,
        group_id: int,
        n: int,
        sampling: SamplingParams,
        seed: int,
        expected_version: int | None,
    ) -> RolloutGroup:
        engine = min(range(len(self.clients)), key=self._in_flight.__getitem__)
        client = self.clients[engine]
        self._in_flight[engine] += n
        try:
            completions = await client.generate(prompt.token_ids, n, sampling, group_seed(seed, group_id))
        finally:
            self._in_flight[engine] -= n
        if expected_version is not None:
            _check_version(client.name, completions, expected_version)
        rollouts = tuple(
            Rollout(
                prompt=prompt,
                group_id=group_id,
                sample_index=index,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                weight_versions=completion.weight_versions,
                finish_reason=completion.finish_reason,
                text=self._decode(completion.token_ids),
            )
            for index, completion in enumerate(completions)
        )
        return RolloutGroup(group_id, prompt, rollouts)


def _check_version(engine: str, completions: Sequence[Completion], expected: int) -> None:
    seen = {version for completion in completions for version in completion.weight_versions}
    if others := seen - {expected}:
        raise EngineError(
            f"{engine} sampled with weight version {', '.join(map(str, sorted(others)))}, expected {expected}; its "
            "refit did not reach it, and its samples are not used"
        )
