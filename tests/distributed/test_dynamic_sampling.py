"""Steps out of the ordinary on real ranks: several rounds of sampling, no gradient, no log-probs before the step."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_grpo.config import RunConfig
from megatron_grpo.config.grpo import AdvEstimatorConfig
from megatron_grpo.config.loss import ClippedPGLossConfig
from megatron_grpo.types import Prompt
from tests.rank_pool import RankPool
from tests.recorded_training import RecordedDriver, run_config, train_recorded
from tests.tiny_model import write_tiny_model

MIXED, EQUAL = [0.0, 1.0, 1.0, 2.0], [1.0] * 4


def three_of_four(group_id: int) -> list[float]:
    return EQUAL if group_id % 4 == 1 else MIXED


def one_of_four(group_id: int) -> list[float]:
    return MIXED if group_id % 4 == 2 else EQUAL


def none_from_the_fifth(group_id: int) -> list[float]:
    return MIXED if group_id < 4 else EQUAL


def only_from_the_fifth(group_id: int) -> list[float]:
    return EQUAL if group_id < 4 else MIXED


def components(group_id: int) -> list[dict[str, float]]:
    """All totals are 1. One component of every second group varies."""
    first = [float(i % 2) for i in range(4)] if group_id % 2 else EQUAL
    return [{"a": a, "b": 1.0 - a} for a in first]


def config(folder: Path, steps: int, kl: float = 0.0, **grpo: Any) -> RunConfig:
    values = run_config(folder / "model", folder, steps).model_dump()
    values["grpo"] |= grpo
    values["loss_fn"]["reference_policy_kl_penalty"] = kl
    return RunConfig.model_validate(values)


def dynamic(folder: Path, steps: int, max_gen_batches: int = 10, **grpo: Any) -> RunConfig:
    return config(
        folder, steps, use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=max_gen_batches, **grpo
    )


def counts(step: dict[str, float]) -> tuple[float, ...]:
    names = ("rounds", "groups_sampled", "groups_discarded", "groups_kept", "groups_without_signal_trained")
    return tuple(step[f"dynamic_sampling/{name}"] for name in names)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "model")
    return tmp_path


@pytest.mark.timeout(240)
def test_rounds_on_two_replicas_are_those_of_one_and_kept_groups_train_next(
    ranks: RankPool, folder: Path
) -> None:
    one = ranks.run(1, train_recorded, dynamic(folder, 4), None, three_of_four)[0]
    # of groups 0-3, 4-7, ... all but 1, 5, 9, ... have a signal
    assert [counts(step) for step in one["steps"]] == [
        (2, 8, 2, 2, 0),
        (1, 4, 1, 1, 0),
        (1, 4, 1, 0, 0),
        (2, 8, 2, 2, 0),
    ]
    assert [step["staleness_max"] for step in one["steps"]] == [0, 1, 1, 0]
    for step in one["steps"]:
        assert (step["num_groups"], step["num_degenerate_groups"]) == (4, 0)
        # rows are aligned: the rewards of the step are those of groups with a signal
        assert (step["reward/mean"], step["reward/min"], step["reward/max"]) == (1, 0, 2)

    two = ranks.run(2, train_recorded, dynamic(folder, 4), None, three_of_four)
    for result in two:
        for got, want in zip(result["steps"], one["steps"], strict=True):
            assert got == pytest.approx(want, rel=1e-5, abs=1e-6)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two[0]["weights"][name], weight, rtol=1e-4, atol=1e-6)


def rewards_that_name_the_row(group_id: int) -> list[float]:
    return EQUAL if group_id % 4 == 1 else [group_id + k / 8 for k in range(4)]


def rows_of_three_steps(rank: int, world: int, settings: RunConfig) -> list[tuple[int, int, int]]:
    """Step, group and place in it of each row of this rank, whose tokens, mask and log-probs must be that rollout's."""
    from megatron_grpo.data.sampler import PromptSampler
    from megatron_grpo.parallel.layout import initialize_layout
    from megatron_grpo.training.rollout_feed import SyncFeed

    driver: Any = RecordedDriver(320, rewards_that_name_the_row)
    prompts = [Prompt(f"test:{i}", tuple(range(1, 4 + 3 * i)), "", {}) for i in range(5)]
    sampler = PromptSampler(prompts, seed=0, shuffle=True)
    feed = SyncFeed(settings, initialize_layout(), sampler, driver)
    rows = []
    for step in range(3):
        batch = feed.next(step)
        for i in range(len(batch)):
            group_id = int(batch.group_ids[i])
            k = rewards_that_name_the_row(group_id).index(float(batch.rewards[i]))
            ((*group,),) = driver.sample([(group_id, sampler.prompt(group_id))], 4, None, step)
            rollout = group[k].rollout
            tokens = [*rollout.prompt.token_ids, *rollout.token_ids]
            response = slice(len(rollout.prompt.token_ids), len(tokens))
            assert batch.tokens[i, : len(tokens)].tolist() == tokens
            assert batch.token_mask[i].nonzero().flatten().tolist() == list(
                range(response.start, response.stop)
            )
            assert torch.equal(batch.generation_logprobs[i, response], torch.tensor(rollout.logprobs))
            rows.append((step, group_id, k))
    return rows


