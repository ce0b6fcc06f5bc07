"""A fixed sample of the differential test, faults that it must catch, and ``doctor parallel``.

``make differential`` runs the whole generated set.
"""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from megatron_grpo import cli
from megatron_grpo.config import ConfigError, load_config
from megatron_grpo.training.parallel_doctor import diagnose
from megatron_grpo.training.parallel_factors import plan_examination
from tests.distributed.differential import (
    CASES_PER_LAYOUT,
    LAYOUTS,
    TOLERANCE,
    Case,
    check_all,
    generate,
    run,
    sample,
)
from tests.rank_pool import RankPool

SAMPLE = sample(generate(), ranks=4)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_the_sample_agrees_with_one_process(ranks: RankPool, tmp_path: Path, precision: str) -> None:
    cases = SAMPLE if precision == "fp64" else SAMPLE[::3]
    results = list(run(ranks, cases, tmp_path, [precision]))
    assert [case for _, case, _ in results] == cases
    for _, case, found in results:
        assert found.keys() == {"metrics", "gradients", "logprobs"}
        worst = {kind: d.error for kind, d in found.items()}
        assert max(worst.values()) <= TOLERANCE[precision], (case.name, found)


def test_the_set_is_what_it_says() -> None:
    cases = generate()
    assert len(cases) == len(LAYOUTS) * CASES_PER_LAYOUT >= 200
    assert len({case.name for case in cases}) == len(cases)
    assert [Case.named(case.name) for case in cases] == cases
    left = set().union(*(c.factors for c in cases)) - set().union(*(c.factors for c in SAMPLE))
    assert left == {"dp8"}
    assert max(case.world_size for case in cases) == 8


# ---- faults


def _loss_per_micro_batch() -> Any:
    """A mean over micro-batches in place of a sum, as Megatron without the per-token contract takes it."""
    from megatron_grpo.policy.policy import MegatronPolicy

    original = MegatronPolicy._run_schedule

    def faulty(self: Any, microbatches: Any, on_logprobs: Any, *, forward_only: bool, **rest: Any) -> Any:
        def scaled(microbatch: Any, logprobs: Any) -> Any:
            output = on_logprobs(microbatch, logprobs)
            return output if forward_only else (output[0] / len(microbatches), *output[1:])

        return original(self, microbatches, scaled, forward_only=forward_only, **rest)

    return mock.patch.object(MegatronPolicy, "_run_schedule", faulty)


def _half_of_a_context_parallel_gradient() -> Any:
    from megatron_grpo.policy import optimizer

    original = optimizer.finalize_model_grads

    def faulty(model: Any, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        for chunk in model:
            chunk.scale_gradients(1 / chunk.config.context_parallel_size)

    return mock.patch.object(optimizer, "finalize_model_grads", faulty)


def _hidden_gradient_of_one_tensor_parallel_rank() -> Any:
    """An output layer that does not sum the gradient of its input over tensor-parallel ranks."""
    from megatron_grpo.parallel import fused_logprobs

    original = fused_logprobs.masked_linear_logprobs

    def faulty(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "reduce_grad_hidden": False})

    return mock.patch.object(fused_logprobs, "masked_linear_logprobs", faulty)


FAULTS = {
    "none": mock.MagicMock,
    "micro_batches": _loss_per_micro_batch,
    "cp": _half_of_a_context_parallel_gradient,
    "tp": _hidden_gradient_of_one_tensor_parallel_rank,
}


@contextmanager
def _fault(name: str) -> Iterator[None]:
    with FAULTS[name]():
        yield


def _check_with_fault(
    rank: int, world: int, cases: Sequence[Case], folder: Path, precision: str, *, fault: str
) -> Any:
    with _fault(fault):
        return check_all(rank, world, cases, folder, precision)


@pytest.mark.parametrize(
    ("layout", "fault", "relative_error"),
    [("dp2", "micro_batches", 3 / 4), ("cp2", "cp", 1 / 2), ("tp2", "tp", None)],
)
def test_a_wrong_scale_is_caught(
    ranks: RankPool, tmp_path: Path, layout: str, fault: str, relative_error: float | None
) -> None:
    case = Case(layout, "padded1", "clip_higher", "k3", "all", "untied", "stored", 1.0, 0)  # 4 micro-batches
    check = functools.partial(_check_with_fault, fault=fault)
    ((_, _, found),) = run(ranks, [case], tmp_path, ["fp64"], check)
    assert found["logprobs"].error < 1e-12
    if relative_error is None:
        assert found["gradients"].error > 1e-3
    else:  # every tensor is wrong by the same factor
        assert found["gradients"].error == pytest.approx(relative_error)


# ---- doctor parallel


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's configuration; of its model, config.json alone."""
    folder = tmp_path_factory.mktemp("doctor")
    values = yaml.safe_load((Path(__file__).parents[2] / "configs/quickstart.yaml").read_text())
    values["policy"]["model_path"] = str(folder / "model")
    (folder / "model").mkdir()
    hf_config = {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 320, "hidden_size": 96, "intermediate_size": 192,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "model" / "config.json").write_text(json.dumps(hf_config))
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return folder / "run.yaml"


def doctor(config: Path, capfd: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, list[str]]:
    """Status and lines of ``megatron-grpo doctor parallel``."""
    arguments = ["megatron-grpo", "doctor", "parallel", "--config", str(config), *overrides]
    with mock.patch("sys.argv", arguments), pytest.raises(SystemExit) as exit_info:
        cli.main()
    out, err = capfd.readouterr()
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code, (out if exit_info.value.code < 2 else err).splitlines()


