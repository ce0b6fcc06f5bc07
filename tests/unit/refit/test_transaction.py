"""The transaction against an engine that keeps in a dictionary what it is sent."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_grpo.refit.attestation import RefitError
from megatron_grpo.refit.fingerprint import fingerprint
from megatron_grpo.refit.transaction import Refit
from megatron_grpo.rollout.client import EngineClient
from megatron_grpo.rollout.errors import EngineError
from megatron_grpo.rollout.event_loop import EventLoopThread


class FakeEngine(EngineClient):
    def __init__(self, name: str = "engine0") -> None:
        super().__init__(name, key="k" * 32)
        self.calls: list[str] = []
        self.fails_at = ""
        self.version = 0
        self.received: dict[str, str] = {}
        self.loses = self.corrupts = ""
        self.files: list[Path] = []

    async def _record(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fails_at:
            raise EngineError(f"{self.name}: /{call} answered 500: out of memory")

    async def pause(self) -> None:
        await self._record("pause")

    async def resume(self) -> None:
        await self._record("resume")

    async def abandon_weight_update(self) -> None:
        await self._record("abandon")

    async def start_weight_update(self) -> None:
        self.received = {}
        await self._record("start")

    async def update_weights(self, bucket: Path) -> None:
        assert stat.S_IMODE(bucket.stat().st_mode) == 0o600
        self.files.append(bucket)
        for name, tensor in load_file(bucket).items():
            if name != self.loses:
                self.received[name] = fingerprint(tensor + 1 if name == self.corrupts else tensor)
        await self._record("update")

    async def finish_weight_update(self, version: int) -> None:
        self.version = version
        await self._record("finish")

    async def reset_prefix_cache(self) -> None:
        await self._record("reset")

    async def weight_version(self) -> int:
        return self.version

    async def received_fingerprints(self) -> list[dict[str, str]]:
        await self._record("attest")
        return [dict(self.received)]


WEIGHTS = {f"w{i}": torch.full((8, 4), float(i)) for i in range(5)}  # 128 bytes each


@pytest.fixture(scope="module")
def loop() -> Iterator[EventLoopThread]:
    with EventLoopThread() as thread:
        yield thread


def test_order_of_a_transaction_and_its_report(loop: EventLoopThread, tmp_path: Path) -> None:
    engine = FakeEngine()
    refit = Refit([engine], loop, tmp_path, bucket_bytes=256)
    report = refit.push(WEIGHTS.items(), 7)
    steps = ["pause", "abandon", "start", "update", "update", "update", "finish", "reset", "attest", "resume"]
    assert engine.calls == steps
    assert (report.version, report.tensors, report.bytes, report.buckets, report.unchanged) == (
        7,
        5,
        640,
        3,
        0,
    )
    assert engine.received == {name: fingerprint(tensor) for name, tensor in WEIGHTS.items()}
    assert engine.stale is None
    assert list(tmp_path.iterdir()) == []
    assert refit.push((WEIGHTS | {"w0": torch.ones(8, 4)}).items(), 8).unchanged == 4


@pytest.mark.parametrize(
    "call", ["pause", "abandon", "start", "update", "finish", "reset", "attest", "resume"]
)
def test_any_failure_leaves_all_engines_stale_until_a_push_succeeds(
    loop: EventLoopThread, tmp_path: Path, call: str
) -> None:
    good, bad = FakeEngine("engine0"), FakeEngine("engine1")
    refit = Refit([good, bad], loop, tmp_path)
    bad.fails_at = call
    with pytest.raises(EngineError, match=f"engine1: /{call} answered 500: out of memory"):
        refit.push(WEIGHTS.items(), 1)
    for engine in (good, bad):
        assert engine.stale is not None
        assert "refit to version 1 failed: engine1" in engine.stale
    assert list(tmp_path.iterdir()) == []

    bad.fails_at = ""
    refit.push(WEIGHTS.items(), 2)
    assert good.stale is None
    assert bad.stale is None


def test_failing_source_leaves_the_engine_stale_and_no_file(loop: EventLoopThread, tmp_path: Path) -> None:
    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(WEIGHTS.items())[:3]
        raise RuntimeError("another rank failed")

    engine = FakeEngine()
    with pytest.raises(RuntimeError, match="another rank failed"):
        Refit([engine], loop, tmp_path, bucket_bytes=128).push(source(), 1)
    assert engine.stale == "the refit to version 1 failed: another rank failed"
    assert "resume" not in engine.calls
    assert list(tmp_path.iterdir()) == []


def test_lost_and_corrupted_tensors_are_named(loop: EventLoopThread, tmp_path: Path) -> None:
    engine = FakeEngine("engine4")
    engine.loses, engine.corrupts = "w1", "w3"
    with pytest.raises(RefitError, match=r"engine4 .*did not arrive: w1; .*arrived with other bytes: w3"):
        Refit([engine], loop, tmp_path).push(WEIGHTS.items(), 1)
    assert "resume" not in engine.calls


def test_wrong_version_is_named(loop: EventLoopThread, tmp_path: Path) -> None:
    class Behind(FakeEngine):
        async def weight_version(self) -> int:
            return 4

    with pytest.raises(RefitError, match="engine0 does not hold version 5: it reports weight version 4"):
        Refit([Behind()], loop, tmp_path).push(WEIGHTS.items(), 5)


def test_must_change(loop: EventLoopThread, tmp_path: Path) -> None:
    refit = Refit([FakeEngine()], loop, tmp_path)
    refit.push(WEIGHTS.items(), 1, must_change=WEIGHTS)
    refit.push(WEIGHTS.items(), 2)
    with pytest.raises(RefitError, match="did not change, as they should have: w2"):
        refit.push((WEIGHTS | {"w1": torch.ones(8, 4) * 9}).items(), 3, must_change=("w1", "w2"))


def test_a_name_twice_is_refused(loop: EventLoopThread, tmp_path: Path) -> None:
    with pytest.raises(RefitError, match="yields w0 twice"):
        Refit([FakeEngine()], loop, tmp_path).push([*WEIGHTS.items(), ("w0", torch.zeros(2))], 1)


def test_views_of_a_fused_weight_and_reused_buffers_arrive_as_they_were(
    loop: EventLoopThread, tmp_path: Path
) -> None:
    fused = torch.arange(12.0).reshape(6, 2)
    buffer = torch.empty(2)

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield "q", fused[:2]
        yield "k", fused[2:4]
        yield "v", fused[4:].t()
        for i in range(3):
            yield f"b{i}", buffer.fill_(i)

    engine = FakeEngine()
    Refit([engine], loop, tmp_path).push(source(), 1)
    expected = {"q": fused[:2], "k": fused[2:4], "v": fused[4:].t()}
    expected |= {f"b{i}": torch.full((2,), float(i)) for i in range(3)}
    assert engine.received == {name: fingerprint(tensor) for name, tensor in expected.items()}
