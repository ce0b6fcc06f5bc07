"""Rows on their way to the replica that trains on them."""

from __future__ import annotations

import math

import torch

from megatron_grpo.training.exchange import ScoredRollout, _pack, _to_experience
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
