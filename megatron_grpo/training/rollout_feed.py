"""Rollouts for the loop: sampled by this replica's share of the engines, scored, exchanged."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.algorithms.advantage_estimator import get_gdpo_reward_component_keys
from megatron_grpo.algorithms.dynamic_sampling import has_signal, select_groups
from megatron_grpo.config import RunConfig
from megatron_grpo.data.sampler import PromptSampler
from megatron_grpo.environments.base import split_rewards
from megatron_grpo.environments.pool import EnvironmentPool
from megatron_grpo.parallel import platform
from megatron_grpo.parallel.agreement import agree, sum_over_ranks
from megatron_grpo.parallel.collectives import all_gather_rows
from megatron_grpo.parallel.layout import ParallelLayout
from megatron_grpo.policy.experience import Experience
from megatron_grpo.policy.packing import train_rule
from megatron_grpo.rollout.client import SamplingParams
from megatron_grpo.rollout.event_loop import EventLoopThread
from megatron_grpo.rollout.router import EngineRouter
from megatron_grpo.training.exchange import ScoredRollout, exchange
from megatron_grpo.types import Prompt, Rollout, RolloutGroup

log = logging.getLogger(__name__)

Group = list[ScoredRollout]


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
    ) -> list[Group]:
        """``n`` scored rollouts of each (group id, prompt), all sampled by weights ``version``."""
        drawn = [(prompt, group_id) for group_id, prompt in prompts]
        groups = self._loop.run(
            self._router.sample(drawn, n, sampling, self._seed, version),
            timeout_s=self._deadline_s,
            what=f"sampling {len(drawn)} groups",
        )
        returns = self._environment.score(groups)
        return [_scored(group, result) for group, result in zip(groups, returns, strict=True)]


def _scored(group: RolloutGroup, result: Any) -> Group:
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


def _check_same_names(groups: Sequence[Group]) -> None:
    names = [sorted(group[0].components) for group in groups]
    for group, its in zip(groups, names, strict=True):
        if its != names[0]:
            raise ValueError(
                f"prompt {group[0].rollout.prompt.prompt_id}: reward components and metrics {its} differ from the "
                f"others' {names[0]}; an environment must return the same names for every group"
            )


class SyncFeed:
    """The rollouts of a step are sampled by the weights that the step trains.

    With ``grpo.use_dynamic_sampling`` further groups are sampled until enough of them have a signal; those left
    over train in the next step, one version of the weights old.

    Attributes:
        metrics: what the last ``next`` sampled; the same on every rank, empty without dynamic sampling.
    """

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
        self._kept: list[Group] = []
        self.metrics: dict[str, float] = {}

    def next(self, step: int) -> Experience:
        """This replica's rows for ``step``. Collective over all ranks.

        Raises:
            EngineError, RewardError: on the rank where it happened; PeerError on all others.
        """
        grpo, layout = self._config.grpo, self._layout
        groups = self._sample(step, self._kept)
        names = sorted(groups[0][0].components) if groups else []
        if grpo.use_dynamic_sampling:
            groups = self._select(groups, step)
        return exchange(
            [rollout for group in groups for rollout in group],
            layout,
            self._config.optimizer_steps_per_rollout,
            grpo.seed * 1_000_003 + step,
            train_rule(self._config.policy, layout),
            names,
        )

    def state_dict(self) -> list[dict[str, Any]]:
        """This leader's rollouts that are kept for the next step, as plain JSON values."""
        return [_to_plain(scored) for group in self._kept for scored in group]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Continue with the rollouts of one or more :meth:`state_dict`; for leaders."""
        if state and not self._config.grpo.use_dynamic_sampling:
            log.warning(
                "%d rollouts that dynamic sampling had kept are dropped: grpo.use_dynamic_sampling is false",
                len(state),
            )
            return
        groups: dict[int, Group] = {}
        for values in state:
            assert self._sampler is not None
            prompt = self._sampler.prompt(values["group_id"])
            groups.setdefault(values["group_id"], []).append(_from_plain(values, prompt))
        self._kept = list(groups.values())

    def _sample(self, step: int, before: Sequence[Group]) -> list[Group]:
        """This replica's share of ``num_prompts_per_step`` new groups, to join ``before``; nothing but on leaders."""
        grpo, layout = self._config.grpo, self._layout
        error: Exception | None = None
        groups: list[Group] = []
        if self._driver is not None and self._sampler is not None:
            share = grpo.num_prompts_per_step // layout.dp
            mine = self._sampler.next(grpo.num_prompts_per_step)[layout.dp_rank * share :][:share]
            try:
                groups = self._driver.sample(mine, grpo.num_generations_per_prompt, self._sampling, step)
                _check_same_names([*before, *groups])
            except Exception as caught:  # noqa: BLE001 - agreed with all ranks, and raised again there
                error = caught
        agree(error, f"rollouts of step {step + 1}")
        return groups

    def _select(self, first: list[Group], step: int) -> list[Group]:
        """Sample on until enough groups of all replicas have a signal; this replica's groups of the step."""
        grpo = self._config.grpo
        wanted, limit = grpo.num_prompts_per_step, grpo.dynamic_sampling_max_gen_batches
        pool, rounds = self._kept + first, 1
        kept_before = sum_over_ranks(len(self._kept))
        while True:
            signal = has_signal(self._raw_rewards(pool))  # [G]
            found = sum_over_ranks(int(signal.sum()))
            if found >= wanted or rounds == limit:
                break
            pool, rounds = pool + self._sample(step, pool), rounds + 1

        kept, missing = max(found - wanted, 0), max(wanted - found, 0)
        self.metrics = {
            "dynamic_sampling/rounds": rounds,
            "dynamic_sampling/groups_sampled": rounds * wanted,
            "dynamic_sampling/groups_without_signal_trained": missing,
            "dynamic_sampling/groups_discarded": kept_before + rounds * wanted - wanted - kept,
            "dynamic_sampling/groups_kept": kept,
        }
        if missing and self._layout.rank == 0:
            log.warning(
                "step %d: only %d of %d groups have more than one distinct reward after "
                "grpo.dynamic_sampling_max_gen_batches %d rounds; %d groups without a signal fill the step. Raise "
                "it, or give prompts that are neither too easy nor too hard",
                step + 1, found, wanted, rounds, missing,
            )  # fmt: skip
        if self._driver is None:
            return []
        ids = torch.tensor([group[0].rollout.group_id for group in pool], dtype=torch.int64)
        table = torch.stack([ids, signal.long()], 1).to(platform.device())  # [G, 2]
        parts = all_gather_rows(table, self._layout.dp_group)
        all_ids, all_signals = torch.cat(parts).cpu().unbind(1)
        selection = select_groups(all_ids, all_signals.bool(), wanted)
        start = sum(len(part) for part in parts[: self._layout.dp_rank])
        train, keep = (mask[start : start + len(pool)].tolist() for mask in (selection.train, selection.keep))
        self._kept = [group for group, kept in zip(pool, keep, strict=True) if kept]
        return [group for group, trains in zip(pool, train, strict=True) if trains]

    def _raw_rewards(self, groups: Sequence[Group]) -> Tensor:
        """[G, N, K] as the environment gave them: K components for GDPO, else the total."""
        if not groups:
            return torch.zeros(0, 1, 1)
        names = get_gdpo_reward_component_keys(groups[0][0].components)
        if names and self._config.grpo.adv_estimator.name == "gdpo":
            values = [[[item.components[name] for name in names] for item in group] for group in groups]
        else:
            values = [[[item.reward] for item in group] for group in groups]
        return torch.tensor(values, dtype=torch.float64)


_ROLLOUT_FIELDS = (
    "group_id", "sample_index", "token_ids", "logprobs", "weight_versions", "finish_reason", "text",
)  # fmt: skip


def _to_plain(scored: ScoredRollout) -> dict[str, Any]:
    """Without the prompt, which the data has: the group id names it."""
    fields = {name: getattr(scored.rollout, name) for name in _ROLLOUT_FIELDS}
    return {**fields, "reward": scored.reward, "components": scored.components}


def _from_plain(values: dict[str, Any], prompt: Prompt) -> ScoredRollout:
    fields = {name: values[name] for name in _ROLLOUT_FIELDS}
    tuples = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return ScoredRollout(Rollout(prompt, **(fields | tuples)), values["reward"], values["components"])
