"""A pool of environment worker processes with a deadline for each group.

Workers are programs of their own (see :mod:`megatron_grpo.environments.worker`) instead of
``multiprocessing.Process``, which would import the trainer's main module, and so Megatron, in every worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from typing import Any

import torch

from megatron_grpo.config import EnvConfig
from megatron_grpo.environments.base import EnvironmentReturn, RewardError
from megatron_grpo.types import RolloutGroup

# The worker sees the modules that the owner sees.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from megatron_grpo.environments.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
_EXIT_GRACE_S = 5.0


class EnvironmentPool:
    """Scores groups in ``config.num_workers`` processes, which start at once and in the background.

    Thread-safe. Every failure is a :class:`RewardError`; a worker that hangs or dies is replaced.
    """

    def __init__(self, config: EnvConfig) -> None:
        self._workers = [_Worker(config) for _ in range(config.num_workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        # One thread for each worker: a thread that runs always finds an idle worker.
        self._threads = ThreadPoolExecutor(config.num_workers, thread_name_prefix="environment")

    def wait_until_ready(self) -> None:
        """Wait until every worker has built the environment.

        Raises:
            RewardError: the environment could not be built, with the traceback, or not within
                ``env.startup_timeout_s``.
        """
        for worker in self._workers:
            worker.wait_until_ready()

    def submit(self, group: RolloutGroup) -> Future[EnvironmentReturn]:
        """Score one group; for asyncio use ``await asyncio.wrap_future(pool.submit(group))``."""
        return self._threads.submit(self._score, group)

    def score(self, groups: Sequence[RolloutGroup]) -> list[EnvironmentReturn]:
        """Score ``groups`` and return their rewards in the same order.

        Raises:
            RewardError: of the first group that failed, with the prompt's id: its reward raised (with the
                user's traceback), was not a finite ``[n]``, took longer than ``env.timeout_s``, or ended its
                process.
        """
        futures = [self.submit(group) for group in groups]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """End all workers; those that are scoring are killed."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        busy = set(self._workers)
        while not self._idle.empty():
            busy.remove(self._idle.get())
        for worker in busy:
            worker.abandon()
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.dismiss()
        for worker in self._workers:
            worker.wait_until_gone()

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _score(self, group: RolloutGroup) -> EnvironmentReturn:
        worker = self._idle.get()
        try:
            return worker.score(group)
        finally:
            self._idle.put(worker)


class _LostWorkerError(Exception):
    """The worker gave no answer: it hangs or it died."""


class _Worker:
    """One worker process at a time, and the owner's end of its connection."""

    def __init__(self, config: EnvConfig) -> None:
        self._config = config
        self._name = config.class_path or config.name
        self._starting = threading.Lock()
        self._abandoned = False
        self._start()

    def _start(self) -> None:
        self._ready = False
        self._failure: str | None = None
        self._conn, theirs = Pipe()
        with theirs:
            arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # so that what a reward started can be killed with it
            )
            self._conn.send(self._config)
        self._start_deadline = time.monotonic() + self._config.startup_timeout_s

    def wait_until_ready(self) -> None:
        with self._starting:
            if not self._ready and self._failure is None:
                limit = f"env.startup_timeout_s {self._config.startup_timeout_s:g} s"
                try:
                    self._ready, self._failure = self._receive(self._start_deadline - time.monotonic(), limit)
                except _LostWorkerError as error:
                    self._failure = str(error)
            if self._failure is not None:
                raise RewardError(f"environment {self._name} could not be built: {self._failure}")

    def score(self, group: RolloutGroup) -> EnvironmentReturn:
        self.wait_until_ready()
        prompt_id, timeout = group.prompt.prompt_id, self._config.timeout_s
        try:
            with contextlib.suppress(ConnectionError):  # it died while idle: _receive says how
                self._conn.send(group)
            ok, payload = self._receive(timeout, f"env.timeout_s {timeout:g} s")
        except _LostWorkerError as error:
            self._replace()
            raise RewardError(f"prompt {prompt_id}: environment {self._name}: {error}", prompt_id) from None
        if not ok:
            raise RewardError(f"prompt {prompt_id}: environment {self._name} failed: {payload}", prompt_id)
        rewards, metrics = payload
        if isinstance(rewards, dict):
            components = {name: torch.tensor(values) for name, values in rewards.items()}
            return EnvironmentReturn(components, metrics)
        return EnvironmentReturn(torch.tensor(rewards), metrics)

    def _receive(self, timeout: float, limit: str) -> tuple[bool, Any]:
        try:
            if not self._conn.poll(max(timeout, 0.0)):
                raise _LostWorkerError(
                    f"no answer within {limit}; its worker is killed. Find what hangs, or raise it"
                )
            ok, payload = self._conn.recv()
            return ok, payload
        except (EOFError, ConnectionError):
            status = self.wait_until_gone()
        how = f"by signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"with status {status}"
        raise _LostWorkerError(f"its worker process ended {how}; its last output is in the log")

    def _replace(self) -> None:
        self._kill()
        self._conn.close()
        if not self._abandoned:
            with self._starting:
                self._start()

    def abandon(self) -> None:
        """Kill it while another thread waits for its answer; it is not replaced."""
        self._abandoned = True
        self._kill()

    def dismiss(self) -> None:
        """Ask it to exit by closing the connection; one that is still starting would be slow to notice."""
        if not self._ready:
            self._kill()
        self._conn.close()

    def wait_until_gone(self) -> int:
        """The exit status; it is killed if it does not exit soon by itself."""
        try:
            return self._process.wait(_EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            return self._kill()

    def _kill(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()
