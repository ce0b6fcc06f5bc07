from __future__ import annotations

import pytest
import torch

from megatron_grpo.environments.base import EnvironmentReturn, RewardError, split_rewards
from megatron_grpo.types import Prompt, Rollout, RolloutGroup

PROMPT = Prompt("train:17", (1, 2), "What is 3 + 4?")
GROUP = RolloutGroup(
    5, PROMPT, tuple(Rollout(PROMPT, 5, i, (9,), (-0.1,), (0,), "stop", "7") for i in range(2))
)


def test_tensor_is_the_total_and_has_no_components() -> None:
    total, components = split_rewards(GROUP, EnvironmentReturn(torch.tensor([1, 0])))
    assert total.dtype == torch.float32
    assert total.tolist() == [1.0, 0.0]
    assert components == {}


def test_components_are_summed_and_named() -> None:
    result = EnvironmentReturn({"correctness": torch.tensor([1.0, 0.0]), "format": torch.tensor([0.25, 0.5])})
    total, components = split_rewards(GROUP, result)
    assert total.tolist() == [1.25, 0.5]
    assert {name: values.tolist() for name, values in components.items()} == {
        "reward/correctness": [1.0, 0.0],
        "reward/format": [0.25, 0.5],
    }


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.ones(2), "step returned Tensor"),
        (EnvironmentReturn(torch.ones(3)), r"rewards has shape \[3\]; it must be a tensor \[2\]"),
        (EnvironmentReturn(torch.ones(2, 1)), r"rewards has shape \[2, 1\]"),
        (EnvironmentReturn([1.0, 0.0]), "rewards has list"),  # type: ignore[arg-type]
        (EnvironmentReturn({}), "empty dict"),
        (EnvironmentReturn({"mean": torch.ones(2)}), "a reward component is called 'mean'"),
        (EnvironmentReturn({"a": torch.ones(2), "b": torch.ones(1)}), r"component 'b' has shape \[1\]"),
        (EnvironmentReturn({"a": torch.tensor([1.0, torch.nan])}), "component 'a' of rollout 1 is nan"),
        (EnvironmentReturn(torch.tensor([1e300, 0.0], dtype=torch.float64)), "rewards of rollout 0 is inf"),
    ],
)
def test_bad_returns_name_the_prompt_and_the_component(result: EnvironmentReturn, message: str) -> None:
    with pytest.raises(RewardError, match=f"prompt train:17: .*{message}") as error:
        split_rewards(GROUP, result)
    assert error.value.prompt_id == "train:17"
