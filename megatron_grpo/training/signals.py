"""Stopping in order: a signal asks for a stop, the loop saves at the end of the step and leaves."""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import FrameType

log = logging.getLogger(__name__)


class StopRequest:
    """Installed once per rank, first thing.

    Before :meth:`defer` SIGINT (Ctrl-C), SIGTERM and SIGUSR1 (preemption) end the process at once. After it they
    request a stop, which the loop honours at the end of the step; a second SIGINT raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._deferred = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle)

    @property
    def requested(self) -> bool:
        return self.name is not None

    def defer(self) -> None:
        """From here on a signal waits for the end of the step."""
        self._deferred = True

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        again = self.requested
        self.name = signal.Signals(number).name
        if number == signal.SIGINT and (again or not self._deferred):
            raise KeyboardInterrupt
        if not self._deferred:
            sys.exit(128 + number)
        if not again and os.environ.get("RANK", "0") == "0":
            log.warning("%s: stopping after this step (Ctrl-C again: at once, without saving)", self.name)
