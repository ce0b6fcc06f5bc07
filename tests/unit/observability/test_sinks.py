from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from megatron_grpo.config.run import LoggerConfig
from megatron_grpo.observability.sinks import JSONLSink, MetricLogger, TensorBoardSink


def strict_lines(path: Path) -> list[dict[str, float | None]]:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_jsonl_is_strict_json_and_on_disk_after_each_step(tmp_path: Path) -> None:
    sink = JSONLSink(tmp_path / "run" / "metrics.jsonl")
    sink.log(0, {"reward/mean": 0.25, "grad_norm": math.nan, "kl_penalty": -math.inf})
    # Read before close: a run that is killed now has lost nothing.
    assert strict_lines(tmp_path / "run" / "metrics.jsonl") == [
        {"step": 0, "reward/mean": 0.25, "grad_norm": None, "kl_penalty": None}
    ]
    sink.close()


def test_resume_drops_the_steps_that_will_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JSONLSink(path)
    for step in range(1, 8):
        first.log(step, {"loss": float(step)})
    first.close()
    resumed = JSONLSink(path, resume_step=5)  # the checkpoint was of step 4
    resumed.log(5, {"loss": -5.0})
    resumed.close()
    assert [(line["step"], line["loss"]) for line in strict_lines(path)] == [
        (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, -5.0),
    ]  # fmt: skip
    superseded = strict_lines(tmp_path / "metrics.superseded.jsonl")
    assert [line["step"] for line in superseded] == [5, 6, 7]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.superseded.jsonl"]


def test_a_half_written_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    sink = JSONLSink(path, resume_step=2)
    sink.log(2, {"loss": 2.0})
    sink.close()
    assert strict_lines(path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]
    assert (tmp_path / "metrics.superseded.jsonl").read_text() == '{"step": 2, "lo\n'


def test_a_last_line_without_newline_is_kept_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}')
    sink = JSONLSink(path, resume_step=2)
    sink.log(2, {"loss": 2.0})
    sink.close()
    assert strict_lines(path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]


def test_resume_with_nothing_to_drop_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n')
    JSONLSink(path, resume_step=2).close()
    assert path.read_text() == '{"step": 1, "loss": 1.0}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_over_an_old_one_keeps_the_old_lines_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n')
    JSONLSink(path).close()
    assert path.read_text() == ""
    assert (tmp_path / "metrics.superseded.jsonl").read_text() == '{"step": 1, "loss": 1.0}\n'


@pytest.mark.parametrize("step", [3, 2])
def test_a_step_is_logged_once(tmp_path: Path, step: int) -> None:
    sink = JSONLSink(tmp_path / "metrics.jsonl", resume_step=3)
    if step == 3:
        sink.log(3, {})
    with pytest.raises(
        ValueError, match=f"step {step} came to .*metrics.jsonl after step {3 if step == 3 else 2}"
    ):
        sink.log(step, {})
    sink.close()


def scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    first = TensorBoardSink(tmp_path)
    for step in range(1, 5):
        first.log(step, {"loss": float(step)})
    first.close()
    second = TensorBoardSink(tmp_path, resume_step=3)
    second.log(3, {"loss": -3.0})
    second.close()
    assert scalars(tmp_path, "loss") == [(1, 1.0), (2, 2.0), (3, -3.0)]


def test_tensorboard_sink_does_not_load_torch_or_tensorflow(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from megatron_grpo.observability.sinks import TensorBoardSink; "
        f"TensorBoardSink(pathlib.Path({str(tmp_path)!r})).close(); "
        "sys.exit(bool({'torch', 'tensorflow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


@pytest.mark.parametrize("tensorboard", [True, False])
def test_metric_logger_feeds_every_sink(tmp_path: Path, tensorboard: bool) -> None:
    console = Console(file=io.StringIO())
    config = LoggerConfig(tensorboard=tensorboard)
    with MetricLogger.open(config, tmp_path, console, resume_step=0, max_num_steps=2) as metrics:
        metrics.log(0, {"validation/accuracy": 0.5})
        metrics.log(1, {"loss": 2.0})
    assert strict_lines(tmp_path / "metrics.jsonl") == [
        {"step": 0, "validation/accuracy": 0.5},
        {"step": 1, "loss": 2.0},
    ]
    assert (tmp_path / "tensorboard").exists() == tensorboard
    if tensorboard:
        assert scalars(tmp_path / "tensorboard", "validation/accuracy") == [(0, 0.5)]


def test_every_sink_is_closed_when_one_fails() -> None:
    closed: list[str] = []

    class Sink:
        def __init__(self, name: str) -> None:
            self.name = name

        def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

        def close(self) -> None:
            closed.append(self.name)
            if self.name == "bad":
                raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        MetricLogger([Sink("good"), Sink("bad"), Sink("other")]).close()
    assert sorted(closed) == ["bad", "good", "other"]
