"""Find the devices that this process can use, and what the host tells of its GPUs without CUDA."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

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


# ---- GPUs of this host, by the environment and by NVML -----------------------------------------------


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """Return the GPUs that an environment names, by index or id; None if it leaves all of them visible."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    names = () if named is None else map(str.strip, named.split(","))
    return None if named is None else [name for name in names if name not in ("", "-1")]


def gpu_count() -> int:
    """Return the number of GPUs that processes with this environment may use."""
    from distributed.diagnostics import nvml

    there: int = nvml.device_get_count()
    # Count names, not GPUs: the MIG instances of one GPU may be named separately.
    return there and len(named) if (named := visible_gpus()) is not None else there


def gpu_library() -> Any | None:
    """Return ``pynvml``, initialised; None if it or the driver is missing, or if Dask must not use it."""
    from distributed.diagnostics import nvml

    nvml.init_once()
    return import_module("pynvml") if nvml.is_initialized() else None


def memory_of_host(library: Any | None, sys: Path = Path("/sys")) -> int:
    """Return the bytes of this host's memory, without that of GPUs.

    On coherent hosts such as GH200 the memory of a GPU is a NUMA node, and is included in the system's total.
    NVML tells which nodes these are, unless the driver is too old for that: other nodes without processors,
    such as memory behind CXL, belong to the host.

    ``library``: the result of :func:`gpu_library`.
    """
    nodes = [] if library is None else [_node_of(library, n) for n in range(library.nvmlDeviceGetCount())]
    folders = {sys / f"devices/system/node/node{node}" for node in nodes if node is not None}
    # NVML may name the node that the GPU is attached to, which has processors.
    return psutil.virtual_memory().total - sum(map(_memory_of, folders))


def _node_of(library: Any, number: int) -> int | None:
    """Return the NUMA node that is the memory of a GPU; None if the driver is too old to tell."""
    handle = library.nvmlDeviceGetHandleByIndex(number)
    try:
        return int(library.nvmlDeviceGetNumaNodeId(handle))
    except (library.NVMLError, AttributeError):
        return None


def _memory_of(node: Path) -> int:
    """Return the bytes of a NUMA node without processors; 0 of any other."""
    if _read(node / "cpulist"):
        return 0
    found = re.search(r"MemTotal:\s*(\d+) kB", _read(node / "meminfo"))
    return int(found[1]) * 1024 if found else 0


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
