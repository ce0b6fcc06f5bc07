from __future__ import annotations

import json

import pytest

from megatron_grpo.data.sampler import PromptSampler
from megatron_grpo.types import Prompt

PROMPTS = [Prompt(f"train:{i}", (i, i + 1), f"question {i}") for i in range(10)]


def ids(draws: list[tuple[int, Prompt]]) -> list[str]:
    return [prompt.prompt_id for _, prompt in draws]


def test_each_epoch_is_a_permutation_and_group_ids_never_repeat() -> None:
    sampler = PromptSampler(PROMPTS, seed=3, shuffle=True)
    draws = [
        draw for _ in range(10) for draw in sampler.next(3)
    ]  # batches of 3 cross the ends of epochs of 10
    assert [group_id for group_id, _ in draws] == list(range(30))
    epochs = [ids(draws[start : start + 10]) for start in (0, 10, 20)]
    assert all(sorted(epoch) == sorted(p.prompt_id for p in PROMPTS) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_two_prompts_of_the_same_text_are_two_groups() -> None:
    twins = [Prompt(f"train:{i}", (1, 2), "same") for i in range(2)]
    draws = PromptSampler(twins, seed=0, shuffle=True).next(4)
    assert [group_id for group_id, _ in draws] == [0, 1, 2, 3]
    assert sorted(ids(draws)) == ["train:0", "train:0", "train:1", "train:1"]


def test_order_depends_on_seed_and_epoch_only() -> None:
    one_by_one = PromptSampler(PROMPTS, seed=3, shuffle=True)
    draws = [draw for _ in range(25) for draw in one_by_one.next(1)]
    assert draws == PromptSampler(PROMPTS, seed=3, shuffle=True).next(25)
    assert ids(draws) != ids(PromptSampler(PROMPTS, seed=4, shuffle=True).next(25))
    # the order of seed 3 itself: a run resumed with another Python version must find it again
    assert ids(draws[:10]) == [f"train:{i}" for i in (6, 5, 3, 2, 4, 7, 0, 1, 9, 8)]


def test_file_order_without_shuffle() -> None:
    draws = PromptSampler(PROMPTS, seed=3, shuffle=False).next(12)
    assert ids(draws) == [f"train:{i % 10}" for i in range(12)]


def test_resume_at_any_position() -> None:
    straight = PromptSampler(PROMPTS, seed=3, shuffle=True).next(40)
    for position in (0, 7, 10, 23):
        before = PromptSampler(PROMPTS, seed=3, shuffle=True)
        before.next(position)
        state = json.loads(json.dumps(before.state_dict()))
        resumed = PromptSampler(PROMPTS, seed=3, shuffle=True)
        resumed.load_state_dict(state)
        assert resumed.next(40 - position) == straight[position:]


def test_resume_far_into_a_run_needs_no_replay() -> None:
    sampler = PromptSampler(PROMPTS, seed=3, shuffle=True)
    sampler.load_state_dict({**sampler.state_dict(), "position": 10**15})
    (group_id, _), *_ = sampler.next(2)
    assert group_id == 10**15


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (PromptSampler(PROMPTS, seed=4, shuffle=True), "grpo.seed was 3 .* is 4 now"),
        (PromptSampler(PROMPTS, seed=3, shuffle=False), "data.shuffle was True"),
        (
            PromptSampler(PROMPTS[:9], seed=3, shuffle=True),
            "number of prompts of data.train was 10 .* is 9 now",
        ),
        (PromptSampler(PROMPTS[::-1], seed=3, shuffle=True), "fingerprint of data.train's prompts was"),
        (
            PromptSampler([*PROMPTS[:9], Prompt("train:9", (9, 11), "question 9")], seed=3, shuffle=True),
            "fingerprint of data.train's prompts was",
        ),
    ],
)
def test_resume_with_other_data_is_refused(other: PromptSampler, name: str) -> None:
    state = PromptSampler(PROMPTS, seed=3, shuffle=True).state_dict()
    with pytest.raises(ValueError, match=f"can't resume: .*{name}"):
        other.load_state_dict(state)


def test_no_prompts() -> None:
    with pytest.raises(ValueError, match="no prompts"):
        PromptSampler([], seed=0, shuffle=True)
