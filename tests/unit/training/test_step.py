"""One step of the loop with stand-ins for model, engines and environment: what is passed on, counted and numbered."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_grpo.algorithms.loss.kl import kl_in_reward
from megatron_grpo.algorithms.loss.loss_functions import ClippedPGLossFn
from megatron_grpo.config.loss import ClippedPGLossConfig
from megatron_grpo.environments.base import EnvironmentReturn
from megatron_grpo.observability.timers import StepTimer
from megatron_grpo.parallel.reductions import MetricReducer, Reduction
from megatron_grpo.policy.experience import Experience
from megatron_grpo.training import rollout_feed
from megatron_grpo.training.exchange import ScoredRollout
from megatron_grpo.training.grpo import GRPO
from megatron_grpo.training.metrics import batch_metrics
from megatron_grpo.training.rollout_feed import RolloutDriver, SyncFeed, _check_same_names
from megatron_grpo.types import Prompt, Rollout, RolloutGroup
from tests.unit.training.test_exchange import scored

ONE_RANK: Any = SimpleNamespace(
    rank=0, pp=1, dp=1, dp_rank=0, cp_rank=0, is_last_stage=True, dp_cp_group=None,
    dp_group=SimpleNamespace(size=lambda: 1),
)  # fmt: skip


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def experience() -> Experience:
    """Three optimizer steps; rows 0 and 1 are the first, without an advantage. Row 1 is masked, a token of 0 broken."""
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 1, 0]]).float()
    generation = torch.full((4, 4), -1.0)
    generation[0, 3] = generation[0, 0] = generation[1, 1] = math.nan
    return Experience(
        tokens=torch.ones(4, 4, dtype=torch.int64), token_mask=mask, sample_mask=torch.tensor([1.0, 0, 1, 1]),
        generation_logprobs=generation, weight_versions=torch.zeros(4, 4, dtype=torch.int64),
        group_ids=torch.zeros(4, dtype=torch.int64), rewards=torch.tensor([1.0, -3.0, 0.0, 0.0]).double(),
        truncated=torch.tensor([1.0, 0, 0, 0]), microbatch_sizes=((2,), (1,), (1,)),
        advantages=torch.tensor([0.0, 5.0, 1.0, -1.0])[:, None] * mask,
    )  # fmt: skip


class Policy:
    """Log-probs -2 and -3, and optimizer steps that count ten tokens and five samples each."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    def logprobs(self, batch: Experience) -> torch.Tensor:
        return torch.full((4, 4), -2.0)

    def reference_logprobs(self, batch: Experience) -> torch.Tensor:
        return torch.full((4, 4), -3.0)

    def train_step(self, part: Experience, loss_fn: Any, version: int) -> Any:
        self.versions.append(version)
        metrics = {
            "num_valid_tokens": Reduction.total(torch.tensor(10)),
            "num_valid_samples": Reduction.total(torch.tensor(5), "sequences"),
        }
        nth = len(self.versions)
        return SimpleNamespace(metrics=metrics, grad_norm=2.0 * nth - 1, lr=0.1 * nth)


def make_grpo(acts: bool = False, **loss: Any) -> Any:
    warned: list[dict[str, float]] = []
    seen: list[Any] = []

    def estimator(inputs: Any) -> Any:
        seen.append(inputs)
        advantages = torch.ones(4, 4, dtype=torch.float64)
        return advantages, {"num_groups": Reduction.total(torch.tensor(7.0), "groups")}

    monitor: Any = SimpleNamespace(
        acts=acts,
        warn=warned.append,
        check=lambda p, g, t, s: (s * 0 + torch.tensor([1, 0, 0, 1]), {"checked": 1.0}),
    )
    feed: Any = SimpleNamespace(metrics={}, next=lambda step: experience())
    grpo: Any = GRPO(
        Policy(), feed, ClippedPGLossFn(ClippedPGLossConfig(**loss)), estimator,  # type: ignore[arg-type]
        monitor, MetricReducer(ONE_RANK), StepTimer(),
    )  # fmt: skip
    return grpo, seen, warned


ON_POLICY = {"force_on_policy_ratio": True, "reference_policy_kl_penalty": 0.0}


def test_a_skipped_optimizer_step_is_in_the_counts_and_in_no_mean(one_rank: None) -> None:
    grpo, _, _ = make_grpo(**ON_POLICY)
    metrics = grpo.update(experience(), 4)
    assert grpo.policy.versions == [4, 4]
    assert metrics == pytest.approx(
        {"num_valid_tokens": 10 + 10 + 2, "num_valid_samples": 5 + 5 + 1, "num_dropped_tokens": 1,
         "optimizer_steps_skipped": 1, "grad_norm": (1.0 + 3.0) / 2, "lr": 0.2}
    )  # fmt: skip
    # whole rows, the same on all context-parallel ranks
    assert {count.over for count in grpo._counts(experience()).values()} == {"sequences"}


def test_the_loop_numbers_versions_and_keeps_the_metrics_of_both_parts(one_rank: None) -> None:
    grpo, seen, warned = make_grpo(**ON_POLICY)
    refits, steps = [], []

    class Run:
        stop_requested = False

        def refit(self, version: int, batch: Experience) -> dict[str, float]:
            refits.append(version)
            return {"refit": 1.0}

        def after_step(self, step: int, metrics: dict[str, float], *, last: bool) -> None:
            steps.append((step, last, metrics))
            self.stop_requested = step == 4

    assert grpo.train(Run(), 3, 9) == 5
    assert refits == [4, 5]
    assert grpo.policy.versions == [3] * 3 + [4] * 3
    assert [(step, last) for step, last, _ in steps] == [(4, False), (5, True)]
    assert all(m["num_groups"] == 7 and m["refit"] == 1 and m["reward/min"] == -3 for _, _, m in steps)
    assert [m["num_valid_tokens"] for m in warned] == [30, 30]
    assert seen[0].kl is None


