from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_grpo.config import EnvConfig
from megatron_grpo.environments.loading import load_environment
from megatron_grpo.environments.reasoning_gym import ReasoningGymEnvironment

MODULE = """
class Length:
    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def step(self, group):
        return None

class NoStep:
    pass

def function(group):
    return None
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "loading_rewards.py").write_text(MODULE)
    (tmp_path / "loading_broken.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("loading_rewards", "loading_broken"):
        sys.modules.pop(name, None)


def custom(class_path: str, **args: object) -> EnvConfig:
    return EnvConfig(name="custom", class_path=class_path, args=args)


def test_built_in() -> None:
    environment = load_environment(EnvConfig(name="reasoning_gym", args={"partial_credit": True}))
    assert isinstance(environment, ReasoningGymEnvironment)
    assert environment.partial_credit


def test_class_of_the_current_directory(project: Path) -> None:
    environment = load_environment(custom("loading_rewards:Length", scale=2.5))
    assert environment.scale == 2.5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (custom("loading_rewards"), "not of the form package.module:ClassName"),
        (custom("loading_reward:Length"), "there is no module 'loading_reward'"),
        (custom("no_package.rewards:Length"), "there is no module 'no_package'"),
        (custom("loading_rewards:Lenght"), "has no attribute 'Lenght'; did you mean 'Length'"),
        (custom("loading_rewards:NoStep"), r"not a class with a method step\(self, group\)"),
        (custom("loading_rewards:function"), r"not a class with a method step\(self, group\)"),
        (custom("loading_rewards:Length", scales=1), "env.args {'scales': 1} do not fit Length.*'scales'"),
        (EnvConfig(name="reasoning_gym", args={"partial": True}), "env.args .*partial_credit"),
    ],
)
def test_refusals(project: Path, config: EnvConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_environment(config)


def test_class_path_belongs_to_custom() -> None:
    with pytest.raises(ValueError, match="name is custom and class_path is None"):
        EnvConfig(name="custom")
    with pytest.raises(ValueError, match="name is reasoning_gym and class_path is a:B"):
        EnvConfig(name="reasoning_gym", class_path="a:B")


def test_missing_import_of_the_users_module_is_not_hidden(project: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        load_environment(custom("loading_broken:Length"))
