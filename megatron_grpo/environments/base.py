"""What an environment is: it gets a group of rollouts of one prompt and returns a reward for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron_grpo.types import RolloutGroup


class RewardError(RuntimeError):
    """Rewards could not be computed. Never turned into a reward: a failure scored 0 would train the model.

    Attributes:
        prompt_id: the prompt whose group was being scored; None when the environment could not be built.
    """

    def __init__(self, message: str, prompt_id: str | None = None) -> None:
        super().__init__(message)
        self.prompt_id = prompt_id


@dataclass(frozen=True)
class EnvironmentReturn:
    """The rewards of one group of n rollouts, in the order of ``group.rollouts``.

    Worked example, two rollouts with two reward components::

        EnvironmentReturn({"correctness": torch.tensor([1.0, 0.0]), "format": torch.tensor([0.5, 0.5])})

    Attributes:
        rewards: ``[n]``, or several components by name, each ``[n]``; the total reward is their sum.
        metrics: plain numbers about this group, averaged over groups in the run's metrics.
    """

    rewards: torch.Tensor | dict[str, torch.Tensor]
    metrics: dict[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """Scores rollouts. Built once in each worker process with the keyword arguments of ``env.args``."""

    def step(self, group: RolloutGroup) -> EnvironmentReturn:
        """Score all rollouts of one prompt. An exception stops the run with this prompt's id."""
        ...


_TOTALS = {"mean", "min", "max"}


def split_rewards(
    group: RolloutGroup, result: EnvironmentReturn
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Total reward ``[n]`` and the components ``{"reward/<name>": [n]}`` (none for a plain tensor), float32.

    Raises:
        RewardError: not an EnvironmentReturn of tensors ``[n]``, no component, one with a name that is taken, or a
            value that is not finite; names the prompt and the component.
    """
    prompt_id = group.prompt.prompt_id
    if not isinstance(result, EnvironmentReturn):
        raise RewardError(
            f"prompt {prompt_id}: the environment's step returned {type(result).__name__}; "
            "it must return EnvironmentReturn(rewards=torch.tensor([...]))",
            prompt_id,
        )
    if not isinstance(result.rewards, dict):
        return _checked(group, result.rewards, "rewards"), {}
    if not result.rewards:
        raise RewardError(f"prompt {prompt_id}: rewards is an empty dict; give a component", prompt_id)
    if taken := _TOTALS & result.rewards.keys():
        raise RewardError(
            f"prompt {prompt_id}: a reward component is called {min(taken)!r}, which is what the metrics of the total "
            "reward are called; give it another name",
            prompt_id,
        )
    components = {
        f"reward/{name}": _checked(group, values, f"reward component '{name}'")
        for name, values in result.rewards.items()
    }
    return torch.stack(list(components.values())).sum(dim=0), components


def _checked(group: RolloutGroup, values: torch.Tensor, what: str) -> torch.Tensor:
    prompt_id, n = group.prompt.prompt_id, len(group.rollouts)
    if not isinstance(values, torch.Tensor) or values.shape != (n,):
        given = f"shape {list(values.shape)}" if isinstance(values, torch.Tensor) else type(values).__name__
        raise RewardError(
            f"prompt {prompt_id}: {what} has {given}; it must be a tensor [{n}], a number for each rollout",
            prompt_id,
        )
    values = values.detach().to("cpu", torch.float32)
    if not values.isfinite().all():
        index = int((~values.isfinite()).nonzero()[0])
        raise RewardError(
            f"prompt {prompt_id}: {what} of rollout {index} is {values[index].item()}; it must be finite",
            prompt_id,
        )
    return values
