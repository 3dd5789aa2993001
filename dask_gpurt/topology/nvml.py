"""The GPUs of this host and what joins them, as NVML tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from itertools import combinations
from typing import Any

from dask_gpurt.topology.hosts import Gpu, Join, Lanes, Pair
from dask_gpurt.topology.links import Link

#: The generation of NVLink by the number that NVML has for its version; 2.2 and 3.1 have one of their own.
_GENERATIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5}
#: ``NVML_P2P_CAPS_INDEX_READ`` by number, since nvidia-ml-py has a tuple there.
_READ = 0


def library() -> Any | None:
    """``pynvml``, ready for use; None where it or the driver is missing or Dask's setting forbids it."""
    from distributed.diagnostics import nvml

    nvml.init_once()
    return import_module("pynvml") if nvml.is_initialized() else None


class Nvml:
    """Questions to NVML. What a driver or a device does not support has an answer that says so.

    Parameters
    ----------
    library
        ``pynvml``, or something with the same functions.
    numa
        The NUMA node of a device by its address on the PCI bus.
    """

    def __init__(self, library: Any, numa: Callable[[str], int | None]):
        self._library = library
        self._numa = numa
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
        """All GPUs in the order of the bus; of one that is cut up, its instances."""
        return tuple(gpu for index, handle in self._handles.items() for gpu in self._parts(index, handle))

    def _parts(self, index: int, handle: Any) -> Iterator[Gpu]:
        whole = Gpu(
            _text(self._library.nvmlDeviceGetUUID(handle)),
            index,
            _text(self._ask("nvmlDeviceGetName", handle)),
            numa=self._numa(self._bus(handle)),
            pcie=self._pcie(handle),
        )
        if not self._ask("nvmlDeviceGetMigMode", handle, default=(0, 0))[0]:
            yield replace(whole, nvlink=self._nvlinks(handle), fabric=self._fabric(handle))
            return
        for number in range(self._ask("nvmlDeviceGetMaxMigDeviceCount", handle, default=0)):
            part = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
            if part is not None:
                yield replace(whole, id=_text(self._library.nvmlDeviceGetUUID(part)), parent=whole.id)

    def _bus(self, handle: Any) -> str:
        info = self._ask("nvmlDeviceGetPciInfo", handle)
        return "" if info is None else _text(info.busId).lower()

    def _pcie(self, handle: Any) -> Lanes | None:
        # The current generation is lower while a GPU idles.
        generation = self._ask("nvmlDeviceGetMaxPcieLinkGeneration", handle)
        width = self._ask("nvmlDeviceGetMaxPcieLinkWidth", handle)
        return Lanes(generation, width) if generation and width else None

    def _nvlinks(self, handle: Any) -> Lanes | None:
        up = list(self._links_up(handle))
        version = self._ask("nvmlDeviceGetNvLinkVersion", handle, up[0], default=0) if up else 0
        return Lanes(_GENERATIONS.get(version, 0), len(up)) if up else None

    def _links_up(self, handle: Any) -> Iterator[int]:
        for link in range(self._library.NVML_NVLINK_MAX_LINKS):
            if self._ask("nvmlDeviceGetNvLinkState", handle, link, default=0):
                yield link

    def _fabric(self, handle: Any) -> str | None:
        """The domain of a GPU whose NVLink switch joins hosts; within one host its UUID is all zeros."""
        try:
            info = self._library.c_nvmlGpuFabricInfo_t()
            self._library.nvmlDeviceGetGpuFabricInfo(handle, info)
        except (self._library.NVMLError, AttributeError):
            return None
        cluster = bytes(info.clusterUuid)
        complete = info.state == self._library.NVML_GPU_FABRIC_STATE_COMPLETED
        return f"{cluster.hex()}/{info.cliqueId}" if complete and any(cluster) else None

    # ---- pairs -----------------------------------------------------------------------

    def joins(self, gpus: tuple[Gpu, ...]) -> dict[Pair, Join]:
        """What joins every two of :meth:`gpus`."""
        return {frozenset((one.id, other.id)): self._join(one, other) for one, other in combinations(gpus, 2)}

    def _join(self, one: Gpu, other: Gpu) -> Join:
        if one.parent or other.parent:  # instances of MIG have no peers, not even in their own GPU
            return Join(Link.SHARED_MEMORY)
        pair = self._handles[one.index], self._handles[other.index]
        if self._can(pair, self._library.NVML_P2P_CAPS_INDEX_NVLINK):
            return Join(Link.NVLINK, nvlinks=self._nvlinks_between(*pair))
        if self._can(pair, _READ):
            return Join(Link.PCIE, path=self._path(pair))
        return Join(Link.SHARED_MEMORY)

    def _can(self, pair: tuple[Any, Any], capability: int) -> bool:
        answer = self._ask("nvmlDeviceGetP2PStatus", *pair, capability)
        return bool(answer == self._library.NVML_P2P_STATUS_OK)

    def _nvlinks_between(self, handle: Any, peer: Any) -> int:
        """Links that end at a peer, or at a switch, over which each of them reaches every peer."""
        bus, switch = self._bus(peer), self._library.NVML_NVLINK_DEVICE_TYPE_SWITCH
        count = 0
        for link in self._links_up(handle):
            ends_at = self._ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
            kind = self._ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
            count += kind == switch or (ends_at is not None and _text(ends_at.busId).lower() == bus)
        return count

    def _path(self, pair: tuple[Any, Any]) -> str:
        level = self._ask("nvmlDeviceGetTopologyCommonAncestor", *pair)
        names = {
            self._library.NVML_TOPOLOGY_INTERNAL: "PIX",
            self._library.NVML_TOPOLOGY_SINGLE: "PIX",
            self._library.NVML_TOPOLOGY_MULTIPLE: "PXB",
            self._library.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
            self._library.NVML_TOPOLOGY_NODE: "NODE",
            self._library.NVML_TOPOLOGY_SYSTEM: "SYS",
        }
        return names.get(level, "")


def _text(value: Any) -> str:
    """Older versions of nvidia-ml-py return bytes."""
    return value.decode() if isinstance(value, bytes) else str(value or "")
