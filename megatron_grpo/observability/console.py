"""Logging set-up, and the progress of a run on a terminal or in a log file."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.logging import RichHandler
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

logger = logging.getLogger(__name__)

MAX_VERBOSE_RANKS = 64
_HANDLER_PREFIX = "megatron_grpo."


def setup_logging(run_dir: Path, rank: int, console: Console | None = None) -> Console:
    """Send log records of rank 0 to the console, and of every rank to ``<run_dir>/logs/rank_<n>.log``.

    Our records count from INFO on the console and from DEBUG in the files; those of other libraries and Python
    warnings from WARNING in the files and from ERROR on the console. What grows with
    the number of ranks: one file per rank that has something to say. Ranks from :data:`MAX_VERBOSE_RANKS` on
    write warnings and errors only, and a file comes into being with its first record, so a healthy run on
    1,000 ranks has at most 64 small files; a fault that every rank reports has one per rank.

    Args:
        run_dir: directory of the run.
        rank: global rank of this process.
        console: where rank 0 writes; default stderr.

    Returns:
        The console, for :class:`ConsoleSink`: progress and log records take turns on it.
    """
    console = console or Console(stderr=True)
    log_dir = run_dir / "logs"
    log_dir.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [logging.FileHandler(log_dir / f"rank_{rank}.log", delay=True)]
    if rank >= MAX_VERBOSE_RANKS:
        handlers[0].setLevel(logging.WARNING)
    handlers[0].set_name(f"{_HANDLER_PREFIX}file")
    handlers[0].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    if rank == 0:
        handlers.append(_console_handler(console))
    root = logging.getLogger()
    for handler in [h for h in root.handlers if (h.get_name() or "").startswith(_HANDLER_PREFIX)]:
        root.removeHandler(handler)
        handler.close()
    for handler in handlers:
        root.addHandler(handler)
    logging.getLogger("megatron_grpo").setLevel(logging.DEBUG)
    logging.captureWarnings(True)
    return console


def _console_handler(console: Console) -> logging.Handler:
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, log_time_format="%H:%M:%S", markup=False)
    else:
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.set_name(f"{_HANDLER_PREFIX}console")
    handler.addFilter(_for_people)
    return handler


def _for_people(record: logging.LogRecord) -> bool:
    return record.levelno >= (logging.INFO if record.name.startswith("megatron_grpo") else logging.ERROR)


class _Row(NamedTuple):
    """How one metric is shown: the row of the table, and the short name in a plain line."""

    metric: str
    label: str
    short: str
    show: Callable[[float], str]


def _significant(value: float) -> str:
    return f"{value:.3g}"


def _fixed(value: float) -> str:
    return f"{value:.3f}"


def _seconds(value: float) -> str:
    return f"{value:.1f}s"


_METRICS = (
    _Row("reward/mean", "reward", "reward", _fixed),
    _Row("response_length/mean", "response length", "length", lambda x: f"{x:.0f}"),
    _Row("kl_penalty", "KL", "kl", _significant),
    _Row("clip_fraction_low", "clip fraction low", "clip_low", _fixed),
    _Row("clip_fraction_high", "clip fraction high", "clip_high", _fixed),
    _Row("seq_logprob_error_mean", "log-prob error", "logprob_err", lambda x: f"{x:.4f}"),
    _Row("grad_norm", "gradient norm", "grad", _significant),
    _Row("lr", "learning rate", "lr", _significant),
)
_TIMES = (
    _Row("time/step_s", "step time", "step", _seconds),
    _Row("time/rollout_s", "  rollout", "rollout", _seconds),
    _Row("time/logprob_s", "  log-prob", "logprob", _seconds),
    _Row("time/train_s", "  train", "train", _seconds),
    _Row("time/refit_s", "  refit", "refit", _seconds),
)
_VALIDATION = "validation/accuracy"
_COLUMNS = 8  # steps kept for the table; as many are shown as the terminal is wide
_COLUMN_WIDTH = 10
_LABEL_WIDTH = 20


class ConsoleSink:
    """Progress: a live table and bar on a terminal, one line per step anywhere else.

    On a terminal, log records of the handler that :func:`setup_logging` installed appear above the table. A
    metric that a step doesn't have is a dash; a NaN is shown as such.

    Args:
        console: what :func:`setup_logging` returned.
        max_num_steps: steps of the whole run.
        resume_step: the first step that will be logged.
        clock: seconds, monotonic; for the remaining time, estimated from the last steps.
    """

    def __init__(
        self,
        console: Console,
        max_num_steps: int,
        resume_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._max_num_steps = max_num_steps
        self._clock = clock
        self._done = max(resume_step - 1, 0)
        self._start = self._last = clock()
        # Tuples, replaced and never changed: the live display reads them from its own thread.
        self._steps: tuple[tuple[int, Mapping[str, float]], ...] = ()
        self._durations: tuple[float, ...] = ()
        self._validations: tuple[tuple[int, float], ...] = ()
        self._live: Live | None = None
        if console.is_terminal:
            # A pipe behind stdout stays a pipe; prints to the terminal go above the table.
            self._live = Live(
                console=console,
                get_renderable=self._render,
                refresh_per_second=2,
                redirect_stdout=sys.stdout.isatty(),
            )
            self._live.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = self._clock()
        if step > self._done:  # the evaluation before step 1 says nothing about the duration of a step
            self._durations = (*self._durations, (now - self._last) / (step - self._done))[-_COLUMNS:]
            self._done = step
        self._last = now
        self._steps = (*self._steps, (step, dict(metrics)))[-_COLUMNS:]
        if _VALIDATION in metrics:
            self._validations = (*self._validations[:1], (step, metrics[_VALIDATION]))  # the first, the last
        if self._live is None:
            logger.info(self._line(step, metrics))
        else:
            self._live.refresh()

    def close(self) -> None:
        """Leave the last state of the table on the screen and give the terminal back."""
        if self._live is not None:
            self._live.stop()

    def _remaining(self) -> str:
        """Time to the end of the run as ``h:mm:ss``, from the mean of the last steps."""
        if not self._durations:
            return "-"
        per_step = sum(self._durations) / len(self._durations)
        left = per_step * max(self._max_num_steps - self._done, 0)
        return format_duration(max(left - (self._clock() - self._last), 0.0))

    def _line(self, step: int, metrics: Mapping[str, float]) -> str:
        def item(row: _Row) -> str:
            return f"{row.short} {_cell(row, metrics)}"

        times = " ".join(item(row) for row in _TIMES[1:])
        parts = [f"step {step}/{self._max_num_steps}", *(item(row) for row in _METRICS)]
        parts += [f"{item(_TIMES[0])} ({times})".removeprefix("step "), f"eta {self._remaining()}"]
        if _VALIDATION in metrics:
            parts.append(f"validation {metrics[_VALIDATION]:.3f}")
        return " | ".join(parts)

    def _render(self) -> RenderableType:
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        elapsed = format_duration(self._clock() - self._start)
        bar.add_row(
            f"step {self._done}/{self._max_num_steps}",
            ProgressBar(total=max(self._max_num_steps, 1), completed=self._done),
            f"{elapsed} elapsed, {self._remaining()} left",
        )
        shown = self._steps[-max(1, (self._console.width - _LABEL_WIDTH) // _COLUMN_WIDTH) :]
        table = Table(box=None, padding=(0, 0), pad_edge=False)
        table.add_column("step", min_width=_LABEL_WIDTH, no_wrap=True)
        for step, _ in shown:
            table.add_column(str(step), justify="right", min_width=_COLUMN_WIDTH, no_wrap=True)
        for row in (*_METRICS, *_TIMES):
            cells = [Text(_cell(row, metrics), style=_style(row, metrics)) for _, metrics in shown]
            table.add_row(row.label, *cells)
        parts: list[RenderableType] = [bar, table]
        if self._validations:
            history = ", ".join(f"{value:.3f} at step {step}" for step, value in self._validations)
            parts.append(Text(f"validation accuracy  {history}"))
        return Group(*parts)


def _cell(row: _Row, metrics: Mapping[str, float]) -> str:
    return row.show(metrics[row.metric]) if row.metric in metrics else "-"


def _style(row: _Row, metrics: Mapping[str, float]) -> str:
    return "" if math.isfinite(metrics.get(row.metric, 0.0)) else "bold red"


def format_duration(seconds: float) -> str:
    """``3725.4`` as ``1:02:05``."""
    minutes, whole = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{whole:02d}"
