"""Describe the environment of a timing: packages and machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from distributed.diagnostics import nvml

import dask_gpurt

PACKAGES = ("dask", "distributed", "pandas", "numpy", "pyarrow", "dask-cudf", "cudf", "rmm", "ucxx")


def environment() -> dict[str, Any]:
    """Return the environment of a timing.

    Returns ``versions`` by package name and ``hardware`` (CPU, cores, memory, GPUs).
    """
    return {
        "versions": versions(PACKAGES, own="dask-gpurt"),
        "hardware": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory": psutil.virtual_memory().total,
            "gpus": _gpu_names(),
        },
    }


def versions(packages: Iterable[str], own: str) -> dict[str, str]:
    """Return the versions of Python, of this package, and of the installed ones of the given packages.

    ``packages``: names of packages, without the CUDA suffix of RAPIDS wheels.
    ``own``: the key for this package.
    """
    return {
        "python": platform.python_version(),
        own: dask_gpurt.__version__,
        **installed_versions(packages),
    }


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed ones of the given packages.

    ``packages``: names of packages, without the CUDA suffix of RAPIDS wheels.
    """
    found = {}
    for package in packages:
        # RAPIDS wheels have the CUDA version in their name.
        for name in (package, f"{package}-cu13", f"{package}-cu12"):
            try:
                found[package] = version(name)
                break
            except PackageNotFoundError:
                continue
    return found


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
