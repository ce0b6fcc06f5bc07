"""Rewards of reasoning-gym tasks, by the task's own ``score_answer``."""

from __future__ import annotations

import json
from typing import Any

import reasoning_gym
import torch

from megatron_grpo.environments.base import EnvironmentReturn
from megatron_grpo.types import Prompt, RolloutGroup

# score_answer gives partial credit, by default to any reply that contains the answer, which rewards padding.
CORRECT_SCORE = 0.99


class ReasoningGymEnvironment:
    """Reward 1 if the reply ended with the end token and its text is the right answer, else 0.

    The prompt's metadata holds ``task``, ``task_args`` and ``entry`` (question, answer, metadata), as
    ``data.datasets`` writes them.

    Args:
        partial_credit: the reward is the task's score itself, between 0 and 1, for replies that ended.
    """

    def __init__(self, partial_credit: bool = False) -> None:
        self.partial_credit = partial_credit
        self._tasks: dict[str, Any] = {}

    def step(self, group: RolloutGroup) -> EnvironmentReturn:
        """Score a group; a cut-off reply (finish_reason "length") has reward 0 whatever it says.

        Raises:
            ValueError: the prompt does not come from reasoning-gym.
        """
        task, entry = self._task(group.prompt), group.prompt.metadata["entry"]
        ended = torch.tensor([rollout.finish_reason == "stop" for rollout in group.rollouts])  # [n]
        scores = torch.tensor([float(task.score_answer(r.text.strip(), entry)) for r in group.rollouts])
        rewards = (scores if self.partial_credit else (scores >= CORRECT_SCORE).float()) * ended
        return EnvironmentReturn(
            rewards, {"score_answer": scores.mean().item(), "ended": ended.float().mean().item()}
        )

    def _task(self, prompt: Prompt) -> Any:
        missing = {"task", "task_args", "entry"} - prompt.metadata.keys()
        if missing:
            raise ValueError(
                f"prompt {prompt.prompt_id} has no metadata {sorted(missing)}: env.name reasoning_gym "
                "scores prompts of kind reasoning_gym only; for other data write one (env.name: custom)"
            )
        name, args = prompt.metadata["task"], prompt.metadata["task_args"]
        key = json.dumps([name, args], sort_keys=True)
        if key not in self._tasks:
            self._tasks[key] = reasoning_gym.create_dataset(name, size=1, seed=0, **args)
        return self._tasks[key]
