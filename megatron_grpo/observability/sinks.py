"""Metric sinks: ``metrics.jsonl``, TensorBoard, and the logger that feeds every sink of a run.

The main rank alone builds them. Steps count from 1 and each is logged once, with all of its metrics: an
evaluation after step N belongs to the metrics of step N, one before the first step is step 0.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console

from megatron_grpo.config.run import LoggerConfig
from megatron_grpo.observability.console import ConsoleSink


class MetricSink(Protocol):
    """Where the metrics of each step go. Steps arrive in increasing order."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JSONLSink:
    """One JSON object per step and line: ``{"step": 3, "reward/mean": 0.5, "grad_norm": null}``.

    Each line is on its way to the disk before ``log`` returns. A NaN or an infinity is written as ``null``,
    which every JSON parser reads.

    Args:
        path: the file; created when it does not exist, continued when it does.
        resume_step: the first step that this process will log. Lines of this and later steps, and lines that
            are not whole (a crash in the middle of a write), move to ``<stem>.superseded.jsonl``, so that the
            file never holds a step twice and nothing is lost. The file is replaced atomically.
    """

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._last_step = resume_step - 1
        if path.exists():
            _supersede(path, resume_step)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line.

        Raises:
            ValueError: the step, or a later one, was logged before.
        """
        if step <= self._last_step:
            raise ValueError(
                f"step {step} came to {self._file.name} after step {self._last_step}; log each step once, "
                "with all of its metrics"
            )
        self._last_step = step
        numbers = {name: float(value) for name, value in metrics.items()}
        line = {"step": step} | {name: x if math.isfinite(x) else None for name, x in numbers.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _supersede(path: Path, resume_step: int) -> None:
    """Move what a resumed run will write again out of ``path``."""
    kept = path.with_name(path.name + ".resuming")
    changed = False
    with (
        path.open(encoding="utf-8", errors="replace") as old,
        kept.open("w", encoding="utf-8") as new,
        path.with_name(f"{path.stem}.superseded.jsonl").open("a", encoding="utf-8") as superseded,
    ):
        for line in old:
            step = _step_of(line)
            keep = step is not None and step < resume_step
            whole = line.endswith("\n")
            (new if keep else superseded).write(line if whole else line + "\n")
            changed |= not (keep and whole)
        for file in (superseded, new):
            file.flush()
            os.fsync(file.fileno())
    if changed:
        os.replace(kept, path)
    else:
        kept.unlink()
    if os.path.getsize(superseded.name) == 0:
        os.unlink(superseded.name)


def _step_of(line: str) -> int | None:
    """The step of a whole line of the file, or None."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    step = values.get("step") if isinstance(values, dict) else None
    return step if isinstance(step, int) else None


class TensorBoardSink:
    """Scalars in an event file below ``directory``, written with TensorBoard's own writer (no torch).

    Args:
        directory: where TensorBoard looks; each process adds one event file.
        resume_step: TensorBoard hides what earlier processes logged for this and later steps.
    """

    def __init__(self, directory: Path, resume_step: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(directory))
        restart = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=resume_step, session_log=restart))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=float(x)) for name, x in metrics.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MetricLogger:
    """Sends the metrics of each step to every sink; closes them all at the end of a ``with`` block."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = tuple(sinks)

    @classmethod
    def open(
        cls, config: LoggerConfig, run_dir: Path, console: Console, *, resume_step: int, max_num_steps: int
    ) -> Self:
        """The sinks of a run: ``metrics.jsonl``, TensorBoard if configured, and the progress on ``console``.

        Args:
            config: section ``logger`` of the run.
            run_dir: the files go below it.
            console: what :func:`megatron_grpo.observability.console.setup_logging` returned.
            resume_step: the first step that will be logged; 0, or N + 1 after a checkpoint of step N.
            max_num_steps: how many steps the whole run has.
        """
        sinks: list[MetricSink] = [JSONLSink(run_dir / "metrics.jsonl", resume_step)]
        if config.tensorboard:
            sinks.append(TensorBoardSink(run_dir / "tensorboard", resume_step))
        sinks.append(ConsoleSink(console, max_num_steps, resume_step))
        return cls(sinks)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.log(step, metrics)

    def close(self) -> None:
        with ExitStack() as stack:  # every sink is closed, also when one of them fails
            for sink in self._sinks:
                stack.callback(sink.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
