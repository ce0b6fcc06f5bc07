"""Rollouts for the loop: sampled by this replica's share of the engines, scored, exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_grpo.config import RunConfig
from megatron_grpo.data.sampler import PromptSampler
from megatron_grpo.environments.base import split_rewards
from megatron_grpo.environments.pool import EnvironmentPool
from megatron_grpo.parallel.agreement import agree
from megatron_grpo.parallel.layout import ParallelLayout
from megatron_grpo.policy.experience import Experience
from megatron_grpo.policy.packing import train_rule
from megatron_grpo.rollout.client import SamplingParams
from megatron_grpo.rollout.event_loop import EventLoopThread
from megatron_grpo.rollout.router import EngineRouter
from megatron_grpo.training.exchange import ScoredRollout, exchange
from megatron_grpo.types import Prompt, RolloutGroup


class RolloutDriver:
    """A replica leader's engines and environment: prompts in, scored rollouts out."""

    def __init__(
        self,
        router: EngineRouter,
        loop: EventLoopThread,
        environment: EnvironmentPool,
        seed: int,
        deadline_s: float,
    ) -> None:
        self._router, self._loop, self._environment = router, loop, environment
        self._seed, self._deadline_s = seed, deadline_s

    def sample(
        self, prompts: Sequence[tuple[int, Prompt]], n: int, sampling: SamplingParams, version: int
    ) -> list[list[ScoredRollout]]:
        """``n`` scored rollouts of each (group id, prompt), all sampled by weights ``version``."""
        drawn = [(prompt, group_id) for group_id, prompt in prompts]
        groups = self._loop.run(
            self._router.sample(drawn, n, sampling, self._seed, version),
            timeout_s=self._deadline_s,
            what=f"sampling {len(drawn)} groups",
        )
        returns = self._environment.score(groups)
        return [_scored(group, result) for group, result in zip(groups, returns, strict=True)]


def _scored(group: RolloutGroup, result: Any) -> list[ScoredRollout]:
    rewards, components = split_rewards(group, result)
    metrics = {f"environment/{name}": value for name, value in result.metrics.items()}
    return [
        ScoredRollout(
            rollout,
            float(rewards[i]),
            metrics | {name: float(values[i]) for name, values in components.items()},
        )
        for i, rollout in enumerate(group.rollouts)
    ]


class SyncFeed:
    """Strictly on-policy: the rollouts of a step are sampled by the weights that the step trains."""

    def __init__(
        self,
        config: RunConfig,
        layout: ParallelLayout,
        sampler: PromptSampler | None,
        driver: RolloutDriver | None,
    ) -> None:
        """``sampler`` and ``driver`` are given on replica leaders, None elsewhere."""
        self._config, self._layout = config, layout
        self._sampler, self._driver = sampler, driver
        generation = config.generation
        self._sampling = SamplingParams(generation.max_new_tokens, generation.temperature)

    def next(self, step: int) -> Experience:
        """This replica's rows for ``step``. Collective over all ranks.

        Raises:
            EngineError, RewardError: on the rank where it happened; PeerError on all others.
        """
        grpo, layout = self._config.grpo, self._layout
        error: Exception | None = None
        scored: list[ScoredRollout] = []
        if self._driver is not None and self._sampler is not None:
            share = grpo.num_prompts_per_step // layout.dp
            mine = self._sampler.next(grpo.num_prompts_per_step)[layout.dp_rank * share :][:share]
            try:
                groups = self._driver.sample(mine, grpo.num_generations_per_prompt, self._sampling, step)
                scored = [rollout for group in groups for rollout in group]
            except Exception as caught:  # noqa: BLE001 - agreed with all ranks, and raised again there
                error = caught
        agree(error, f"rollouts of step {step + 1}")
        return exchange(
            scored,
            layout,
            self._config.optimizer_steps_per_rollout,
            grpo.seed * 1_000_003 + step,
            train_rule(self._config.policy, layout),
        )
