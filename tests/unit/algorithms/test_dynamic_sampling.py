"""Which groups train: over several rounds, whatever replica sampled them."""

from __future__ import annotations

import pytest
import torch

from megatron_grpo.algorithms.dynamic_sampling import has_signal, select_groups


def select(ids: list[int], signal: list[bool], num_groups: int) -> tuple[list[int], list[int]]:
    """Ids of the groups that train and of those that are kept, sorted."""
    group_ids = torch.tensor(ids)
    selection = select_groups(group_ids, torch.tensor(signal), num_groups)
    assert selection.train.sum() == num_groups
    return sorted(group_ids[selection.train].tolist()), sorted(group_ids[selection.keep].tolist())


def test_a_signal_is_more_than_one_distinct_reward() -> None:
    rewards = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.35, 0.35, 0.35 + 1e-7]])
    assert has_signal(rewards[..., None]).tolist() == [False, False, True, True]


def test_components_of_gdpo_with_equal_totals_are_a_signal() -> None:
    """(1, 0) and (0, 1) sum to 1 in every rollout; GDPO gives them different advantages."""
    components = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.5], [1.0, 0.5]]], dtype=torch.float64)
    assert has_signal(components).tolist() == [True, False]
    assert has_signal(components.sum(-1, keepdim=True)).tolist() == [False, False]


def test_no_group_has_no_signal() -> None:
    assert has_signal(torch.zeros(0, 1, 1)).tolist() == []


def test_several_rounds_and_steps_lose_and_repeat_nothing() -> None:
    """Rounds of 4 groups, of which every third has a signal, until 4 have one; what is left over comes first."""
    useful = {group_id for group_id in range(100) if group_id % 3 == 1}
    trained: list[int] = []
    pool: list[int] = []
    drawn = 0
    for _ in range(6):
        while len(useful & set(pool)) < 4:
            pool += range(drawn, drawn + 4)
            drawn += 4
        train, keep = select(pool, [group_id in useful for group_id in pool], 4)
        trained += train
        pool = keep
        assert len(keep) < 4  # so that a group is at most one step old when it trains
    assert trained == sorted(useful)[:24]
    assert sorted(trained + pool) == sorted(group_id for group_id in useful if group_id < drawn)


def test_too_few_signals_are_filled_up_with_the_oldest_of_the_others() -> None:
    assert select([7, 3, 5, 4, 6], [True, False, False, False, True], 4) == ([3, 4, 6, 7], [])
    assert select([2, 1, 0], [False] * 3, 2) == ([0, 1], [])


def test_the_order_in_which_replicas_report_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(40) + 2**40
    signal = torch.rand(40, generator=generator) > 0.6
    expected = select(ids.tolist(), signal.tolist(), 8)
    for _ in range(5):
        order = torch.randperm(40, generator=generator)
        assert select(ids[order].tolist(), signal[order].tolist(), 8) == expected


def test_fewer_groups_than_asked_for_are_refused() -> None:
    with pytest.raises(ValueError, match="2 groups were sampled, 3 are to be selected"):
        select([0, 1], [True, True], 3)
