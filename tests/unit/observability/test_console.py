from __future__ import annotations

import io
import logging
import math
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from megatron_grpo.observability.console import MAX_VERBOSE_RANKS, ConsoleSink, format_duration, setup_logging

STEP = {
    "reward/mean": 0.5,
    "response_length/mean": 231.4,
    "kl_penalty": 0.00123,
    "clip_fraction_low": 0.01,
    "seq_logprob_error_mean": 1.0021,
    "grad_norm": 0.937,
    "lr": 1e-6,
    "time/step_s": 41.0,
    "time/rollout_s": 30.0,
    "time/logprob_s": 3.0,
    "time/train_s": 7.0,
    "time/refit_s": 1.0,
}


@pytest.fixture(autouse=True)
def logging_restored() -> Iterator[None]:
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    logging.captureWarnings(False)
    for handler in [h for h in root.handlers if h not in before]:
        root.removeHandler(handler)
        handler.close()
    logging.getLogger("megatron_grpo").setLevel(logging.NOTSET)


def terminal(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=40, color_system=None)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_one_plain_line_per_step_away_from_a_terminal(tmp_path: Path) -> None:
    console = setup_logging(tmp_path, 0, Console(file=io.StringIO()))
    clock = Clock()
    sink = ConsoleSink(console, 100, clock=clock)
    clock.now = 50.0
    sink.log(1, STEP | {"validation/accuracy": 0.25})
    sink.close()
    (line,) = written(console).splitlines()
    assert line.endswith(
        "step 1/100 | reward 0.500 | length 231 | kl 0.00123 | clip_low 0.010 | clip_high - | "
        "logprob_err 1.0021 | grad 0.937 | lr 1e-06 | "
        "41.0s (rollout 30.0s logprob 3.0s train 7.0s refit 1.0s) | eta 1:22:30 | validation 0.250"
    )  # 99 steps of 50 s are 4950 s
    assert "\x1b" not in line


def test_the_table_shows_recent_steps_and_dashes(tmp_path: Path) -> None:
    console = terminal()
    clock = Clock()
    sink = ConsoleSink(console, 100, clock=clock)
    sink.log(0, {"validation/accuracy": 0.125})
    for step in range(1, 11):
        clock.now += 60.0
        sink.log(step, STEP | {"reward/mean": step / 10, "grad_norm": math.nan if step == 10 else 1.0})
    sink.close()
    last = written(console).rsplit("step 10/100", 1)[1].splitlines()
    rows = {line[:20].strip(): line[20:].split() for line in last if line.strip()}
    assert rows["step"] == ["5", "6", "7", "8", "9", "10"]
    assert rows["reward"] == ["0.500", "0.600", "0.700", "0.800", "0.900", "1.000"]
    assert rows["clip fraction high"] == ["-"] * 6
    assert rows["gradient norm"] == ["1"] * 5 + ["nan"]
    assert rows["rollout"] == ["30.0s"] * 6
    assert "0:10:00 elapsed, 1:30:00 left" in last[0]
    assert "validation accuracy  0.125 at step 0" in written(console)
    assert max(len(line) for line in last[1:-1]) <= 80


def test_log_records_appear_beside_the_table(tmp_path: Path) -> None:
    console = setup_logging(tmp_path, 0, terminal(120))
    sink = ConsoleSink(console, 10)
    sink.log(1, STEP)
    logging.getLogger("megatron_grpo.rollout").warning("engine [3] restarted")
    sink.log(2, STEP)
    sink.close()
    text = written(console)
    assert text.count("engine [3] restarted") == 1
    assert text.rindex("step 2/10") > text.index("engine [3] restarted")


def test_resumed_run_counts_from_the_checkpoint() -> None:
    console = terminal()
    clock = Clock()
    sink = ConsoleSink(console, 100, resume_step=41, clock=clock)
    clock.now = 10.0
    sink.log(41, STEP)
    sink.close()
    assert "step 41/100" in written(console)
    assert "0:09:50 left" in written(console)  # 59 steps of 10 s


def test_each_rank_has_its_file_and_rank_0_the_console(tmp_path: Path) -> None:
    for rank in (0, 1, MAX_VERBOSE_RANKS):
        console = setup_logging(tmp_path, rank, Console(file=io.StringIO()))
        logging.getLogger("megatron_grpo.policy").info("info of rank %d", rank)
        logging.getLogger("somebody.else").info("chatter")
        logging.getLogger("somebody.else").warning("warning of rank %d", rank)
        logging.getLogger("somebody.else").error("error of rank %d", rank)
        assert ("info of rank 0" in written(console)) == (rank == 0)
        assert ("error of rank 0" in written(console)) == (rank == 0)
        assert "warning of rank" not in written(console)
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert sorted(logs) == ["rank_0.log", "rank_1.log", f"rank_{MAX_VERBOSE_RANKS}.log"]
    assert "INFO megatron_grpo.policy: info of rank 1" in logs["rank_1.log"]
    assert "chatter" not in logs["rank_1.log"]
    assert logs[f"rank_{MAX_VERBOSE_RANKS}.log"].count("\n") == 2
    assert "warning of rank 64" in logs["rank_64.log"]


def test_a_quiet_rank_makes_no_file_and_python_warnings_are_logged(tmp_path: Path) -> None:
    setup_logging(tmp_path, 100)
    logging.getLogger("megatron_grpo.policy").info("not for rank 100")
    assert list((tmp_path / "logs").iterdir()) == []
    logging.captureWarnings(False)  # what pytest does with warnings is put aside for this one
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("slow path", UserWarning, stacklevel=1)
        logging.captureWarnings(False)
    assert "slow path" in (tmp_path / "logs" / "rank_100.log").read_text()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (3725.4, "1:02:05"), (360000, "100:00:00")]
)
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
