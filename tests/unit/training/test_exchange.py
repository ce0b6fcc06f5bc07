"""Which replica trains on which row, and rows on their way there."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_grpo.training.exchange import ScoredRollout, _pack, _to_experience, assign_rows
from megatron_grpo.types import Prompt, Rollout


def skewed_lengths(rows: int, seed: int = 0) -> torch.Tensor:
    """Mostly short, a few very long, as responses are."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(rows, generator=generator) ** 4 * 4000).long() + 1


@pytest.mark.parametrize(("dp", "num_minibatches"), [(1, 1), (1, 4), (2, 1), (4, 2), (8, 4)])
def test_every_row_is_assigned_once(dp: int, num_minibatches: int) -> None:
    assignment = assign_rows(skewed_lengths(64), dp, num_minibatches, seed=3)
    assert assignment.shape == (dp, num_minibatches, 64 // (dp * num_minibatches))
    assert sorted(assignment.flatten().tolist()) == list(range(64))


def test_minibatches_hold_the_same_rows_for_any_number_of_replicas() -> None:
    lengths = skewed_lengths(64)
    expected = [sorted(part.tolist()) for part in assign_rows(lengths, 1, 4, seed=3)[0]]
    for dp in (2, 4, 8):
        got = assign_rows(lengths, dp, 4, seed=3)
        assert [sorted(got[:, m].flatten().tolist()) for m in range(4)] == expected
    assert [sorted(part.tolist()) for part in assign_rows(lengths, 1, 4, seed=4)[0]] != expected


def test_replicas_of_a_minibatch_get_close_to_the_same_tokens() -> None:
    lengths = skewed_lengths(512)
    tokens = lengths[assign_rows(lengths, 8, 2, seed=0)].sum(-1)  # [dp, minibatch]
    in_order = lengths[torch.arange(512).view(8, 2, 32)].sum(-1)
    for minibatch in range(2):
        spread = tokens[:, minibatch].max() - tokens[:, minibatch].min()
        # dealt back and forth, replicas differ by less than the longest row
        assert spread <= lengths.max()
        assert spread < (in_order[:, minibatch].max() - in_order[:, minibatch].min()) / 4


def test_rows_that_do_not_split_are_refused() -> None:
    with pytest.raises(ValueError, match="10 rollouts do not split into 2 mini-batches on 4 replicas"):
        assign_rows(torch.ones(10, dtype=torch.int64), 4, 2, seed=0)


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
    flat = torch.cat([_pack(row, NAMES) for row in rows])
    batch = _to_experience(flat, NAMES, num_minibatches=2, multiple=4)

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
    assert batch.num_minibatches == 2


def test_the_sequence_length_is_the_longest_row_rounded_up() -> None:
    flat = torch.cat([_pack(scored((1,), (2,) * n), NAMES) for n in (3, 7)])
    assert _to_experience(flat, NAMES, 1, multiple=1).tokens.shape == (2, 8)
    assert _to_experience(flat, NAMES, 1, multiple=8).tokens.shape == (2, 8)
    assert _to_experience(flat, NAMES, 1, multiple=6).tokens.shape == (2, 12)


def test_a_group_with_other_components_is_refused_by_its_prompt() -> None:
    message = r"prompt train:7: reward components .*\['reward/a', 'reward/b'\] differ .* \['reward/a'\]"
    with pytest.raises(ValueError, match=message):
        _pack(scored((1,), (2,)), ["reward/a"])
