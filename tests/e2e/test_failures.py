"""Interruptions and crashes of a whole run: real launcher, two ranks, a real engine.

Each start of a run takes half a minute, so the tests share what they can: one run is interrupted, resumed,
loses its server, is resumed, loses a rank. Refused input is in tests/unit/test_cli.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from megatron_grpo.rollout import guard as guard_script
from megatron_grpo.rollout.engine_process import SERVER
from tests.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[2]
GONE_S = 30

ENVIRONMENT = """
import time
from pathlib import Path
import torch
from megatron_grpo.environments.base import EnvironmentReturn

class Lengths:
    def __init__(self, switch):
        self.switch = Path(switch)

    def step(self, group):
        if self.switch.exists():
            time.sleep(1000)
        return EnvironmentReturn(torch.tensor([float(len(r.token_ids)) for r in group.rollouts]))
"""


def processes_of(folder: Path) -> list[psutil.Process]:
    """Every process of the run in ``folder``, also those that have left its tree: the environment marks them."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PYTHONPATH") == str(folder):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


class Launched:
    """``launch/torchrun.sh`` as a terminal would run it: the leader of its process group."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        command = [ROOT / "launch/torchrun.sh", "--config", folder / "run.yaml", "--nproc-per-node", "2"]
        environment = {
            **os.environ, "PYTHONPATH": str(folder), "MEGATRON_GRPO_PYTHON": sys.executable, "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [*map(str, command), *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.wait_for("engine0: starting vLLM")
        guard = self.find("-P", guard_script.__file__)
        self._shared_memory = next(Path(word) for word in guard.cmdline() if word.startswith("/dev/shm/"))
        assert self._shared_memory.is_dir()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def wait_for(self, pattern: str, timeout_s: float = 300) -> re.Match[str]:
        deadline = time.monotonic() + timeout_s
        while not (match := re.search(pattern, self.output)):
            assert time.monotonic() < deadline, f"no {pattern!r} within {timeout_s} s:\n{self.output}"
            assert self.process.poll() is None, f"ended before {pattern!r}:\n{self.output}"
            time.sleep(0.05)
        return match

    def interrupt(self) -> None:
        """Ctrl-C: the terminal signals the foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def find(self, *command: str, **environment: str) -> psutil.Process:
        """The one process of the run that is ``python *command ...`` and has these variables."""
        (process,) = [
            p
            for p in processes_of(self.folder)
            if tuple(p.cmdline()[1 : 1 + len(command)]) == command
            and environment.items() <= p.environ().items()
        ]
        return process

    def end(self, timeout_s: float = GONE_S) -> int:
        """The exit status; the run, all its processes and its shared memory must be gone in time."""
        deadline = time.monotonic() + timeout_s
        status = self.process.wait(timeout_s)
        while left := processes_of(self.folder):
            assert time.monotonic() < deadline, f"left over: {[p.cmdline() for p in left]}\n{self.output}"
            time.sleep(0.2)
        self._reader.join(10)
        assert not self._shared_memory.exists()
        return status


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    write_tiny_model(tmp_path / "model")
    (tmp_path / "lengths.py").write_text(ENVIRONMENT)
    lines = [json.dumps({"prompt": f"What is {i} + {i}?"}) for i in range(32)]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    config = {
        "run_dir": str(tmp_path / "run"),
        "grpo": {"max_num_steps": 1000, "num_prompts_per_step": 4, "num_generations_per_prompt": 4},
        "loss_fn": {"reference_policy_kl_penalty": 0.0},
        "policy": {
            "model_path": str(tmp_path / "model"),
            "max_total_sequence_length": 128,
            "train_global_batch_size": 16,
            "train_micro_batch_size": 8,
            "precision": "fp32",
            "parallel": {"tensor_model_parallel_size": 2},
            "optimizer": {"lr": 1e-4},
        },
        "generation": {"max_new_tokens": 64, "vllm": {"dtype": "float32"}},
        "data": {"train": {"kind": "jsonl", "path": str(tmp_path / "questions.jsonl")}},
        "env": {
            "name": "custom",
            "class_path": "lengths:Lengths",
            "args": {"switch": str(tmp_path / "hang")},
            "timeout_s": 100,
        },
        "checkpointing": {"save_period": 2},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    yield tmp_path
    # of a test that failed; the guard, "python -P guard.py", cleans up
    for process in processes_of(tmp_path):
        if process.cmdline()[1:2] != ["-P"]:
            process.kill()


def latest(folder: Path) -> int:
    """The step of the checkpoint that ``latest`` names, which must be complete."""
    name = (folder / "run/checkpoints/latest").read_text().strip()
    trainer = json.loads((folder / "run/checkpoints" / name / "trainer.json").read_text())
    assert name == f"step_{trainer['step']:08d}"
    return int(trainer["step"])


@pytest.mark.timeout(900)
def test_a_run_is_interrupted_resumed_and_loses_its_server_and_a_rank(folder: Path) -> None:
    run = Launched(folder)
    run.wait_for(r"step 3/1000 ")
    run.interrupt()
    assert run.end() == 0
    (stopped,) = map(
        int, re.findall(r"stopped by SIGINT after step (\d+), saved; the same command", run.output)
    )
    assert latest(folder) == stopped >= 3

    unfinished = folder / "run/checkpoints/step_00000999.tmp"
    (unfinished / "model").mkdir(parents=True)
    run = Launched(folder)
    run.wait_for(rf"resuming from \S*step_{stopped:08d} after step {stopped}\n")
    run.wait_for(rf"saved \S*step_{stopped + 2 - stopped % 2:08d}")
    assert not unfinished.exists()
    run.wait_for(rf" step {stopped + 2}/1000 ")
    run.find("-c", SERVER).kill()
    assert run.end() == 1
    first_error = re.search(r"ERROR .*(?:\n    .*)*", run.output)
    assert first_error is not None
    assert re.search(r"engine0 ended with status 137; the end of \S*engine0\.log:\n    ", first_error[0])
    assert "Traceback" not in run.output
    assert latest(folder) >= stopped + 1

    resumed = latest(folder)
    run = Launched(folder)
    run.wait_for(rf" step {resumed + 1}/1000 ")
    run.find("-u", "-m", "megatron_grpo", RANK="1").kill()
    assert run.end() == 128 + signal.SIGKILL
    assert re.search(r"rank 1, process \d+, was ended by SIGKILL", run.output)
    assert "Traceback" not in run.output
    assert latest(folder) >= resumed


@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", ["ctrl-c", "launcher killed"])
def test_a_start_that_is_cut_short_leaves_nothing(folder: Path, how: str) -> None:
    run = Launched(folder)
    if how == "ctrl-c":
        run.interrupt()
        assert run.end() == 128 + signal.SIGINT
        assert "ended by SIGINT; the last checkpoint, if any, is whole" in run.output
        assert "Traceback" not in run.output
    else:
        run.process.kill()
        run.end()
        assert re.search(r"the launcher, process \d+, is gone: leaving at once", run.output)


@pytest.mark.timeout(400)
def test_a_hanging_reward_ends_all_ranks_with_the_prompts_id(folder: Path) -> None:
    (folder / "hang").touch()
    run = Launched(folder, "env.timeout_s=3")
    run.wait_for("ERROR")
    assert run.end() == 1
    errors = re.findall(r"ERROR (.*)", run.output)
    assert re.match(
        r"prompt questions:\d+: environment lengths:Lengths: no answer within env.timeout_s 3 s", errors[0]
    )
    assert "Traceback" not in run.output
    assert not (folder / "run/checkpoints").exists()


@pytest.mark.timeout(400)
def test_a_second_ctrl_c_ends_a_step_that_hangs(folder: Path) -> None:
    run = Launched(folder)
    run.wait_for(r"saved \S*step_00000002")
    (folder / "hang").touch()
    time.sleep(3)
    run.interrupt()
    run.wait_for("SIGINT: stopping after this step")
    run.interrupt()
    assert run.end() == 128 + signal.SIGINT
    assert "ended by SIGINT" in run.output
    assert "Traceback" not in run.output
    assert latest(folder) == 2
