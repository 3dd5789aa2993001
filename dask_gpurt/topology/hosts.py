"""Describe a host: its GPUs, the links between them, whether it has RDMA, and the places of processes on it.

Decisions and their figures: ``docs/decisions/placement.md``.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil

from dask_gpurt.topology.model import Link, Place

#: A pair of devices, by their ids.
Devices = frozenset[str]


@dataclass(frozen=True)
class Gpu:
    """Describe a GPU or a MIG instance.

    ``id``: its UUID, "GPU-…" or "MIG-…".
    ``index``: the index of the GPU in PCI bus order; a MIG instance has the index of its GPU.
    ``parent``: for a MIG instance, the UUID of its GPU.
    """

    id: str
    index: int
    parent: str | None = None


@dataclass(frozen=True)
class Host:
    """Describe one host.

    ``joins``: the link between each pair of GPUs, by their ids.
    ``rdma``: whether an RDMA device is up.
    """

    gpus: tuple[Gpu, ...] = ()
    joins: Mapping[Devices, Link] = field(default_factory=dict)
    rdma: bool = False

    def find(self, visible: str | None) -> Gpu | None:
        """Return the GPU that a process computes on; None if it is unknown.

        ``visible``: the process's ``CUDA_VISIBLE_DEVICES``, of which the first counts; None if all are
        visible.
        """
        first = "0" if visible is None else visible.split(",")[0].strip()
        if first.isdecimal():
            found = (gpu for gpu in self.gpus if gpu.index == int(first))
        else:  # CUDA accepts a prefix of an id too
            found = (gpu for gpu in self.gpus if first and _is_named(gpu, first))
        return next(found, None)


def _is_named(gpu: Gpu, beginning: str) -> bool:
    return any(name.lower().startswith(beginning.lower()) for name in (gpu.id, gpu.parent or ""))


# ---- detection, by NVML and the operating system -----------------------------------------------------


SYS = Path("/sys")
#: The value of ``NVML_P2P_CAPS_INDEX_READ``, which is a tuple in nvidia-ml-py.
READ_CAPABILITY = 0


def discover(library: Any | None = None) -> Host:
    """Detect the devices of this host. This may take a second.

    ``library``: ``pynvml`` or a module with the same functions; imported by default. Without it no GPU is
    found.
    """
    library = library or nvml_library()
    if library is None:
        return Host(rdma=has_rdma())
    known = Nvml(library)
    gpus = known.gpus()
    return Host(gpus, known.joins(gpus), has_rdma())


def visible_devices() -> str | None:
    """Return ``CUDA_VISIBLE_DEVICES`` of this process; None if all devices are visible."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def own_place(host: Host, visible: str | None, *, on_gpu: bool, rdma: bool, by_tcp: bool = False) -> Place:
    """Return the place of this process.

    ``on_gpu``: whether it keeps its data on the first of these devices.
    ``rdma``: whether it sends over RDMA if the host has an RDMA NIC.
    """
    gpu = host.find(visible) if on_gpu else None
    return Place(here(), None if gpu is None else gpu.id, rdma and host.rdma, by_tcp)


# ---- GPUs, by NVML -----------------------------------------------------------------------


def nvml_library() -> Any | None:
    """Return ``pynvml``, initialised; None if it or the driver is missing, or if Dask must not use it."""
    from distributed.diagnostics import nvml

    nvml.init_once()
    return import_module("pynvml") if nvml.is_initialized() else None


def nvml_missing() -> str | None:
    """Return why :func:`nvml_library` returns None; None if it does not."""
    from distributed.diagnostics import nvml

    if nvml_library() is not None:
        return None
    reasons = {
        nvml.NVMLState.DISABLED_PYNVML_NOT_AVAILABLE: "nvidia-ml-py is not installed",
        nvml.NVMLState.DISABLED_CONFIG: "'distributed.diagnostics.nvml' is false",
    }
    return reasons.get(nvml.NVML_STATE, "there is no NVIDIA driver that NVML can use")


def memory_of(device: str, library: Any | None) -> int | None:
    """Return the size of a GPU's memory in bytes.

    ``device``: as in ``CUDA_VISIBLE_DEVICES``: the index of a GPU, or the id of a GPU or a MIG instance.
    ``library``: the result of :func:`nvml_library`.
    Returns None if NVML is missing, has no such device, or reports that the device has no memory of its own.
    """
    if library is None:
        return None
    by_index, by_id = library.nvmlDeviceGetHandleByIndex, library.nvmlDeviceGetHandleByUUID
    try:
        handle = by_index(int(device)) if device.isdecimal() else by_id(device)
        return int(library.nvmlDeviceGetMemoryInfo(handle).total)
    except library.NVMLError:
        return None


