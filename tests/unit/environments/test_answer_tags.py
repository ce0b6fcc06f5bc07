from __future__ import annotations

from typing import Any

import pytest

from megatron_grpo.config import EnvConfig
from megatron_grpo.environments.answer_tags import AnswerTagsEnvironment
from megatron_grpo.environments.loading import load_environment
from megatron_grpo.types import FinishReason, Prompt, Rollout, RolloutGroup

ENTRY = {"question": "3 + 4 =", "answer": "7", "metadata": {}}
METADATA = {"task": "chain_sum", "task_args": {}, "entry": ENTRY}
REPLIES: list[tuple[str, FinishReason, float, float]] = [  # correctness, format
    ("3 and 4 make <answer>7</answer>", "stop", 1, 1),
    ("So:\n<answer>\n 7 \n</answer>\n", "stop", 1, 1),
    ("I guess <answer>8</answer>", "stop", 0, 1),
    ("<answer></answer>", "stop", 0, 1),
    ("3 and 4 make <answer>7</answer>", "length", 0, 0),  # cut off after the answer
    ("7", "stop", 0, 0),
    ("<answer>7</answer> or <answer>8</answer>", "stop", 0, 0),  # no second guess
    ("<answer>8<answer>7</answer>", "stop", 0, 0),
    ("<answer>7</answer>, I am sure", "stop", 0, 0),
    ("", "stop", 0, 0),
]


def group(metadata: dict[str, Any]) -> RolloutGroup:
    prompt = Prompt("chain_sum:3", (1, 2), "3 + 4 =", metadata)
    rollouts = (
        Rollout(prompt, 0, i, (9,), (-0.1,), (0,), reason, text)
        for i, (text, reason, _, _) in enumerate(REPLIES)
    )
    return RolloutGroup(0, prompt, tuple(rollouts))


def test_one_reward_is_correctness() -> None:
    result = AnswerTagsEnvironment().step(group(METADATA))
    assert result.rewards.tolist() == [correct for _, _, correct, _ in REPLIES]
    assert result.metrics == {"correct": pytest.approx(0.2), "well_formed": pytest.approx(0.4)}


def test_two_components() -> None:
    path = "megatron_grpo.environments.answer_tags:AnswerTagsEnvironment"
    config = EnvConfig(name="custom", class_path=path, args={"format_reward": 0.5})
    rewards = load_environment(config).step(group(METADATA)).rewards
    assert rewards["correctness"].tolist() == [correct for _, _, correct, _ in REPLIES]
    assert rewards["format"].tolist() == [0.5 * form for _, _, _, form in REPLIES]


def test_prompts_of_other_data_are_refused() -> None:
    with pytest.raises(ValueError, match="chain_sum:3 has no metadata"):
        AnswerTagsEnvironment().step(group({"answer": "7"}))
