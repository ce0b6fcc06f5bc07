"""What the machine is doing: host memory and CPU, and the local GPU where NVML finds one."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any

import psutil  # type: ignore[import-untyped]
import pynvml

GIB = 2.0**30


def system_metrics() -> dict[str, float]:
    """A snapshot for one line of metrics; takes well under a millisecond without a GPU.

    Always: ``system/host_rss_gib`` (resident memory of this process) and ``system/host_cpu_percent`` (all
    cores of the machine, since the last call). With an NVIDIA GPU in use by this process also
    ``system/gpu_memory_used_gib`` (all processes on the device), ``system/gpu_utilization_percent`` and
    ``system/gpu_power_w``, each only where the driver reports it (MIG slices report neither of the last two).
    """
    metrics = {
        "system/host_rss_gib": psutil.Process().memory_info().rss / GIB,
        "system/host_cpu_percent": psutil.cpu_percent(),
    }
    if uuid := _current_device_uuid():
        metrics |= gpu_metrics(uuid)
    return metrics


def gpu_metrics(uuid: str) -> dict[str, float]:
    """The ``system/gpu_*`` metrics of one GPU (``"GPU-..."``); those that NVML can't give are left out."""
    metrics: dict[str, float] = {}
    if (handle := _nvml_handle(uuid)) is None:
        return metrics
    with contextlib.suppress(pynvml.NVMLError):
        metrics["system/gpu_memory_used_gib"] = pynvml.nvmlDeviceGetMemoryInfo(handle).used / GIB
    with contextlib.suppress(pynvml.NVMLError):
        metrics["system/gpu_utilization_percent"] = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    with contextlib.suppress(pynvml.NVMLError):
        metrics["system/gpu_power_w"] = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
    return metrics


def _current_device_uuid() -> str | None:
    """Asks torch, because NVML numbers devices without regard to ``CUDA_VISIBLE_DEVICES``."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


@functools.cache
def _nvml_handle(uuid: str) -> Any | None:
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return None