def _verdicts(lines: Sequence[str]) -> dict[str, str]:
    return {
        words[0]: words[1]
        for line in lines
        if len(words := line.split()) > 1 and words[1] in ("ok", "DISAGREES")
    }


def test_the_doctor_passes_the_quickstart(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, lines = doctor(config, capfd, "policy.sequence_packing.enabled=true")
    assert status == 0, lines
    assert _verdicts(lines) == dict.fromkeys(["micro-batch", "packing", "tp", "dp", "layout"], "ok")
    assert lines[-1].startswith("all agree")
    errors = [float(line.split()[2]) for line in lines if " ok " in line]
    assert max(errors) < 1e-9
    assert math.prod(errors) > 0  # floats were compared, and not with themselves


@pytest.fixture
def experts(config: Path, tmp_path: Path) -> Path:
    """The same of a model with experts."""
    values = yaml.safe_load(config.read_text())
    hf_config = json.loads((config.parent / "model" / "config.json").read_text()) | {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    values["policy"]["model_path"] = str(tmp_path)
    values["policy"]["parallel"] = {"expert_tensor_parallel_size": 2}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "run.yaml"


def test_the_doctor_compares_expert_tensor_parallelism_above_tp(
    experts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, lines = doctor(experts, capfd)
    assert status == 0, lines
    assert _verdicts(lines) == dict.fromkeys(["micro-batch", "etp", "dp", "layout"], "ok")
    assert next(line for line in lines if line.startswith("etp ")).count("ETP 2 x DP 2") == 1


def test_the_doctor_of_one_replica_with_micro_batches_of_one_row(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under torchrun with as many ranks as one replica has: two rows, of which the batch masked both."""
    run = load_config(config, ["policy.train_micro_batch_size=1"])
    tp = run.policy.parallel.tensor_model_parallel_size
    assert plan_examination(run, ranks=tp).rows == 4
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(ConfigError, match=r"MASTER_PORT=''; start the doctor with launch/torchrun\.sh"):
        diagnose(run, lines_of_nobody)


def lines_of_nobody(line: str) -> None:
    raise AssertionError(line)


def _dying_rank(examination: Any, store: Any, rank: int, say: Any) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    store.wait(["never"])


def test_a_rank_of_the_doctor_that_is_killed_is_one_line(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with mock.patch("megatron_grpo.training.parallel_doctor.examine", _dying_rank):
        status, lines = doctor(config, capfd)
    assert status == 1
    assert lines == ["rank 1 of the doctor ended before the result: process 1 terminated with signal SIGKILL"]


@pytest.mark.timeout(120)
def test_ctrl_c_ends_the_doctor_and_its_ranks(config: Path) -> None:
    command = [sys.executable, "-m", "megatron_grpo", "doctor", "parallel", "--config", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("doctor parallel: ")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130
    for _ in range(100):
        if not _group_is_alive(process.pid):
            return
        time.sleep(0.1)
    pytest.fail("ranks are left")


def _group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _faulty_rank(*args: Any) -> None:
    from megatron_grpo.parallel import platform
    from megatron_grpo.training.parallel_doctor import examine

    platform.install()
    with _fault("tp"):
        examine(*args)


def _crashing_rank(examination: Any, store: Any, rank: int, say: Any) -> None:
    from megatron_grpo.parallel import platform

    platform.install()
    from megatron_grpo.policy import optimizer
    from megatron_grpo.training import parallel_doctor

    def crash(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no gradients today")

    if rank == 1:
        optimizer.finalize_model_grads = crash
    parallel_doctor.COLLECTIVE_TIMEOUT_S = 20.0  # what the other rank waits for this one
    parallel_doctor.examine(examination, store, rank, say)


@pytest.mark.parametrize(
    ("entry", "text"), [(_faulty_rank, "in gradients"), (_crashing_rank, "RuntimeError: no gradients today")]
)
def test_the_doctor_names_the_first_factor_that_is_wrong(
    config: Path, capfd: pytest.CaptureFixture[str], entry: Any, text: str
) -> None:
    with (
        mock.patch("megatron_grpo.training.parallel_doctor.examine", entry),
        mock.patch("megatron_grpo.training.parallel_factors.RANK_LIMIT", 2),
    ):
        status, lines = doctor(config, capfd)
    assert status == 1
    verdicts = _verdicts(lines)
    assert (verdicts["micro-batch"], verdicts["tp"]) == ("ok", "DISAGREES")
    assert any(line.startswith("tp ") and text in line for line in lines)
    assert lines[-1].startswith("the first that disagrees is tp")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("policy.model_path=nowhere", ["policy.model_path: nowhere is not a directory"]),
        ("policy.layer_spec=transformer_engine", ["transformer_engine, which is not installed"]),
        (
            "policy.parallel.tensor_model_parallel_size=3",
            ["policy.parallel.tensor_model_parallel_size 3", "4 attention heads"],
        ),
        ("policy.precision=fp64", ["policy.precision is fp64", "set it to fp32"]),
    ],
)
def test_the_doctor_refuses_a_bad_configuration(
    config: Path, capfd: pytest.CaptureFixture[str], override: str, parts: list[str]
) -> None:
    status, lines = doctor(config, capfd, override)
    assert status == 2
    assert [part for part in parts if part not in "\n".join(lines)] == []
    assert len(lines) < 10
