"""Fake NVML of other hosts: the functions of ``pynvml`` that the runtime calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class FakeGpu:
    """Describe one GPU.

    ``node``: the NUMA node that its memory is; None if it is not one.
    """

    index: int
    node: int | None = None


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

    def nvmlDeviceGetNumaNodeId(self, handle: FakeGpu) -> int:
        if handle.node is None:
            raise self.NVMLError_NotSupported("Not Supported")
        return handle.node
