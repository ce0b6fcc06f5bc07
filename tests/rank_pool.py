"""Gloo ranks for distributed tests: processes that are started once and reused for many jobs.

A job is a module-level function ``fn(rank, world_size, *args)``. Each job gets a fresh default process
group of the size it asks for; a job that hangs or raises fails its test with the ranks' tracebacks.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

# Autograd's hooks keep a Megatron model alive, it keeps its gloo groups, and their threads keep polling: after a
# few jobs with models it costs less to start afresh.
MAX_THREADS = 300


def _serve(conn: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    from megatron_grpo.parallel import platform

    platform.install()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            job = conn.recv()
        except EOFError:
            return
        fn, rank, world_size, store, timeout, args = job
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
            result = (True, fn(rank, world_size, *args))
        except BaseException:  # noqa: BLE001 - reported to the test, which fails with it
            result = (False, traceback.format_exc())
        finally:
            with contextlib.suppress(Exception):
                from megatron.core import parallel_state

                parallel_state.destroy_model_parallel()
            if dist.is_initialized():
                dist.destroy_process_group()
        conn.send(result)


class RankPool:
    """Up to ``size`` worker processes; ``run`` uses the first ``world_size`` of them."""

    def __init__(self, size: int = 8) -> None:
        self.size = size
        self._ctx = mp.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []

    def _ensure(self, n: int) -> None:
        while len(self._workers) < n:
            here, there = self._ctx.Pipe()
            process = self._ctx.Process(target=_serve, args=(there,), daemon=False)
            process.start()
            there.close()
            self._workers.append((process, here))

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 240) -> list[Any]:
        """Run ``fn(rank, world_size, *args)`` on every rank; the results in rank order."""
        if world_size > self.size:
            raise ValueError(f"world size {world_size} exceeds the pool of {self.size}")
        self._ensure(world_size)
        with tempfile.TemporaryDirectory() as folder:
            store = os.path.join(folder, "store")
            conns = [conn for _, conn in self._workers[:world_size]]
            for rank, conn in enumerate(conns):
                conn.send((fn, rank, world_size, store, timeout, args))
            results: dict[int, Any] = {}
            while len(results) < world_size:
                ready = wait([c for i, c in enumerate(conns) if i not in results], timeout=timeout)
                if not ready:
                    self.close()
                    missing = sorted(set(range(world_size)) - set(results))
                    raise TimeoutError(f"ranks {missing} gave no answer within {timeout} s")
                for conn in ready:
                    rank = conns.index(conn)  # type: ignore[arg-type]
                    try:
                        results[rank] = conn.recv()  # type: ignore[union-attr]
                    except EOFError:
                        self.close()
                        raise RuntimeError(f"rank {rank} died") from None
                    if not results[rank][0]:
                        # the other ranks may wait for this one in a collective: start afresh
                        self.close()
                        raise RuntimeError(f"rank {rank} of {world_size} failed:\n{results[rank][1]}")
        if any(len(os.listdir(f"/proc/{p.pid}/task")) > MAX_THREADS for p, _ in self._workers):
            self.close()
        return [results[rank][1] for rank in range(world_size)]

    def close(self) -> None:
        for process, conn in self._workers:
            conn.close()
            process.terminate()
        for process, _ in self._workers:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._workers.clear()