@pytest.mark.timeout(240)
@pytest.mark.parametrize("world", [1, 2])
def test_rewards_masks_and_rollouts_stay_aligned(ranks: RankPool, folder: Path, world: int) -> None:
    rows = [row for part in ranks.run(world, rows_of_three_steps, dynamic(folder, 3)) for row in part]
    useful = [group_id for group_id in range(16) if group_id % 4 != 1]
    assert sorted(rows) == [(i // 4, group_id, k) for i, group_id in enumerate(useful) for k in range(4)]


@pytest.mark.timeout(240)
def test_resuming_with_kept_groups_changes_nothing(ranks: RankPool, folder: Path) -> None:
    def run(name: str, world: int, stop_after: int | None = None) -> dict[str, Any]:
        settings = dynamic(folder, 3).model_copy(update={"run_dir": folder / name})
        return ranks.run(world, train_recorded, settings, stop_after, three_of_four)[0]

    whole, first, second = run("whole", 2), run("halves", 2, 1), run("halves", 2)
    assert first["steps"][0]["dynamic_sampling/groups_kept"] == 2
    assert first["steps"] + second["steps"] == whole["steps"]
    assert second["digests"] == whole["digests"][1:]
    for name, weight in whole["weights"].items():
        assert torch.equal(second["weights"][name], weight)

    run("fewer", 2, 1)
    on_one = run("fewer", 1)  # the kept groups of two replicas
    for got, want in zip(on_one["steps"], whole["steps"][1:], strict=True):
        assert got == pytest.approx(want, rel=1e-5, abs=1e-6)


@pytest.mark.timeout(240)
def test_after_the_last_round_groups_without_a_signal_fill_the_step(ranks: RankPool, folder: Path) -> None:
    results = ranks.run(2, train_recorded, dynamic(folder, 2, max_gen_batches=3), None, one_of_four)
    for step in results[0]["steps"]:
        assert counts(step) == (3, 12, 8, 0, 1)
        assert (step["num_groups"], step["num_degenerate_groups"]) == (4, 1)
        assert step["grad_norm"] > 0


@pytest.mark.timeout(240)
def test_gdpo_looks_at_components(ranks: RankPool, folder: Path) -> None:
    settings = dynamic(folder, 1, adv_estimator={"name": "gdpo"})
    step = ranks.run(2, train_recorded, settings, None, components)[0]["steps"][0]
    assert counts(step) == (2, 8, 4, 0, 0)
    assert step["num_degenerate_groups"] == 0
    assert step["reward/min"] == step["reward/max"] == 1
    assert step["reward/a"] == step["reward/b"] == 0.5


@pytest.mark.timeout(240)
@pytest.mark.parametrize("world", [1, 2])
def test_a_step_without_a_signal_changes_no_bit(ranks: RankPool, folder: Path, world: int) -> None:
    for result in ranks.run(world, train_recorded, config(folder, 3), None, none_from_the_fifth):
        start, first, second, third = result["digests"]
        assert start != first == second == third
        trained, *skipped = result["steps"]
        assert trained["optimizer_steps_skipped"] == 0
        for step in skipped:
            assert step["optimizer_steps_skipped"] == 2
            assert step["num_degenerate_groups"] == step["num_groups"] == 4
            assert step.keys().isdisjoint({"loss", "grad_norm", "lr"})
            assert all(torch.tensor(value).isfinite() for value in step.values())


@pytest.mark.timeout(240)
def test_with_a_kl_penalty_such_a_step_trains(ranks: RankPool, folder: Path) -> None:
    result = ranks.run(2, train_recorded, config(folder, 2, kl=0.05), None, none_from_the_fifth)[0]
    assert len(set(result["digests"])) == 3
    assert [step["optimizer_steps_skipped"] for step in result["steps"]] == [0, 0]
    assert result["steps"][1]["kl_penalty"] > 0


@pytest.mark.timeout(240)
def test_a_step_with_every_row_masked_changes_no_bit(ranks: RankPool, folder: Path) -> None:
    settings = config(
        folder, 2, kl=0.05, seq_logprob_error_action="mask", seq_logprob_error_threshold=1 + 1e-9
    )
    for result in ranks.run(2, train_recorded, settings, None, three_of_four):
        assert len(set(result["digests"])) == 1
        for step in result["steps"]:
            assert step["seq_logprob_error_flagged_fraction"] == 1
            assert step["optimizer_steps_skipped"] == 2


def other_names_from(first: int, group_id: int) -> list[Any]:
    return [{"a": 1.0, "c" if group_id >= first else "b": float(i)} for i in range(4)]


def refusal(rank: int, world: int, settings: RunConfig, first: int) -> str:
    try:
        train_recorded(rank, world, settings, None, functools.partial(other_names_from, first))
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("sampling", ["once", "dynamic"])
def test_components_of_other_names_are_refused_on_all_ranks(
    ranks: RankPool, folder: Path, sampling: str
) -> None:
    """Inside a replica by its prompt; between replicas, which sample groups 0, 1 and 2, 3, when rows are exchanged."""
    settings = {"once": config, "dynamic": dynamic}[sampling](folder, 1)
    gdpo = settings.model_copy(
        update={"grpo": settings.grpo.model_copy(update={"adv_estimator": AdvEstimatorConfig(name="gdpo")})}
    )
    (alone,) = ranks.run(1, refusal, gdpo, 3)
    names = r"\['reward/a', 'reward/c'\] differ from the others' \['reward/a', 'reward/b'\]"
    assert re.match(f"ValueError: prompt test:[0-9]: reward components and metrics {names}", alone)
    inside = ranks.run(2, refusal, gdpo, 3)
    assert inside[0].startswith("PeerError: rollouts of step 1: rank 1 failed: ValueError: prompt test:")
    assert inside[1].startswith("ValueError: prompt test:")
    between = ranks.run(2, refusal, gdpo, 2)
    message = "ValueError: reward components and metrics of rollout group 2 are not ['reward/a', 'reward/b']"
    assert between[0].startswith(message)
    assert between[1].startswith(f"PeerError: the exchange of rollouts: rank 0 failed: {message}")


def other_names_in_the_second_round(group_id: int) -> list[Any]:
    return [{"a": 1.0, "b": 1.0}] * 4 if group_id < 4 else [{"a": 1.0, "c": float(i)} for i in range(4)]


def second_round(rank: int, world: int, settings: RunConfig) -> str:
    try:
        train_recorded(rank, world, settings, None, other_names_in_the_second_round)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.timeout(240)
def test_components_of_other_names_in_a_later_round_are_refused(ranks: RankPool, folder: Path) -> None:
    """GDPO looks for a signal in the components before any rows are exchanged."""
    settings = dynamic(folder, 1, adv_estimator={"name": "gdpo"})
    (text,) = ranks.run(1, second_round, settings)
    assert "['reward/a', 'reward/c'] differ from the others' ['reward/a', 'reward/b']" in text


def train_with_broken_logprobs(rank: int, world: int, settings: RunConfig) -> dict[str, Any]:
    original = RecordedDriver.sample

    def sample(self: RecordedDriver, *args: Any) -> list[list[Any]]:
        groups = original(self, *args)
        return [[replace(s, rollout=replace(s.rollout, logprobs=(math.nan,) * len(s.rollout.logprobs)))
                 for s in group] for group in groups]  # fmt: skip

    with mock.patch.object(RecordedDriver, "sample", sample):
        return train_recorded(rank, world, settings, None, three_of_four)


@pytest.mark.timeout(240)
def test_tokens_of_skipped_steps_are_counted(ranks: RankPool, folder: Path) -> None:
    """Every engine log-prob is NaN: nothing trains, and it says why."""
    (result,) = ranks.run(1, train_with_broken_logprobs, config(folder, 1))
    (step,) = result["steps"]
    assert len(set(result["digests"])) == 1
    assert step["optimizer_steps_skipped"] == 2
    assert (step["num_valid_tokens"], step["num_valid_samples"]) == (0, 0)
    assert step["num_dropped_tokens"] == 16 * step["response_length/mean"]


@pytest.mark.timeout(240)
def test_forced_on_policy_needs_no_log_probs_from_before_the_step(ranks: RankPool, folder: Path) -> None:
    """One optimizer step on whatever log-probs; the loss reports what the monitor would have."""
    forced, masking = (
        config(folder, 1, **keys).model_copy(
            update={
                "loss_fn": ClippedPGLossConfig(force_on_policy_ratio=True, reference_policy_kl_penalty=0.0),
                "policy": config(folder, 1).policy.model_copy(update={"train_global_batch_size": 16}),
            }
        )
        for keys in ({}, {"seq_logprob_error_action": "mask"})
    )
    (got,) = ranks.run(1, train_recorded, forced, None, three_of_four)
    (want,) = ranks.run(1, train_recorded, masking, None, three_of_four)
    assert got["digests"] == want["digests"]
    without, with_check = got["steps"][0], want["steps"][0]
    assert with_check.pop("seq_logprob_error_flagged_fraction") == 0
    assert without == pytest.approx(with_check)


@pytest.mark.timeout(240)
def test_a_checkpoint_from_before_the_first_update(ranks: RankPool, folder: Path) -> None:
    def run(name: str, stop_after: int | None = None) -> dict[str, Any]:
        settings = config(folder, 2).model_copy(update={"run_dir": folder / name})
        return ranks.run(2, train_recorded, settings, stop_after, only_from_the_fifth)[0]

    whole, first, second = run("whole"), run("halves", 1), run("halves")
    assert [step["optimizer_steps_skipped"] for step in whole["steps"]] == [2, 0]
    assert first["steps"] + second["steps"] == whole["steps"]
    assert second["digests"][-1] == whole["digests"][-1]
    for name, weight in whole["weights"].items():
        assert torch.equal(second["weights"][name], weight)
