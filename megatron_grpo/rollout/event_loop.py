"""An asyncio loop in its own thread: synchronous trainer code calls the coroutines of this package through it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from megatron_grpo.rollout.errors import EngineError

T = TypeVar("T")


class EventLoopThread:
    """Runs coroutines for one process. Engine clients belong to the loop that they are first used on."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-requests", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts ``coroutine`` and returns at once."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float, what: str) -> T:
        """Waits for ``coroutine``; after ``timeout_s`` cancels it and raises EngineError, which says ``what``."""
        future = self.submit(coroutine)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            if future.done():  # the coroutine's own error, not our deadline
                raise
            raise EngineError(f"{what} did not finish within its deadline of {timeout_s:g} s") from error
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancels what still runs and ends the thread."""

        async def cancel_all() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        if not self._loop.is_closed():
            self.submit(cancel_all()).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    def __enter__(self) -> EventLoopThread:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
