from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest

from megatron_grpo.rollout.client import Completion, EngineClient, SamplingParams
from megatron_grpo.rollout.errors import EngineError
from megatron_grpo.rollout.event_loop import EventLoopThread
from megatron_grpo.rollout.router import EngineRouter, group_seed
from megatron_grpo.types import Prompt

SAMPLING = SamplingParams(max_new_tokens=2)


class FakeClient(EngineClient):
    """Answers at once, or when ``gate`` opens; token i of a response tells sample, seed and engine apart."""

    def __init__(
        self, name: str, version: int = 3, fails: bool = False, gate: asyncio.Event | None = None
    ) -> None:
        super().__init__(name, key="k" * 32)
        self.version, self.fails, self.gate = version, fails, gate
        self.seeds: list[int | None] = []
        self.cancelled = 0

    async def generate(
        self, prompt_token_ids: Sequence[int], n: int, sampling: SamplingParams, seed: int | None = None
    ) -> list[Completion]:
        self.seeds.append(seed)
        try:
            await asyncio.sleep(0.01) if self.gate is None else await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.fails:
            raise EngineError(f"{self.name} ended with status 1; the end of its log")
        return [Completion((i, 2), (-0.5, -0.25), (self.version,) * 2, "stop") for i in range(n)]


def _prompts(count: int) -> list[tuple[Prompt, int]]:
    return [(Prompt(f"train:{i}", (1, i), f"question {i}"), 100 + i) for i in range(count)]


def _decode(token_ids: Sequence[int]) -> str:
    return "-".join(map(str, token_ids))


def test_groups_come_back_in_order_with_text_and_ids() -> None:
    router = EngineRouter([FakeClient("engine0"), FakeClient("engine1")], _decode)
    groups = asyncio.run(router.sample(_prompts(5), 3, SAMPLING, seed=1, expected_version=3))
    assert [g.group_id for g in groups] == [100, 101, 102, 103, 104]
    assert [g.prompt.prompt_id for g in groups] == [f"train:{i}" for i in range(5)]
    rollout = groups[4].rollouts[2]
    assert (rollout.sample_index, rollout.group_id, rollout.text) == (2, 104, "2-2")
    assert (rollout.logprobs, rollout.weight_versions) == ((-0.5, -0.25), (3, 3))


def test_least_loaded_engine_first() -> None:
    async def run() -> tuple[int, int]:
        gate = asyncio.Event()
        slow, fast = FakeClient("slow", gate=gate), FakeClient("fast")
        router = EngineRouter([slow, fast], _decode)
        first = asyncio.ensure_future(router.sample(_prompts(1), 4, SAMPLING, seed=1))
        await asyncio.sleep(0)  # the first group is on its way to the slow engine
        for _ in range(3):
            await router.sample(_prompts(1), 4, SAMPLING, seed=1)
        gate.set()
        await first
        return len(slow.seeds), len(fast.seeds)

    assert asyncio.run(run()) == (1, 3)


def test_seeds_differ_by_run_and_group_and_repeat() -> None:
    seeds = {group_seed(run, group) for run in range(20) for group in range(50)}
    assert len(seeds) == 1000
    # 64 samples of a group draw from consecutive seeds, which must not reach another group's.
    ordered = sorted(seeds)
    assert min(b - a for a, b in pairwise(ordered)) > 64
    assert max(seeds) < 2**63
    assert group_seed(7, 9) == group_seed(7, 9)


def test_two_draws_of_one_prompt_are_sampled_differently() -> None:
    client = FakeClient("engine0")
    prompt = Prompt("train:0", (1,), "the same text")
    asyncio.run(EngineRouter([client], _decode).sample([(prompt, 1), (prompt, 2)], 2, SAMPLING, seed=5))
    assert len(set(client.seeds)) == 2


def test_engine_one_version_behind_is_named() -> None:
    router = EngineRouter([FakeClient("engine0"), FakeClient("engine1", version=2)], _decode)
    with pytest.raises(EngineError, match="engine1 sampled with weight version 2, expected 3"):
        asyncio.run(router.sample(_prompts(2), 2, SAMPLING, seed=1, expected_version=3))


def test_failure_is_raised_and_the_rest_is_cancelled() -> None:
    async def run() -> FakeClient:
        waiting = FakeClient("engine1", gate=asyncio.Event())
        router = EngineRouter([FakeClient("engine0", fails=True), waiting], _decode)
        with pytest.raises(EngineError, match="engine0 ended with status 1"):
            await router.sample(_prompts(2), 2, SAMPLING, seed=1)
        assert router._in_flight == [0, 0]
        return waiting

    assert asyncio.run(run()).cancelled == 1


def test_no_engines() -> None:
    with pytest.raises(ValueError, match="list of engines is empty"):
        EngineRouter([], _decode)


def test_synchronous_caller_has_a_deadline() -> None:
    async def forever() -> None:
        await asyncio.sleep(60)

    with EventLoopThread() as loop:
        router = EngineRouter([FakeClient("engine0")], _decode)
        groups = loop.run(router.sample(_prompts(2), 2, SAMPLING, seed=1), timeout_s=10, what="sampling")
        assert len(groups) == 2
        with pytest.raises(EngineError, match=r"sampling did not finish within its deadline of 0.05 s"):
            loop.run(forever(), timeout_s=0.05, what="sampling")


def test_a_timeout_of_the_coroutine_itself_is_not_mistaken_for_the_deadline() -> None:
    async def own() -> None:
        raise TimeoutError("mine")

    with EventLoopThread() as loop, pytest.raises(TimeoutError, match="mine"):
        loop.run(own(), timeout_s=10, what="sampling")
