"""What ``megatron-grpo plan`` refuses, as a user meets it: exit status 2 and one screen, before anything starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_grpo import cli
from tests.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[2]
LAUNCHER = ROOT / "launch/torchrun.sh"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    write_tiny_model(folder / "model")
    (folder / "questions.jsonl").write_text('{"prompt": "What is 1 + 1?"}\n')
    config: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "grpo": {"max_num_steps": 2, "num_prompts_per_step": 4, "num_generations_per_prompt": 4},
        "policy": {
            "model_path": str(folder / "model"),
            "max_total_sequence_length": 64,
            "train_global_batch_size": 8,
            "parallel": {"tensor_model_parallel_size": 2},
            "optimizer": {"lr": 1e-4},
        },
        "generation": {"max_new_tokens": 8},
        "data": {"train": {"kind": "jsonl", "path": str(folder / "questions.jsonl")}},
        "env": {"name": "reasoning_gym"},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder


def plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str]:
    """Status and output of ``megatron-grpo plan``."""
    if "--world-size" not in arguments:
        arguments = ("--world-size", "2", *arguments)
    monkeypatch.setattr(
        "sys.argv", ["megatron-grpo", "plan", "--config", str(folder / "run.yaml"), *arguments]
    )
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    captured = capsys.readouterr()
    code = exit_info.value.code
    assert code is None or isinstance(code, int)
    return code or 0, captured.out + captured.err


def test_a_good_plan_says_the_layout_and_writes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, output = plan(folder, monkeypatch, capsys, "--world-size", "4")
    assert status == 0
    assert output.startswith(
        "plan: 4 ranks = TP 2 x PP 1 x CP 1 x DP 2; 2 steps of 4 prompts x 4 rollouts, 2 optimizer steps each"
    )
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["policy.model_path=nowhere"], ["policy.model_path", "nowhere is not a directory"]),
        (
            ["--world-size", "3", "policy.parallel.tensor_model_parallel_size=3"],
            ["policy.parallel.tensor_model_parallel_size 3", "4 attention heads", "use 2"],
        ),
        (["--world-size", "3"], ["world size 3 is not a multiple of TP 2", "start 2 ranks"]),
        (
            ["policy.train_global_batch_size=5"],
            ["policy.train_global_batch_size 5", "num_generations_per_prompt 4 = 16", "use a divisor"],
        ),
        (
            ["policy.train_micro_batch_size=3"],
            ["policy.train_micro_batch_size 3", "train_global_batch_size 8 / ", "= 8 sequences; use 2 or 4"],
        ),
        (
            ["--world-size", "4", "policy.logprob_batch_size=16"],
            ["policy.logprob_batch_size 16", "16 / data-parallel size 2 = 8 sequences; use 8"],
        ),
        (
            ["distributed_timeout_s=660"],
            [
                "distributed_timeout_s 660",
                "request_timeout_s 600 + env.timeout_s 60 = 660",
                "raise the first",
            ],
        ),
        (["polcy.precision=fp32"], ["unknown key 'polcy'; did you mean 'policy'?"]),
        (
            ["grpo.num_prompt_per_step=3"],
            ["grpo: unknown key 'num_prompt_per_step'; did you mean 'num_prompts_per_step'?"],
        ),
        (["grpo.seed"], ["override 'grpo.seed' is not of the form section.key=value"]),
        (["=3"], ["override '=3' is not of the form section.key=value"]),
        (["grpo.max_num_steps=["], ["override 'grpo.max_num_steps=['", "not valid YAML"]),
        (["run_dir.x=1"], ["override 'run_dir.x=1': run_dir is the value", "not a section"]),
        (["policy.optimizer.lr=fast"], ["policy.optimizer.lr", "valid number", "given: 'fast'"]),
        (
            ["policy.max_total_sequence_length=1024"],
            ["policy.max_total_sequence_length 1024", "max_position_embeddings 512", "lower it"],
        ),
        (["generation.temperature=0"], ["generation: temperature is 0", "use a value above 0"]),
        (["generation.top_p=0.8"], ["generation: top_p is 0.8", "set top_p to 1.0"]),
        (["generation.top_k=5"], ["generation: top_k is 5", "set top_k to -1"]),
        (["data.train.path=none.jsonl"], ["data.train.path none.jsonl does not exist"]),
        (["--world-size", "0"], ["'--world-size'", "greater than or equal to 1"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) and "=" in value[-1] else "",
)
def test_bad_input_is_refused_with_the_key_the_value_and_the_mend(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    parts: list[str],
) -> None:
    status, output = plan(folder, monkeypatch, capsys, *arguments)
    assert status == 2
    missing = [part for part in parts if part not in output]
    assert not missing, output
    assert "Traceback" not in output
    assert len(output.splitlines()) <= 10
    assert not (folder / "run").exists()


def test_a_run_dir_that_cannot_be_written_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = folder / "run.yaml" / "run"
    status, output = plan(folder, monkeypatch, capsys, f"run_dir={run_dir}")
    assert status == 2
    assert f"run_dir {run_dir} can't be written ({folder / 'run.yaml'} is not a writable directory)" in output


def test_only_rank_0_prints_a_refusal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    assert plan(folder, monkeypatch, capsys, "grpo.seed") == (2, "")


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(LAUNCHER), *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "MEGATRON_GRPO_PYTHON": sys.executable},
        timeout=120,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc-per-node", "2"], "--config is missing"),
        (["--config"], "--config needs a value"),
        (
            ["--config", "run.yaml", "--nproc-per-node", "two"],
            "--nproc-per-node two: not a whole number above 0",
        ),
        (["--config", "run.yaml", "--nnodes", "0"], "--nnodes 0: not a whole number above 0"),
        (["--config", "run.yaml", "--nnodes", "2"], "--nnodes 2 needs --master-addr"),
        (["--config", "run.yaml", "--gpus", "2"], "unknown option --gpus"),
    ],
)
def test_the_launcher_refuses_bad_options(folder: Path, arguments: list[str], message: str) -> None:
    result = launch(folder, *arguments)
    assert result.returncode == 2
    assert f"torchrun.sh: {message}" in result.stderr


def test_the_launcher_refuses_a_taken_master_port_before_it_starts_ranks(folder: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        nodes = ["--nproc-per-node", "1", "--nnodes", "2", "--master-addr", "localhost"]
        result = launch(folder, "--config", "run.yaml", *nodes, "--master-port", str(port))
    assert result.returncode == 2
    assert f"error: --master-port {port} can't be used on this host (Address already in use)" in result.stderr
    assert "give another --master-port on every node" in result.stderr
    assert result.stdout == ""
