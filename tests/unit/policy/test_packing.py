"""Which rows form which micro-batch, on which rank: from lengths alone."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_grpo.policy.packing import (
    MicroBatchRule,
    assign_rows,
    local_tokens,
    logprob_rule,
    pack,
    train_rule,
)

PADDED = MicroBatchRule(rows=2)


def skewed_lengths(rows: int, longest: int = 4000, seed: int = 0) -> np.ndarray:
    """Mostly short, a few very long, as responses are."""
    return (np.random.default_rng(seed).random(rows) ** 4 * (longest - 1)).astype(np.int64) + 1


def flat(assignment: list) -> list[int]:
    return [row for rank in assignment for step in rank for microbatch in step for row in microbatch]


def steps_of(assignment: list) -> list[list[int]]:
    """The rows of each optimizer step, over all ranks."""
    return [
        sorted(itertools.chain(*(m for rank in assignment for m in rank[k])))
        for k in range(len(assignment[0]))
    ]


@pytest.mark.parametrize("tokens", [None, 8192])
@pytest.mark.parametrize(("dp", "num_minibatches"), [(1, 1), (1, 4), (2, 1), (4, 2), (8, 4)])
def test_every_row_is_assigned_once(dp: int, num_minibatches: int, tokens: int | None) -> None:
    rule = MicroBatchRule(rows=2, tokens=tokens)
    assignment = assign_rows(skewed_lengths(64), dp, num_minibatches, seed=3, rule=rule)
    assert sorted(flat(assignment)) == list(range(64))
    assert [len(rank) for rank in assignment] == [num_minibatches] * dp
    # every rank runs equally many micro-batches in each optimizer step
    for step in range(num_minibatches):
        assert len({len(rank[step]) for rank in assignment}) == 1


@pytest.mark.parametrize("tokens", [None, 8192])
def test_minibatches_hold_the_same_rows_for_any_number_of_replicas(tokens: int | None) -> None:
    lengths, rule = skewed_lengths(64), MicroBatchRule(rows=2, tokens=tokens)
    expected = steps_of(assign_rows(lengths, 1, 4, 3, PADDED))
    for dp in (2, 4, 8):
        assert steps_of(assign_rows(lengths, dp, 4, 3, rule)) == expected
    assert steps_of(assign_rows(lengths, 1, 4, 4, rule)) != expected


def test_padded_micro_batches_have_one_size_and_replicas_close_to_the_same_tokens() -> None:
    lengths = skewed_lengths(512)
    assignment = assign_rows(lengths, 8, 2, seed=0, rule=PADDED)
    assert {len(m) for rank in assignment for step in rank for m in step} == {2}
    for step in range(2):
        tokens = [int(lengths[list(itertools.chain(*rank[step]))].sum()) for rank in assignment]
        assert max(tokens) - min(tokens) <= lengths.max() / 10


def test_rows_that_do_not_split_are_refused() -> None:
    lengths = np.ones(10, dtype=np.int64)
    with pytest.raises(ValueError, match="10 rollouts do not split into 2 mini-batches on 4 replicas"):
        assign_rows(lengths, 4, 2, seed=0, rule=PADDED)
    packed = MicroBatchRule(tokens=8)
    assert sorted(flat(assign_rows(lengths, 4, 2, 0, packed))) == list(range(10))
    with pytest.raises(ValueError, match="10 rollouts do not split into 3 mini-batches"):
        assign_rows(lengths, 4, 3, 0, packed)


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("budget", [4096, 16384])
@pytest.mark.parametrize("dp", [1, 8])
@pytest.mark.parametrize("seed", range(5))
def test_bins_keep_the_budget_and_are_few(dp: int, budget: int, multiple: int, seed: int) -> None:
    rule = MicroBatchRule(multiple=multiple, tokens=budget)
    lengths = rule.padded(skewed_lengths(1000, seed=seed))
    bins = pack(lengths, rule, dp)
    assert sorted(itertools.chain(*bins)) == list(range(1000))
    assert max(lengths[rows].sum() for rows in bins) <= budget
    fewest = -(-lengths.sum() // budget)
    assert len(bins) % dp == 0
    assert len(bins) <= -(-(fewest + 1) // dp) * dp


def _lockstep(bins: list[list[int]], costs: np.ndarray, dp: int) -> float:
    """Time over ideal of ranks that wait for each other in every micro-batch."""
    per_bin = np.array([costs[rows].sum() for rows in bins]).reshape(-1, dp)
    return float(per_bin.max(1).sum() / (per_bin.sum() / dp))


@pytest.mark.parametrize(
    ("size", "dp", "seed"),
    [
        (1024, 8, 0),  # 39.86 budgets of tokens: 40 bins would be far from alike
        (1024, 32, 6),  # one sequence more than the bins of an index hold evenly
        (4096, 32, 1),  # 37 of the longest sequences for indexes of 32 bins
    ],
)
def test_bins_of_an_index_are_alike(size: int, dp: int, seed: int) -> None:
    lengths = (200 * (1 + np.random.default_rng(seed).pareto(1.3, size))).clip(16, 8192).astype(np.int64)
    rule = MicroBatchRule(tokens=16384)
    bins = pack(lengths, rule, dp)
    assert _lockstep(bins, rule.cost(lengths), dp) <= 1.01
    assert len(bins) <= -(-(-(-lengths.sum() // 16384) + 1) // dp) * dp
    assert max(lengths[rows].sum() for rows in bins) <= 16384


def test_a_sequence_as_long_as_the_budget_is_one_micro_batch() -> None:
    assert pack(np.array([64]), MicroBatchRule(tokens=64)) == [[0]]


def test_interleaving_gets_its_multiple_of_micro_batches_and_some_are_empty() -> None:
    rule = MicroBatchRule(tokens=100, at_a_time=4)
    assignment = assign_rows([60, 60, 30, 30, 10, 1], 2, 1, seed=0, rule=rule)
    assert [len(rank[0]) for rank in assignment] == [4, 4]
    assert sum(not m for rank in assignment for m in rank[0]) >= 2  # 8 micro-batches of 6 sequences


def test_the_budget_counts_the_padding() -> None:
    rule = MicroBatchRule(multiple=8, tokens=16)
    assert rule.padded([1, 8, 9]).tolist() == [8, 8, 16]
    ((bins,),) = assign_rows([1, 1, 1], 1, 1, seed=0, rule=rule)
    assert sorted(len(rows) for rows in bins) == [1, 2]
    with pytest.raises(
        ValueError, match="a sequence of 24 tokens, with its padding, exceeds the budget of 16"
    ):
        assign_rows([17], 1, 1, seed=0, rule=rule)


def test_no_rows_still_make_a_micro_batch() -> None:
    assert pack(np.empty(0, dtype=np.int64), MicroBatchRule(tokens=10, at_a_time=2)) == [[], []]


def test_context_parallel_ranks_hold_two_mirrored_chunks_of_each_sequence() -> None:
    sequence, position = local_tokens([8, 4], cp_rank=0, cp=2)
    assert sequence.tolist() == [0, 0, 0, 0, 1, 1]
    assert position.tolist() == [0, 1, 6, 7, 0, 3]
    _, position = local_tokens([8, 4], cp_rank=1, cp=2)
    assert position.tolist() == [2, 3, 4, 5, 1, 2]
    assert [x.tolist() for x in local_tokens([2, 1], 0, 1)] == [[0, 0, 1], [0, 1, 0]]


def test_rules_of_training_and_of_scoring() -> None:
    policy: Any = SimpleNamespace(
        parallel=SimpleNamespace(sequence_multiple=4), train_micro_batch_size=2, train_mb_tokens=64,
        forward_batch_size=8, logprob_mb_tokens=256,
    )  # fmt: skip
    plain: Any = SimpleNamespace(pp=4, vpp=1)
    assert train_rule(policy, plain) == MicroBatchRule(multiple=4, rows=2, tokens=64, at_a_time=1)
    interleaved: Any = SimpleNamespace(pp=4, vpp=2)
    assert train_rule(policy, interleaved).at_a_time == 4
    assert logprob_rule(policy, interleaved) == MicroBatchRule(multiple=4, rows=8, tokens=256, at_a_time=4)


def test_attention_costs_with_the_square_of_the_length() -> None:
    assert MicroBatchRule(attention_cost=0.5).cost(np.array([2, 4])).tolist() == [4.0, 12.0]
    assert MicroBatchRule(attention_cost=0.0).cost(np.array([2, 4])).tolist() == [2.0, 4.0]


def test_minibatches_smaller_than_the_replicas_are_refused() -> None:
    with pytest.raises(ValueError, match="8 rollouts do not split into 4 mini-batches on 4 replicas"):
        assign_rows(np.ones(8, dtype=np.int64), 4, 4, seed=0, rule=MicroBatchRule())