class Nvml:
    """Query NVML for GPUs and their links. Unsupported features count as absent.

    ``library``: ``pynvml``, or a module with the same functions.
    """

    def __init__(self, library: Any):
        self._library = library
        self._handles = {
            index: library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())
        }

    def _ask(self, question: str, *about: Any, default: Any = None) -> Any:
        try:
            return getattr(self._library, question)(*about)
        except (self._library.NVMLError, AttributeError):  # the driver, or nvidia-ml-py, is too old for it
            return default

    # ---- devices ---------------------------------------------------------------------

    def gpus(self) -> tuple[Gpu, ...]:
        """Return all GPUs in bus order; a GPU partitioned by MIG is represented by its instances."""
        return tuple(gpu for index, handle in self._handles.items() for gpu in self._parts(index, handle))

    def memory_nodes(self) -> set[int]:
        """Return the NUMA nodes that are the memory of GPUs."""
        found = (self._ask("nvmlDeviceGetNumaNodeId", handle) for handle in self._handles.values())
        return {node for node in found if node is not None}

    def _parts(self, index: int, handle: Any) -> Iterator[Gpu]:
        whole = Gpu(_text(self._library.nvmlDeviceGetUUID(handle)), index)
        if not self._ask("nvmlDeviceGetMigMode", handle, default=(0, 0))[0]:
            yield whole
            return
        for number in range(self._ask("nvmlDeviceGetMaxMigDeviceCount", handle, default=0)):
            part = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
            if part is not None:
                yield replace(whole, id=_text(self._library.nvmlDeviceGetUUID(part)), parent=whole.id)

    # ---- pairs -----------------------------------------------------------------------

    def joins(self, gpus: tuple[Gpu, ...]) -> dict[Devices, Link]:
        """Return the link between each pair of :meth:`gpus`."""
        return {frozenset((one.id, other.id)): self._join(one, other) for one, other in combinations(gpus, 2)}

    def _join(self, one: Gpu, other: Gpu) -> Link:
        if one.parent or other.parent:  # MIG instances have no peer access, not even within a GPU
            return Link.SHARED_MEMORY
        pair = self._handles[one.index], self._handles[other.index]
        if self._can(pair, self._library.NVML_P2P_CAPS_INDEX_NVLINK):
            return Link.NVLINK
        return Link.PCIE if self._can(pair, READ_CAPABILITY) else Link.SHARED_MEMORY

    def _can(self, pair: tuple[Any, Any], capability: int) -> bool:
        answer = self._ask("nvmlDeviceGetP2PStatus", *pair, capability)
        return bool(answer == self._library.NVML_P2P_STATUS_OK)


def _text(value: Any) -> str:
    """Convert to text; older versions of nvidia-ml-py return bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


# ---- the host, by the operating system ---------------------------------------------------


def host_id() -> str:
    """Return an id shared by all processes of one running kernel."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


def here() -> str:
    """Return the id of this host for a :class:`~dask_gpurt.topology.Place`.

    Containers on one machine have different names, and usually cannot map each other's memory.
    """
    return f"{socket.gethostname()}/{host_id()[:8]}"


# ---- NUMA ----------------------------------------------------------------------------


def memory_of_host(library: Any | None, sys: Path = SYS) -> int:
    """Return the bytes of this host's memory, without that of GPUs.

    On coherent hosts such as GH200 the memory of a GPU is a NUMA node, and is included in the system's total.
    NVML tells which nodes these are, unless the driver is too old for that: other nodes without processors,
    such as memory behind CXL, belong to the host.
    """
    of_gpus = set() if library is None else Nvml(library).memory_nodes()
    nodes = [sys / f"devices/system/node/node{node}" for node in of_gpus]
    # NVML may name the node that the GPU is attached to, which has processors.
    return psutil.virtual_memory().total - sum(_memory_of_node(n) for n in nodes if not _read(n / "cpulist"))


def _memory_of_node(node: Path) -> int:
    found = re.search(r"MemTotal:\s*(\d+) kB", _read(node / "meminfo"))
    return int(found[1]) * 1024 if found else 0


# ---- NICs ----------------------------------------------------------------------------


def has_rdma(sys: Path = SYS) -> bool:
    """Return whether an RDMA device has an active port."""
    return any("ACTIVE" in _read(port) for port in (sys / "class/infiniband").glob("*/ports/*/state"))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
