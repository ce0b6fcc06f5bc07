"""Rows on their way to the replica that trains on them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_grpo.policy.packing import MicroBatchRule
from megatron_grpo.training.exchange import ScoredRollout, _exchange_between_leaders, _pack, _to_experience
from megatron_grpo.types import Prompt, Rollout


def scored(prompt: tuple[int, ...], response: tuple[int, ...], **changes: object) -> ScoredRollout:
    """A rollout whose numbers are hard to carry: an odd log-prob, a large group id, versions that differ."""
    fields = {
        "prompt": Prompt("train:7", prompt, "q"),
        "group_id": 2**40 + 1,
        "sample_index": 0,
        "token_ids": response,
        "logprobs": tuple(-math.pi * (t + 1) for t in range(len(response))),
        "weight_versions": tuple(range(5, 5 + len(response))),
        "finish_reason": "stop",
        "text": "",
    } | changes
    return ScoredRollout(Rollout(**fields), 1 / 3, {"reward/a": 0.25, "reward/b": -math.e})  # type: ignore[arg-type]


NAMES = ["reward/a", "reward/b"]


def test_rows_survive_packing() -> None:
    rows = [scored((9, 8, 7), (151_935, 1)), scored((4,), (3, 2, 1, 5), group_id=3, finish_reason="length")]
    flat = torch.cat([_pack(row) for row in rows])
    batch = _to_experience(flat, NAMES, [[1, 0], [1]], multiple=4)

    assert batch.tokens.tolist() == [[9, 8, 7, 151_935, 1, 0, 0, 0], [4, 3, 2, 1, 5, 0, 0, 0]]
    assert batch.token_mask.tolist() == [[0, 0, 0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 0, 0, 0]]
    assert batch.weight_versions.tolist() == [[0, 0, 0, 5, 6, 0, 0, 0], [0, 5, 6, 7, 8, 0, 0, 0]]
    expected = torch.tensor(rows[1].rollout.logprobs)  # float32, as the engine sent them
    assert torch.equal(batch.generation_logprobs[1, 1:5], expected)
    assert batch.generation_logprobs[0].count_nonzero() == 2
    assert batch.group_ids.tolist() == [2**40 + 1, 3]
    assert batch.truncated.tolist() == [0.0, 1.0]
    assert batch.rewards.tolist() == [1 / 3, 1 / 3]
    assert batch.components["reward/b"].tolist() == [-math.e, -math.e]
    assert batch.sample_mask.tolist() == [1.0, 1.0]
    assert batch.microbatch_sizes == ((1, 0), (1,))
    assert batch.lengths.tolist() == [5, 5]


def test_a_replica_without_rows_has_an_empty_batch() -> None:
    batch = _to_experience(torch.empty(0, dtype=torch.float64), NAMES, [[0], [0]], multiple=4)
    assert batch.tokens.shape == (0, 4)
    assert batch.components["reward/a"].shape == batch.lengths.shape == (0,)
    assert [len(part) for part in batch.minibatches()] == [0, 0]


def test_the_sequence_length_is_the_longest_row_rounded_up() -> None:
    flat = torch.cat([_pack(scored((1,), (2,) * n)) for n in (3, 7)])
    assert _to_experience(flat, NAMES, [[2]], multiple=1).tokens.shape == (2, 8)
    assert _to_experience(flat, NAMES, [[2]], multiple=8).tokens.shape == (2, 8)
    assert _to_experience(flat, NAMES, [[2]], multiple=6).tokens.shape == (2, 12)


def test_components_arrive_under_their_names_whatever_their_order() -> None:
    item = scored((1,), (2,))
    swapped = ScoredRollout(item.rollout, item.reward, dict(reversed(item.components.items())))
    assert torch.equal(_pack(swapped), _pack(item))
    names = sorted(swapped.components)
    batch = _to_experience(_pack(swapped), names, [[1]], multiple=1)
    assert {name: batch.components[name].item() for name in names} == item.components


ONE_RANK: Any = SimpleNamespace(dp=1, dp_rank=0, dp_group=SimpleNamespace(size=lambda: 1))


def test_packed_rows_of_unordered_groups_keep_the_budget() -> None:
    """The plan is made of the lengths of the rows that it is for: prompt and response, in the order of the ids."""
    sizes = {3: 30, 0: 4, 2: 25, 1: 8, 5: 3, 4: 20}
    rows = [scored((7,) * (n - 2), (i, i), group_id=i) for i, n in sizes.items()]
    rule = MicroBatchRule(tokens=32)
    flat, plan = _exchange_between_leaders(rows, ["reward/a", "reward/b"], ONE_RANK, 2, 0, rule)
    batch = _to_experience(flat, ["reward/a", "reward/b"], plan, 1)
    assert sorted(batch.group_ids.tolist()) == list(range(6))
    assert batch.lengths.tolist() == [sizes[i] for i in batch.group_ids.tolist()]
    start = 0
    for count in plan[0] + plan[1]:
        assert batch.lengths[start : start + count].sum() <= 32
        start += count
    # who sampled which group, and in which order, changes nothing
    again, other = _exchange_between_leaders(rows[::-1], ["reward/a", "reward/b"], ONE_RANK, 2, 0, rule)
    assert other == plan
    assert torch.equal(again, flat)


def test_rows_with_other_component_names_are_refused() -> None:
    rows = [scored((1,), (2,), group_id=i) for i in range(2)]
    rows[1].components["reward/c"] = rows[1].components.pop("reward/b")
    with pytest.raises(ValueError, match=r"rollout group 1 are not \['reward/a', 'reward/b'\]"):
        _exchange_between_leaders(rows, ["reward/a", "reward/b"], ONE_RANK, 1, 0, MicroBatchRule())
