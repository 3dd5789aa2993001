"""Find the devices that this process can use."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

from dask_gpurt.device.base import Device
from dask_gpurt.device.host import HostDevice


def discover(memory_limit: int) -> dict[str, Device]:
    """Return the devices by kind: the host, and the GPU of this process if there is one.

    ``memory_limit``: the worker's limit of host memory in bytes.
    """
    devices: dict[str, Device] = {"host": HostDevice(memory_limit)}
    if "cuda" in kinds():
        from dask_gpurt.device.cuda import CudaDevice

        devices["cuda"] = CudaDevice()
    return devices


def kinds() -> list[str]:
    """Return the kinds of device that this process has. May take a second."""
    return ["host"] if cuda_missing() is not None else ["host", "cuda"]


def main_kind(devices: Mapping[str, Device]) -> str:
    """Return the kind of device on which a worker computes: its GPU if it has one."""
    return next((kind for kind, device in devices.items() if not device.on_host), "host")


def cuda_missing() -> str | None:
    """Return the reason why this process cannot use a GPU; None if it can."""
    for package in ("cudf", "pylibcudf", "rmm", "cuda.bindings"):
        try:
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed"
        except ModuleNotFoundError:
            return f"{package} is not installed"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "CUDA_VISIBLE_DEVICES is empty"
    try:
        from cuda.bindings import runtime

        error, count = runtime.cudaGetDeviceCount()
    except (ImportError, RuntimeError, OSError) as problem:
        return f"no CUDA driver: {problem}"
    if int(error) != 0:
        return f"CUDA reports {error.name}"
    return None if count else "no CUDA device is visible"
