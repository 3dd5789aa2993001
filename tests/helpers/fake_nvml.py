"""Fake NVML of other hosts: the functions of ``pynvml`` that the runtime calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass
class FakeGpu:
    """Describe one GPU.

    ``nvlinks`` has the index of the GPU at the end of each active link, or "switch". ``node`` is the NUMA
    node that its memory is; None if it is not one.
    """

    index: int
    nvlinks: list[int | str] = field(default_factory=list)
    version: int = 6  # of NVLink 4
    name: str = "NVIDIA H200"
    pcie: tuple[int, int] = (5, 16)
    mig: list[str] = field(default_factory=list)
    fabric: tuple[bytes, int] | None = None
    memory: int | None = 141 * 2**30  # None where the GPU shares the host's memory
    node: int | None = None

    @property
    def uuid(self) -> str:
        return f"GPU-{self.index}a3f0000-0000-0000-0000-00000000000{self.index}"

    @property
    def bus(self) -> str:
        return f"00000000:{self.index + 1:02X}:00.0"


class FabricInfo(ctypes.Structure):
    """Declare ``nvmlGpuFabricInfo_t`` as nvidia-ml-py does."""

    _fields_ = (
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint),
    )


class FakeNvml:
    """Fake the functions of ``pynvml`` for some GPUs.

    Parameters
    ----------
    path
        Returns the level of the common ancestor of two GPUs, by their indices.
    peers
        Whether they can read each other's memory over PCIe.
    """

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    NVML_NVLINK_MAX_LINKS = 18
    NVML_NVLINK_DEVICE_TYPE_GPU, NVML_NVLINK_DEVICE_TYPE_SWITCH = 0, 2
    NVML_P2P_CAPS_INDEX_READ, NVML_P2P_CAPS_INDEX_NVLINK = (0,), 2
    NVML_P2P_STATUS_OK = 0
    NVML_TOPOLOGY_INTERNAL, NVML_TOPOLOGY_SINGLE, NVML_TOPOLOGY_MULTIPLE = 0, 10, 20
    NVML_TOPOLOGY_HOSTBRIDGE, NVML_TOPOLOGY_NODE, NVML_TOPOLOGY_SYSTEM = 30, 40, 50
    NVML_GPU_FABRIC_STATE_COMPLETED = 3

    def __init__(
        self,
        gpus: list[FakeGpu],
        path: Callable[[int, int], int] = lambda one, other: 40,
        peers: Callable[[int, int], bool] = lambda one, other: True,
    ):
        self.gpus, self.path, self.peers = gpus, path, peers

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if index >= len(self.gpus):
            raise self.NVMLError("invalid argument")
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
        raise self.NVMLError("not found")

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu) -> Any:
        if handle.memory is None:
            raise self.NVMLError_NotSupported("Not Supported")
        return SimpleNamespace(total=handle.memory)

    def nvmlDeviceGetNumaNodeId(self, handle: FakeGpu) -> int:
        if handle.node is None:
            raise self.NVMLError_NotSupported("Not Supported")
        return handle.node

    def nvmlDeviceGetUUID(self, handle: FakeGpu | str) -> str:
        return handle if isinstance(handle, str) else handle.uuid

    def nvmlDeviceGetName(self, handle: FakeGpu) -> bytes:
        return handle.name.encode()  # as older versions return

    def nvmlDeviceGetPciInfo(self, handle: FakeGpu) -> Any:
        return SimpleNamespace(busId=handle.bus)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: FakeGpu) -> int:
        return handle.pcie[0]

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: FakeGpu) -> int:
        return handle.pcie[1]

    def nvmlDeviceGetMigMode(self, handle: FakeGpu) -> list[int]:
        return [int(bool(handle.mig))] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeGpu, number: int) -> str:
        if number >= len(handle.mig):
            raise self.NVMLError("not found")
        return handle.mig[number]

    def nvmlDeviceGetNvLinkState(self, handle: FakeGpu, link: int) -> int:
        if not handle.nvlinks:
            raise self.NVMLError("not supported")
        return int(link < len(handle.nvlinks))

    def nvmlDeviceGetNvLinkVersion(self, handle: FakeGpu, link: int) -> int:
        return handle.version

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: FakeGpu, link: int) -> Any:
        end = handle.nvlinks[link]
        return SimpleNamespace(busId=self.gpus[end].bus if isinstance(end, int) else "00000000:C0:00.0")

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: FakeGpu, link: int) -> int:
        return 0 if isinstance(handle.nvlinks[link], int) else 2

    def nvmlDeviceGetP2PStatus(self, one: FakeGpu, other: FakeGpu, capability: int) -> int:
        if capability == self.NVML_P2P_CAPS_INDEX_NVLINK:
            linked = other.index in one.nvlinks or {"switch"} == {*one.nvlinks, *other.nvlinks}
            return 0 if linked else 5
        return 0 if self.peers(one.index, other.index) else 1

    def nvmlDeviceGetTopologyCommonAncestor(self, one: FakeGpu, other: FakeGpu) -> int:
        return self.path(one.index, other.index)

    c_nvmlGpuFabricInfo_t = FabricInfo

    def nvmlDeviceGetGpuFabricInfo(self, handle: FakeGpu, info: Any) -> None:
        """Fill in a structure by reference, as the C library does; rejects a structure passed by value."""
        found = ctypes.cast(info, ctypes.POINTER(FabricInfo)).contents
        if handle.fabric is not None:
            cluster, found.cliqueId = handle.fabric
            found.clusterUuid[:] = cluster
            found.state = 3


def switched(count: int = 4, **more: Any) -> FakeNvml:
    """Fake four H200 with an NVSwitch: NV18 between every pair."""
    return FakeNvml([FakeGpu(i, ["switch"] * 18, **more) for i in range(count)])


def pcie_only(peers: bool = True) -> FakeNvml:
    """Fake four L40S on two sockets."""
    gpus = [FakeGpu(i, name="NVIDIA L40S", pcie=(4, 16)) for i in range(4)]
    return FakeNvml(gpus, lambda one, other: 20 if one // 2 == other // 2 else 50, lambda *pair: peers)


def bridged() -> FakeNvml:
    """Fake four A100 PCIe cards, in pairs with a bridge of twelve links."""
    return FakeNvml([FakeGpu(i, [i ^ 1] * 12, version=4, pcie=(4, 16)) for i in range(4)])


def integrated() -> FakeNvml:
    """Fake a GB10, which reports a PCIe link that carries no traffic."""
    return FakeNvml([FakeGpu(0, name="NVIDIA GB10", pcie=(1, 1), memory=None)])


def cut_up() -> FakeNvml:
    """Fake two H200: the first split in two MIG instances, the second whole."""
    parts = ["MIG-11111111-0000-0000-0000-000000000000", "MIG-22222222-0000-0000-0000-000000000000"]
    return FakeNvml([FakeGpu(0, ["switch"] * 18, mig=parts), FakeGpu(1, ["switch"] * 18)])
