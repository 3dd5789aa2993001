"""Describe the environment of a timing: packages and machine."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil
from distributed.diagnostics import nvml

import dask_gpurt
from dask_gpurt.cli.doctor import installed_versions

PACKAGES = ("dask", "distributed", "pandas", "numpy", "pyarrow", "dask-cudf", "cudf", "rmm", "ucxx")


def environment() -> dict[str, Any]:
    """Return the environment of a timing.

    Returns ``versions`` by package name and ``hardware`` (CPU, cores, memory, GPUs).
    """
    return {
        "versions": {
            "python": platform.python_version(),
            "dask-gpurt": dask_gpurt.__version__,
            **installed_versions(PACKAGES),
        },
        "hardware": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory": psutil.virtual_memory().total,
            "gpus": _gpu_names(),
        },
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _gpu_names() -> list[str]:
    count = nvml.device_get_count()
    if not count:
        return []
    import pynvml  # Dask has counted devices, so it is installed

    names = (pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(count))
    return [name.decode() if isinstance(name, bytes) else name for name in names]
