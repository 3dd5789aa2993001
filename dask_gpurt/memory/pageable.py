"""Objects taken apart, in ordinary host memory."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, MutableMapping, Sequence

import numpy as np

from dask_gpurt.memory.frames import Frames, Scattered
from dask_gpurt.memory.tiers import NoRoom, Tier


def pairs(targets: Scattered, sources: Scattered) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cut two scattered buffers of one length into parts that go one into the other."""
    rest = iter(sources)
    source = np.empty(0, np.uint8)
    for target in targets:
        while target.size:
            while not source.size:
                source = next(rest)
            size = min(target.size, source.size)
            yield target[:size], source[:size]
            target, source = target[size:], source[size:]


def fill(targets: Iterable[Scattered], sources: Iterable[Scattered]) -> None:
    """Copy buffers into buffers of the same sizes."""
    for target, source in zip(targets, sources, strict=True):
        for into, part in pairs(target, source):
            np.copyto(into, part)


def sizes(frames: Frames) -> list[int]:
    """The bytes in each buffer."""
    return [sum(piece.size for piece in buffer) for buffer in frames.buffers]


class MemoryTier(MutableMapping[str, Frames]):
    """A mapping that copies into memory of its own, all of an object or nothing. Thread-safe.

    What it returns refers to that memory: use it before the key goes or gets another value.
    """

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Frames, Scattered]] = {}
        self._lock = threading.Lock()

    @abstractmethod
    def _allocate(self, header: bytes, sizes: Sequence[int]) -> tuple[Frames, Scattered]:
        """Room for an object, and what to free when it goes; raises NoRoom."""

    @abstractmethod
    def _free(self, pieces: Scattered) -> None: ...

    def __setitem__(self, key: str, frames: Frames) -> None:
        copy, pieces = self._allocate(frames.header, sizes(frames))
        try:
            fill(copy.buffers, frames.buffers)
        except BaseException:
            self._free(pieces)
            raise
        self._put(key, copy, pieces)

    def adopt(self, key: str, header: bytes, sizes: Sequence[int]) -> Frames:
        """Make room under ``key`` for buffers that the caller fills, through a device maybe."""
        frames, pieces = self._allocate(header, sizes)
        self._put(key, frames, pieces)
        return frames

    def _put(self, key: str, frames: Frames, pieces: Scattered) -> None:
        with self._lock:
            before = self._entries.get(key)
            self._entries[key] = frames, pieces
        if before is not None:
            self._free(before[1])

    def __getitem__(self, key: str) -> Frames:
        return self._entries[key][0]

    def part(self, key: str, which: int) -> Scattered:
        """One buffer of an object; refers to the memory of this mapping too."""
        return self._entries[key][0].buffers[which]

    def part_size(self, key: str, which: int) -> int:
        """Bytes of one buffer of an object."""
        return sum(piece.size for piece in self.part(key, which))

    def stored(self, key: str) -> int:
        """Bytes that an object takes here."""
        return self._size(self._entries[key][1])

    def _size(self, pieces: Scattered) -> int:
        return sum(piece.size for piece in pieces)

    def __delitem__(self, key: str) -> None:
        with self._lock:
            _, pieces = self._entries.pop(key)
        self._free(pieces)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)


class HostTier(MemoryTier):
    """A mapping into memory of the system's allocator, one array for each buffer.

    Parameters
    ----------
    capacity
        Bytes of buffers that fit.
    """

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity
        self.used = 0

    def _allocate(self, header: bytes, sizes: Sequence[int]) -> tuple[Frames, Scattered]:
        nbytes = sum(sizes)
        with self._lock:
            if self.used + nbytes > self.capacity:
                raise NoRoom(Tier.HOST, nbytes)
            self.used += nbytes
        try:
            pieces = [np.empty(size, np.uint8) for size in sizes]
        except MemoryError as error:
            with self._lock:
                self.used -= nbytes
            raise NoRoom(Tier.HOST, nbytes) from error
        return Frames(header, tuple([piece] for piece in pieces)), pieces

    def _free(self, pieces: Scattered) -> None:
        with self._lock:
            self.used -= self._size(pieces)
