"""Stopping in order: a signal asks for a stop, the loop saves at the end of the step and leaves."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_POLL_S = 1.0


class StopRequest:
    """Installed once per rank, first thing.

    Before :meth:`defer` SIGINT (Ctrl-C), SIGTERM and SIGUSR1 (preemption) raise KeyboardInterrupt. After it they
    request a stop, which the loop honours at the end of the step; a second SIGINT raises KeyboardInterrupt.

    Under torchrun SIGTERM always raises it: torchrun sends SIGTERM when another rank has failed, after which no step
    can complete (launch/elastic.py passes a user's SIGTERM on as SIGUSR1).
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._deferred = False
        self._by_torchrun = _by_torchrun()
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    @property
    def requested(self) -> bool:
        return self.name is not None

    @property
    def exit_status(self) -> int:
        """Of a process that a signal ended."""
        return 128 + signal.Signals[self.name or "SIGINT"]

    @property
    def rank_failed(self) -> bool:
        """The signal came from torchrun, because another rank failed."""
        return self.name == "SIGTERM" and self._by_torchrun

    def defer(self) -> None:
        """From here on a signal waits for the end of the step."""
        self._deferred = True

    def ignore(self) -> None:
        """From here on nothing cuts the taking down short; it has deadlines of its own."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        again = self.requested
        self.name = signal.Signals(number).name
        if not self._deferred or self.rank_failed or (again and number == signal.SIGINT):
            raise KeyboardInterrupt
        if not again and os.environ.get("RANK", "0") == "0":
            log.warning("%s: stopping after this step (Ctrl-C again: at once, without saving)", self.name)


def leave_with_launcher() -> None:
    """End this rank when torchrun is gone: it starts ranks in sessions of their own, which outlive it.

    From a thread, because the main one may be inside a collective. The engine's guard and the environment's
    workers see this process go and follow.
    """
    if _by_torchrun():
        threading.Thread(target=_watch, args=(os.getppid(),), name="launcher-watch", daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_POLL_S)
    log.error(
        "the launcher, process %d, is gone: leaving at once; the same command continues from the last checkpoint",
        launcher,
    )
    os._exit(1)


def _by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ
