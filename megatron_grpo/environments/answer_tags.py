"""Replies that reason first and then give the answer in ``<answer>`` tags: correctness, and optionally format."""

from __future__ import annotations

import re

import torch

from megatron_grpo.environments.base import EnvironmentReturn
from megatron_grpo.environments.reasoning_gym import CORRECT_SCORE, ReasoningGymEnvironment
from megatron_grpo.types import RolloutGroup

_REPLY = re.compile(r"(?:(?!</?answer>).)*<answer>((?:(?!</?answer>).)*)</answer>\s*", re.DOTALL)


class AnswerTagsEnvironment(ReasoningGymEnvironment):
    """Scores what stands in the tags of a reply to a reasoning-gym prompt.

    A reply is well formed if it ended with the end token and has exactly one ``<answer>...</answer>``, at its end.
    It is correct if it is well formed and the task accepts what the tags hold. ``data.system_prompt`` has to ask
    for the tags.

    Args:
        format_reward: 0: the reward is 1 for a correct reply, else 0. Above 0 there are two components:
            ``correctness``, the same, and ``format``, this much for a well-formed reply.
    """

    def __init__(self, format_reward: float = 0.0) -> None:
        super().__init__()
        self.format_reward = format_reward

    def step(self, group: RolloutGroup) -> EnvironmentReturn:
        """Score a group.

        Raises:
            ValueError: the prompt does not come from reasoning-gym.
        """
        task, entry = self._task(group.prompt), group.prompt.metadata["entry"]
        correct, well_formed = [], []
        for rollout in group.rollouts:
            match = _REPLY.fullmatch(rollout.text) if rollout.finish_reason == "stop" else None
            well_formed.append(float(match is not None))
            score = task.score_answer(match[1].strip(), entry) if match else 0.0
            correct.append(float(score >= CORRECT_SCORE))
        correctness, form = torch.tensor(correct), torch.tensor(well_formed)  # [n]
        metrics = {"correct": correctness.mean().item(), "well_formed": form.mean().item()}
        if not self.format_reward:
            return EnvironmentReturn(correctness, metrics)
        return EnvironmentReturn({"correctness": correctness, "format": self.format_reward * form}, metrics)
