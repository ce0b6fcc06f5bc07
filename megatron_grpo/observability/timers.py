"""Where the wall time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES = ("rollout", "logprob", "train", "refit", "other")


class StepTimer:
    """Divides the wall time of each step among :data:`PHASES`; every second is counted exactly once.

    Worked example::

        timer = StepTimer()
        with timer("rollout"):
            ...                      # 3 s
            with timer("refit"):     # 1 s, charged to refit and not to rollout
                ...
        metrics |= timer.finish_step()
        # {"time/rollout_s": 3.0, "time/refit_s": 1.0, ..., "time/other_s": 0.0, "time/step_s": 4.0}

    Time outside every phase is ``other``. Device work is asynchronous: a phase shows the time until the host
    waited for the device, so end it with something that waits (a metric read, an all-reduce on the host).
    One timer belongs to one thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phase = "other"
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._mark = clock()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Charge the block's seconds to ``phase``, less those of phases nested inside it.

        Raises:
            ValueError: ``phase`` is not one of :data:`PHASES`.
        """
        if phase not in self._seconds:
            raise ValueError(f"no phase '{phase}' in StepTimer; use one of {', '.join(PHASES)}")
        outer = self._phase
        self._charge()
        self._phase = phase
        try:
            yield
        finally:
            self._charge()
            self._phase = outer

    def finish_step(self) -> dict[str, float]:
        """Seconds since the last call: ``time/<phase>_s`` for each phase and their sum ``time/step_s``."""
        self._charge()
        metrics = {f"time/{phase}_s": seconds for phase, seconds in self._seconds.items()}
        metrics["time/step_s"] = sum(self._seconds.values())
        self._seconds = dict.fromkeys(PHASES, 0.0)
        return metrics

    def _charge(self) -> None:
        now = self._clock()
        self._seconds[self._phase] += now - self._mark
        self._mark = now
