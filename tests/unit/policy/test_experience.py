"""Rows of an experience as the model sees them."""

from __future__ import annotations

import pytest
import torch

from megatron_grpo.policy.experience import Experience, MicroBatch
from megatron_grpo.policy.packing import MicroBatchRule

LENGTHS = [3, 5, 2, 8]


def experience(lengths: list[int] = LENGTHS, columns: int = 8) -> Experience:
    """Token t of row r is 10 r + t; the response begins at position 1."""
    rows = len(lengths)
    tokens = 10 * torch.arange(rows)[:, None] + torch.arange(columns)
    inside = torch.arange(columns) < torch.tensor(lengths)[:, None]
    mask = (inside & (torch.arange(columns) > 0)).float()
    zeros = torch.zeros(rows, columns)
    return Experience(
        torch.where(inside, tokens, 0), mask, torch.ones(rows), zeros, zeros.long(), torch.arange(rows),
        torch.zeros(rows, dtype=torch.float64), torch.zeros(rows),
    )  # fmt: skip


def test_lengths_end_with_the_last_response_token() -> None:
    assert experience().lengths.tolist() == LENGTHS
    assert experience([]).lengths.tolist() == []


def test_minibatches_are_cut_as_the_sizes_say() -> None:
    batch = experience()
    batch.microbatch_sizes = ((2, 0), (0, 0), (1, 1))
    parts = list(batch.minibatches())
    assert [len(part) for part in parts] == [2, 0, 2]
    assert [part.microbatch_sizes for part in parts] == [((2, 0),), ((0, 0),), ((1, 1),)]
    assert parts[2].tokens[0, :2].tolist() == [20, 21]
    batch.microbatch_sizes = None
    assert [len(part) for part in batch.minibatches()] == [4]


def test_packed_sequences_follow_each_other_and_no_token_predicts_the_next_sequence() -> None:
    batch = experience()
    rule = MicroBatchRule(multiple=4, tokens=16)
    mb = MicroBatch.of(batch, [1, 0], rule, cp_rank=0, cp=1)
    assert mb.lengths.tolist() == [8, 4]
    assert mb.take(batch.tokens).tolist() == [[10, 11, 12, 13, 14, 0, 0, 0, 0, 1, 2, 0]]
    assert mb.position.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]]
    assert mb.sequence.tolist() == [[0] * 8 + [1] * 4]
    assert mb.take_next(batch.tokens).tolist() == [[11, 12, 13, 14, 0, 0, 0, 0, 1, 2, 0, 0]]
    assert mb.take_next(batch.token_mask).tolist() == [[1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0]]


def test_a_sequence_that_fills_its_row_has_no_next_token() -> None:
    batch = experience()
    mb = MicroBatch.of(batch, [3, 2], MicroBatchRule(tokens=16), cp_rank=0, cp=1)
    assert mb.take_next(batch.tokens).tolist() == [[31, 32, 33, 34, 35, 36, 37, 0, 21, 0]]
    assert mb.take_next(batch.token_mask).sum() == 8


@pytest.mark.parametrize("tokens", [None, 16])
@pytest.mark.parametrize("cp", [1, 2])
def test_what_all_ranks_hold_goes_back_to_its_places(cp: int, tokens: int | None) -> None:
    batch = experience()
    rule = MicroBatchRule(multiple=2 * cp if cp > 1 else 1, rows=2, tokens=tokens)
    whole = torch.full_like(batch.tokens, -1)
    for rank in range(cp):
        for rows in ([1, 0], [], [3, 2]):
            mb = MicroBatch.of(batch, rows, rule, rank, cp)
            mb.put(mb.take(batch.tokens), whole)
    assert torch.equal(whole[batch.token_mask > 0], batch.tokens[batch.token_mask > 0])


@pytest.mark.parametrize("tokens", [None, 16])
def test_labels_are_shifted_before_the_context_parallel_split(tokens: int | None) -> None:
    """The token at each chunk boundary is predicted on the rank that holds the one before it."""
    batch = experience()
    rule = MicroBatchRule(multiple=4, rows=1, tokens=tokens)
    pairs = set()
    for rank in range(2):
        mb = MicroBatch.of(batch, [3], rule, rank, cp=2)
        pairs |= set(
            zip(mb.take(batch.tokens)[0].tolist(), mb.take_next(batch.tokens)[0].tolist(), strict=True)
        )
    assert pairs == {(30 + t, 31 + t) for t in range(7)} | {(37, 0)}


@pytest.mark.parametrize("rows", [4, 0])
def test_an_empty_micro_batch_is_padding_that_counts_nowhere(rows: int) -> None:
    batch = experience(LENGTHS[:rows])
    mb = MicroBatch.of(batch, [], MicroBatchRule(multiple=4, tokens=16), cp_rank=1, cp=2)
    assert mb.lengths.tolist() == [4]
    assert mb.take(batch.tokens).tolist() == [[0, 0]]
    assert mb.take_next(batch.token_mask).tolist() == [[0, 0]]
    assert mb.sample_mask.tolist() == [0]
