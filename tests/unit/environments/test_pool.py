from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config import EnvConfig
from megatron_grpo.environments.base import RewardError, split_rewards
from megatron_grpo.environments.pool import EnvironmentPool
from megatron_grpo.types import Prompt, Rollout, RolloutGroup

# Two components, and every way to fail that the prompt's text can ask for.
REWARDS = """
import os, sys, time
import torch
from megatron_grpo.environments.base import EnvironmentReturn

class Graded:
    def __init__(self, broken: bool = False) -> None:
        if broken:
            raise OSError("no grader at this address")

    def step(self, group):
        match group.prompt.text:
            case "raise":
                raise KeyError("answer")
            case "exit":
                os._exit(3)
            case "hang":
                time.sleep(600)
        texts = [rollout.text for rollout in group.rollouts]
        correctness = torch.tensor([float(text.strip("# ") == "7") for text in texts])
        if group.prompt.text == "nan":
            correctness[0] = float("nan")
        heavy = {"megatron.core", "vllm", "transformers", "reasoning_gym"} & sys.modules.keys()
        form = torch.tensor([0.5 * text.startswith("#") for text in texts])
        metrics = {"pid": os.getpid(), "heavy_modules": len(heavy)}
        return EnvironmentReturn({"correctness": correctness, "format": form}, metrics)
"""


def group(text: str, replies: tuple[str, ...] = ("# 7", "8")) -> RolloutGroup:
    prompt = Prompt(f"train:{text}", (1, 2), text)
    rollouts = (Rollout(prompt, 0, i, (9,), (-0.1,), (0,), "stop", reply) for i, reply in enumerate(replies))
    return RolloutGroup(0, prompt, tuple(rollouts))


def config(**changes: Any) -> EnvConfig:
    return EnvConfig(name="custom", class_path="pool_rewards:Graded", **changes)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("project")
    (path / "pool_rewards.py").write_text(REWARDS)
    return path


@pytest.fixture(scope="module")
def pool(project: Path) -> Iterator[EnvironmentPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)  # workers start here and find the module
        with EnvironmentPool(config(timeout_s=2)) as pool:
            pool.wait_until_ready()
            yield pool


def test_components_in_the_order_of_the_groups(pool: EnvironmentPool) -> None:
    first, second = pool.score([group("a"), group("b", ("7", "7", "# 8"))])
    total, components = split_rewards(group("a"), first)
    assert total.tolist() == [1.5, 0.0]
    assert components["reward/format"].tolist() == [0.5, 0.0]
    assert split_rewards(group("b", ("", "", "")), second)[0].tolist() == [1.0, 1.0, 0.5]
    assert first.metrics["heavy_modules"] == 0


def test_a_reward_that_raises_carries_the_users_traceback(pool: EnvironmentPool) -> None:
    with pytest.raises(RewardError, match=r"prompt train:raise: .*pool_rewards:Graded failed") as error:
        pool.score([group("a"), group("raise"), group("b")])
    assert error.value.prompt_id == "train:raise"
    assert 'raise KeyError("answer")' in str(error.value)
    assert "worker.py" not in str(error.value)


def test_a_reward_that_is_not_finite(pool: EnvironmentPool) -> None:
    with pytest.raises(RewardError, match="train:nan: reward component 'correctness' of rollout 0 is nan"):
        pool.score([group("nan")])


def test_signals_for_the_owner_do_not_end_a_worker(pool: EnvironmentPool) -> None:
    pid = int(pool.score([group("a")])[0].metrics["pid"])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(pid, number)
    assert pool.score([group("a")])[0].metrics["pid"] == pid


def test_workers_that_hang_or_die_are_replaced(pool: EnvironmentPool) -> None:
    pid = int(pool.score([group("a")])[0].metrics["pid"])
    with pytest.raises(RewardError, match=r"train:hang: .*no answer within env.timeout_s 2 s") as error:
        pool.score([group("hang")])
    assert error.value.prompt_id == "train:hang"
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(RewardError, match=r"train:exit: .*worker process ended with status 3"):
        pool.score([group("exit")])
    (result,) = pool.score([group("a")])
    assert result.metrics["pid"] != pid
    os.kill(int(result.metrics["pid"]), signal.SIGKILL)
    with pytest.raises(RewardError, match=r"train:a: .*worker process ended by signal 9"):
        pool.score([group("a")])


def test_an_environment_that_cannot_be_built(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    with EnvironmentPool(config(args={"broken": True})) as pool:
        for attempt in (pool.wait_until_ready, lambda: pool.score([group("a")])):
            with pytest.raises(RewardError, match="could not be built") as error:
                attempt()
            assert "OSError: no grader at this address" in str(error.value)


def test_startup_deadline(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    with (
        EnvironmentPool(config(startup_timeout_s=0.01)) as pool,
        pytest.raises(RewardError, match=r"no answer within env.startup_timeout_s 0.01 s"),
    ):
        pool.wait_until_ready()


OWNER = """
import sys
from pathlib import Path
sys.path.insert(0, {repo!r})
from tests.unit.environments.test_pool import config, group
from megatron_grpo.environments.pool import EnvironmentPool

pool = EnvironmentPool(config(num_workers=2))
pids = set()
while len(pids) < 2:
    pids = pids | {{int(result.metrics["pid"]) for result in pool.score([group("a")] * 2)}}
pool.submit(group("hang"))
print(*pids, flush=True)
sys.stdin.read()
"""


@pytest.mark.timeout(120)
def test_idle_and_busy_workers_end_with_a_killed_owner(project: Path) -> None:
    repo = Path(__file__).parents[3]
    (project / "owner.py").write_text(OWNER.format(repo=str(repo)))  # no main guard: workers must not run it
    owner = subprocess.Popen(
        [sys.executable, "owner.py"], cwd=project, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        pids = owner.stdout.readline().split()  # type: ignore[union-attr]
        owner.kill()
    assert len(pids) == 2
    deadline = time.monotonic() + 20
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists() and not _is_zombie(pid)]:
        assert time.monotonic() < deadline, f"workers {alive} outlived their owner"
        time.sleep(0.1)


def _is_zombie(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
