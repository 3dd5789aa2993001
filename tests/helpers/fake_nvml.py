"""Fake NVML of other hosts: the functions of ``pynvml`` that the runtime calls."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


@dataclass
class FakeGpu:
    """Describe one GPU.

    ``node``: the NUMA node that its memory is; None if it is not one.
    """

    index: int
    memory: int | None = 141 * 2**30  # None where the GPU shares the host's memory
    node: int | None = None

    @property
    def uuid(self) -> str:
        return f"GPU-{self.index}a3f0000-0000-0000-0000-00000000000{self.index}"


class FakeNvml:
    """Fake the functions of ``pynvml`` for some GPUs."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    def __init__(self, gpus: list[FakeGpu]):
        self.gpus = gpus

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
