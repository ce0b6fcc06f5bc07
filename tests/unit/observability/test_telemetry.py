from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from megatron_grpo.observability import telemetry

UUID = "GPU-11111111-2222-3333-4444-555555555555"


@pytest.fixture(autouse=True)
def fresh_handles() -> Iterator[None]:
    telemetry._nvml_handle.cache_clear()
    yield
    telemetry._nvml_handle.cache_clear()


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An NVML with one H200-like device."""
    fake: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=3 * 2**30),
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=87),
        "nvmlDeviceGetPowerUsage": lambda handle: 612_500,
    }
    for name, function in fake.items():
        monkeypatch.setattr(pynvml, name, function)
    return monkeypatch


def refuse(*_: object) -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def test_host_metrics_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_current_device_uuid", lambda: None)
    metrics = telemetry.system_metrics()
    assert sorted(metrics) == ["system/host_cpu_percent", "system/host_rss_gib"]
    assert metrics["system/host_rss_gib"] == pytest.approx(
        psutil.Process().memory_info().rss / 2**30, rel=0.2
    )
    assert 0.0 <= metrics["system/host_cpu_percent"] <= 100.0


def test_gpu_metrics_have_their_units(nvml: pytest.MonkeyPatch) -> None:
    nvml.setattr(telemetry, "_current_device_uuid", lambda: UUID)
    metrics = telemetry.system_metrics()
    assert metrics["system/gpu_memory_used_gib"] == 3.0
    assert metrics["system/gpu_utilization_percent"] == 87.0
    assert metrics["system/gpu_power_w"] == 612.5
    assert "system/host_rss_gib" in metrics


def test_what_a_mig_slice_does_not_report_is_left_out(nvml: pytest.MonkeyPatch) -> None:
    nvml.setattr(pynvml, "nvmlDeviceGetUtilizationRates", refuse)
    nvml.setattr(pynvml, "nvmlDeviceGetPowerUsage", refuse)
    assert telemetry.gpu_metrics(UUID) == {"system/gpu_memory_used_gib": 3.0}


def test_absent_nvml_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", not_found)
    assert telemetry.gpu_metrics(UUID) == {}


def test_the_device_is_the_one_torch_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: 3,
        get_device_properties=lambda device: SimpleNamespace(uuid=f"uuid-of-{device}"),
    )
    monkeypatch.setitem(telemetry.sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert telemetry._current_device_uuid() == "GPU-uuid-of-3"
    cuda.is_initialized = lambda: False
    assert telemetry._current_device_uuid() is None
