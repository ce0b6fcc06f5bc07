"""One refit as a transaction: pause, start, send in buckets, finish, reset the prefix cache, attest, resume."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file

from megatron_grpo.refit.attestation import RefitError, attest, shorten
from megatron_grpo.refit.fingerprint import fingerprint
from megatron_grpo.rollout.client import EngineClient
from megatron_grpo.rollout.event_loop import EventLoopThread

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RefitReport:
    """What one refit moved: tensors, bytes, buckets, tensors unchanged since the refit before, and seconds."""

    version: int
    tensors: int
    bytes: int
    buckets: int
    unchanged: int
    seconds: float


class Refit:
    """Moves weights into engines on this host and proves that they arrived.

    Args:
        clients: the engines; each gets every push.
        loop: the thread that the clients live on.
        directory: in shared memory, for the buckets (``EngineProcess.private_dir``, which goes with the engine).
        bucket_bytes: bound on a bucket, held once in the trainer's memory and once in shared memory; a larger
            tensor is a bucket of its own.
    """

    def __init__(
        self,
        clients: Sequence[EngineClient],
        loop: EventLoopThread,
        directory: Path,
        *,
        bucket_bytes: int = 512 * 2**20,
    ) -> None:
        self._clients = tuple(clients)
        self._loop = loop
        self._directory = directory
        self._bucket_bytes = bucket_bytes
        self._previous: dict[str, str] = {}

    def push(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, *, must_change: Collection[str] = ()
    ) -> RefitReport:
        """Sends the whole model in Hugging Face names; blocks until the engines serve ``version``.

        ``tensors`` is iterated on the calling thread (it may run collectives); each tensor is copied at once.
        ``must_change`` names tensors that must differ from the push before.

        Raises:
            RefitError: a tensor is missing, extra, repeated, different or unexpectedly unchanged.
            EngineError: an engine is dead, late or refused the weights; the message says which and why.
            After any exception all engines of this push are paused and stale: they serve nothing until a
            later push succeeds.
        """
        started = time.monotonic()
        self._mark_stale(f"the refit to version {version} has not finished")
        try:
            sent = self._transfer(tensors)
            self._on_all("finish_weight_update", lambda client: client.finish_weight_update(version))
            self._on_all("reset_prefix_cache", lambda client: client.reset_prefix_cache())
            self._attest(sent.fingerprints, version, must_change)
            self._on_all("resume", lambda client: client.resume())
        except BaseException as error:
            self._mark_stale(f"the refit to version {version} failed: {error}")
            raise
        self._mark_stale(None)
        unchanged = len(sent.fingerprints.items() & self._previous.items())
        self._previous = sent.fingerprints
        seconds = time.monotonic() - started
        report = RefitReport(version, len(sent.fingerprints), sent.bytes, sent.buckets, unchanged, seconds)
        logger.debug("%s", report)
        return report

    def _mark_stale(self, reason: str | None) -> None:
        for client in self._clients:
            client.stale = reason

    def _on_all(self, what: str, call: Callable[[EngineClient], Coroutine[Any, Any, T]]) -> list[T]:
        """``call`` on every engine at once; the first failure, in the order of the engines, is raised."""

        async def gather() -> list[T | BaseException]:
            return await asyncio.gather(*(call(client) for client in self._clients), return_exceptions=True)

        # The clients have the real deadline; this one only catches a loop that is itself stuck.
        timeout_s = 10 + max(client.request_timeout_s for client in self._clients)
        results = self._loop.run(gather(), timeout_s=timeout_s, what=f"{what} of a refit")
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    def _transfer(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> _Sent:
        self._on_all("pause", lambda client: client.pause())
        self._on_all("abandon_weight_update", lambda client: client.abandon_weight_update())
        self._on_all("start_weight_update", lambda client: client.start_weight_update())
        sent = _Sent()
        for bucket in _buckets(tensors, self._bucket_bytes):
            sent.add(bucket)
            with _bucket_file(bucket, self._directory) as path:
                self._send(path)
        return sent

    def _send(self, path: Path) -> None:
        self._on_all("update_weights", lambda client: client.update_weights(path))

    def _attest(self, sent: dict[str, str], version: int, must_change: Collection[str]) -> None:
        served = self._on_all("weight_info", lambda client: client.weight_version())
        received = self._on_all("received_fingerprints", lambda client: client.received_fingerprints())
        for client, client_version, workers in zip(self._clients, served, received, strict=True):
            faults = [] if client_version == version else [f"it reports weight version {client_version}"]
            for rank, fingerprints in enumerate(workers):
                found = attest(sent, fingerprints, previous=self._previous, must_change=must_change)
                faults += [f"worker {rank}: {fault}" for fault in found]
            if faults:
                raise RefitError(f"{client.name} does not hold version {version}: {'; '.join(faults)}")


@dataclass
class _Sent:
    fingerprints: dict[str, str] = field(default_factory=dict)
    bytes: int = 0
    buckets: int = 0

    def add(self, bucket: dict[str, torch.Tensor]) -> None:
        if repeated := self.fingerprints.keys() & bucket.keys():
            raise RefitError(
                f"the source of the weights yields {shorten(repeated)} twice; each name once, please"
            )
        self.fingerprints |= {name: fingerprint(tensor) for name, tensor in bucket.items()}
        self.bytes += sum(tensor.nbytes for tensor in bucket.values())
        self.buckets += 1


def _buckets(tensors: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[dict[str, torch.Tensor]]:
    """Copies on the CPU, in dictionaries of at most ``limit`` bytes or one tensor."""
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if bucket and (size + tensor.nbytes > limit or name in bucket):
            yield bucket
            bucket, size = {}, 0
        # A copy, also on the CPU: views of one fused weight share storage, which safetensors refuses.
        bucket[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        size += tensor.nbytes
    if bucket:
        yield bucket


@contextmanager
def _bucket_file(bucket: dict[str, torch.Tensor], directory: Path) -> Iterator[Path]:
    """A safetensors file of mode 0600, removed at the end whatever happens."""
    handle, name = tempfile.mkstemp(prefix="bucket-", suffix=".safetensors", dir=directory)
    os.close(handle)
    path = Path(name)
    try:
        save_file(bucket, path)
        path.chmod(0o600)
        yield path
    finally:
        path.unlink(missing_ok=True)