def test_kl_in_the_reward_is_that_of_the_policy_before_the_step(one_rank: None) -> None:
    grpo, seen, _ = make_grpo(
        force_on_policy_ratio=True, use_kl_in_reward=True, reference_policy_kl_penalty=0.1
    )
    batch = experience()
    metrics = grpo.score(batch)
    expected = kl_in_reward(grpo.loss_fn.config, torch.full((4, 4), -2.0), torch.full((4, 4), -3.0))
    assert torch.equal(seen[0].kl, expected)
    assert seen[0].components is batch.components
    assert metrics == {"checked": 1.0, "num_groups": 7.0}
    assert batch.sample_mask.tolist() == seen[0].sample_mask.tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("acts", [False, True])
def test_log_probs_before_the_step_only_if_something_needs_them(one_rank: None, acts: bool) -> None:
    grpo, _, _ = make_grpo(acts, **ON_POLICY)
    batch = experience()
    grpo.score(batch)
    assert (batch.prev_logprobs is not None) == acts


def test_metrics_of_a_batch() -> None:
    got = {name: metric.value() for name, metric in batch_metrics(experience()).items()}
    assert got == {
        "reward/mean": -0.5, "reward/min": -3.0, "reward/max": 1.0, "response_length/mean": 2.0,
        "response_length/max": 3.0, "response_length/truncated_fraction": 0.25,
    }  # fmt: skip
    negative = experience()
    negative.rewards = torch.tensor([-1.0, -3.0, -2.0, -1.5]).double()
    assert batch_metrics(negative)["reward/max"].value() == -1.0


def test_rewards_are_those_of_their_rollouts() -> None:
    prompts = [(i, Prompt(f"test:{i}", (1,), "")) for i in (5, 6)]

    def sample(drawn: Any, n: int, sampling: Any, seed: int, version: int) -> list[RolloutGroup]:
        assert (n, sampling, seed, version) == (2, "sampling", 11, 3)
        return [
            RolloutGroup(
                i, p, tuple(Rollout(p, i, k, (9,), (-0.1,), (3,), "stop", f"{i}{k}") for k in range(2))
            )
            for p, i in drawn
        ]

    def score(groups: list[RolloutGroup]) -> list[EnvironmentReturn]:
        return [
            EnvironmentReturn(
                {
                    "text": torch.tensor([float(r.text) for r in g.rollouts]),
                    "place": torch.tensor([0.0, 1.0]),
                },
                {"turns": float(g.group_id)},
            )
            for g in groups
        ]

    driver: Any = RolloutDriver(
        SimpleNamespace(sample=sample), SimpleNamespace(run=lambda value, **_: value),  # type: ignore[arg-type]
        SimpleNamespace(score=score), 11, 1.0,  # type: ignore[arg-type]
    )  # fmt: skip
    groups = driver.sample(prompts, 2, "sampling", 3)
    assert [(s.rollout.text, s.reward, s.components) for group in groups for s in group] == [
        (f"{i}{k}", 10 * i + 2 * k,
         {"reward/text": 10 * i + k, "reward/place": k, "environment/turns": i})
        for i in (5, 6) for k in (0, 1)
    ]  # fmt: skip


def test_groups_with_other_names_are_refused() -> None:
    group, other = [scored((1,), (2,))], [scored((1,), (2,))]
    other[0].components["reward/c"] = 1.0
    _check_same_names([group, group])
    with pytest.raises(ValueError, match=r"reward/c.* differ from the others'"):
        _check_same_names([group, other])


def feed(estimator: str = "grpo") -> Any:
    grpo = SimpleNamespace(adv_estimator=SimpleNamespace(name=estimator), use_dynamic_sampling=False, seed=2)
    config: Any = SimpleNamespace(
        grpo=grpo, generation=SimpleNamespace(max_new_tokens=4, temperature=1.0), policy=None,
        optimizer_steps_per_rollout=1,
    )  # fmt: skip
    return SyncFeed(config, ONE_RANK, None, None)


def test_a_signal_is_looked_for_in_what_the_estimator_uses() -> None:
    rollout = scored((1,), (2,)).rollout
    group = [
        ScoredRollout(
            rollout, 1.0 + k * 1e-12, {"reward/a": float(k), "reward/b": 1.0 - k, "environment/t": 9.0}
        )
        for k in range(2)
    ]
    assert feed("gdpo")._raw_rewards([group]).tolist() == [[[0.0, 1.0], [1.0, 0.0]]]
    assert feed("grpo")._raw_rewards([group]).tolist() == [[[1.0], [1.0 + 1e-12]]]


def test_each_step_has_its_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(
        rollout_feed, "exchange", lambda rollouts, layout, steps, seed, *_: seeds.append(seed)
    )
    monkeypatch.setattr(rollout_feed, "train_rule", lambda *_: None)
    one = feed()
    monkeypatch.setattr(one, "_sample", lambda step, before: [])
    for step in range(3):
        one.next(step)
    assert len(set(seeds)) == 3
