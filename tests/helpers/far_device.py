"""Fake a device with memory of its own on a host: its buffers are not arrays."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dask_gpurt.device import MappingError
from dask_gpurt.device.base import Fence, no_fence
from dask_gpurt.device.host import HostDevice


class Far:
    """Wrap a buffer that only its device can read."""

    def __init__(self, memory: np.ndarray):
        self.memory = memory

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def __sizeof__(self) -> int:
        return self.memory.nbytes


class FarFiles:
    """Count the bytes of direct file I/O, which bypasses host memory."""

    def __init__(self) -> None:
        self.moved: Counter[str] = Counter()

    def write(self, fd: int, path: str, parts: Sequence[tuple[Far, int]], *, ordered: bool) -> list[int]:
        with open(path, "r+b") as file:
            assert os.fstat(fd).st_size >= max(at + far.nbytes for far, at in parts)
            for far, at in parts:
                assert at % 4096 == 0
                self.moved["written"] += os.pwrite(file.fileno(), far.memory, at)
        return [zlib.crc32(far.memory) for far, _ in parts]

    def read(self, fd: int, path: str, spans: Sequence[tuple[int, int]]) -> list[tuple[Far, int]]:
        found = []
        with open(path, "rb") as file:
            for at, nbytes in spans:
                data = np.frombuffer(os.pread(file.fileno(), nbytes, at), np.uint8)
                if data.nbytes < nbytes:
                    raise EOFError
                self.moved["read"] += nbytes
                found.append((Far(data), zlib.crc32(data)))
        return found


class FarDevice(HostDevice):
    """Fake a GPU for the tiers: the host cannot read live buffers."""

    on_host = False

    def __init__(self) -> None:
        super().__init__(1 << 30)
        self.moved = FarFiles()

    def files(self, refused: Callable[[str], None]) -> FarFiles:  # type: ignore[override]
        return self.moved

    def scatter(self, sources: Sequence[Any], into: Sequence[list[Any]], *, ordered: bool = True) -> Fence:
        return super().scatter([getattr(far, "memory", far) for far in sources], into)

    def gather(self, pieces: list[Any]) -> tuple[Far, Fence]:
        self.moved.moved["gathered"] += sum(piece.nbytes for piece in pieces)
        return Far(np.concatenate(pieces)), no_fence


class Accelerator(HostDevice):
    """Fake a GPU: buffers are copied before the host reads them; peers can map them if the ticket says so."""

    kind = "accelerator"
    shared_path = "cuda-ipc"
    reads_in_place = False
    on_host = False

    def is_same(self, ticket: Any) -> bool:
        return bool(ticket["device"] == "this")

    def map(self, ticket: Any) -> Any:
        if ticket.get("mapped"):
            return object()
        raise MappingError("no peer access")

    def from_host(self, sources: Any) -> list[Any]:
        return [source.copy() for source in sources]


class Integrated(Accelerator):
    """Fake a GPU that shares the host's memory, such as GB10; its values are numpy arrays."""

    integrated = True

    def own_memory(self) -> int:  # type: ignore[override]
        return self.memory_limit

    def holds(self, value: Any) -> bool:
        return isinstance(value, np.ndarray)
