from __future__ import annotations

import pytest

from megatron_grpo.environments.reasoning_gym import ReasoningGymEnvironment
from megatron_grpo.types import FinishReason, Prompt, Rollout, RolloutGroup

ENTRY = {"question": "3 + 4 =", "answer": "7", "metadata": {}}


def group(replies: list[tuple[str, FinishReason]], metadata: dict | None = None) -> RolloutGroup:
    if metadata is None:
        metadata = {"task": "chain_sum", "task_args": {"min_terms": 2, "max_terms": 2}, "entry": ENTRY}
    prompt = Prompt("chain_sum:3", (1, 2), "3 + 4 =", metadata)
    rollouts = (
        Rollout(prompt, 0, i, (9,), (-0.1,), (0,), end, text) for i, (text, end) in enumerate(replies)
    )
    return RolloutGroup(0, prompt, tuple(rollouts))


REPLIES: list[tuple[str, FinishReason]] = [
    ("7", "stop"),
    (" 7\n", "stop"),
    ("7", "length"),  # right, but it never ended
    ("8", "stop"),
    ("the answer is 7", "stop"),
    ("", "stop"),
]


def test_right_answers_that_ended_have_reward_one() -> None:
    result = ReasoningGymEnvironment().step(group(REPLIES))
    assert result.rewards.tolist() == [1, 1, 0, 0, 0, 0]
    assert result.metrics["ended"] == pytest.approx(5 / 6)


def test_partial_credit_is_the_score_of_replies_that_ended() -> None:
    entry = {"question": "Reverse: ab", "answer": "the word is ba", "metadata": {}}
    metadata = {"task": "leg_counting", "task_args": {}, "entry": entry}
    padded = "I think the word is ba"  # contains the answer: 14 of 22 characters
    replies: list[tuple[str, FinishReason]] = [
        (padded, "stop"),
        (padded, "length"),
        ("the word is ba", "stop"),
    ]
    assert ReasoningGymEnvironment().step(group(replies, metadata)).rewards.tolist() == [0, 0, 1]
    partial = ReasoningGymEnvironment(partial_credit=True).step(group(replies, metadata))
    assert partial.rewards.tolist() == pytest.approx([14 / 22, 0, 1])


def test_prompts_of_other_data_are_refused() -> None:
    with pytest.raises(ValueError, match=r"chain_sum:3 has no metadata \['entry', 'task', 'task_args'\]"):
        ReasoningGymEnvironment().step(group([("7", "stop")], {"answer": "7"}))
