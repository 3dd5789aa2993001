"""Fake NVML of other hosts: the functions of ``pynvml`` that the runtime calls."""

from __future__ import annotations

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
    mig: list[str] = field(default_factory=list)
    memory: int | None = 141 * 2**30  # None where the GPU shares the host's memory
    node: int | None = None

    @property
    def uuid(self) -> str:
        return f"GPU-{self.index}a3f0000-0000-0000-0000-00000000000{self.index}"


class FakeNvml:
    """Fake the functions of ``pynvml`` for some GPUs.

    ``peers``: whether they can read each other's memory over PCIe.
    """

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    NVML_P2P_CAPS_INDEX_READ, NVML_P2P_CAPS_INDEX_NVLINK = (0,), 2
    NVML_P2P_STATUS_OK = 0

    def __init__(self, gpus: list[FakeGpu], peers: bool = True):
        self.gpus, self.peers = gpus, peers

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

    def nvmlDeviceGetMigMode(self, handle: FakeGpu) -> list[int]:
        return [int(bool(handle.mig))] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeGpu, number: int) -> str:
        if number >= len(handle.mig):
            raise self.NVMLError("not found")
        return handle.mig[number]

    def nvmlDeviceGetP2PStatus(self, one: FakeGpu, other: FakeGpu, capability: int) -> int:
        if capability == self.NVML_P2P_CAPS_INDEX_NVLINK:
            linked = other.index in one.nvlinks or {"switch"} == {*one.nvlinks, *other.nvlinks}
            return 0 if linked else 5
        return 0 if self.peers else 1


def switched(count: int = 4, **more: Any) -> FakeNvml:
    """Fake four H200 with an NVSwitch: NV18 between every pair."""
    return FakeNvml([FakeGpu(i, ["switch"] * 18, **more) for i in range(count)])


def pcie_only(peers: bool = True) -> FakeNvml:
    """Fake four L40S."""
    return FakeNvml([FakeGpu(i) for i in range(4)], peers)


def cut_up() -> FakeNvml:
    """Fake two H200: the first split in two MIG instances, the second whole."""
    parts = ["MIG-11111111-0000-0000-0000-000000000000", "MIG-22222222-0000-0000-0000-000000000000"]
    return FakeNvml([FakeGpu(0, ["switch"] * 18, mig=parts), FakeGpu(1, ["switch"] * 18)])
