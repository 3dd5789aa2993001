"""Store serialised objects in host memory: what its tiers have in common, and the pageable tier."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, MutableMapping, Sequence

import numpy as np

from dask_gpurt.device.base import Device, Fence, no_fence
from dask_gpurt.memory.serialize import Frames, Scattered, on_device
from dask_gpurt.memory.tiers import NoRoom, Tier


def pairs(targets: Scattered, sources: Scattered) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Split two scattered buffers of equal length into pairs of contiguous parts of equal length."""
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
    """Return the bytes in each buffer."""
    return [sum(piece.size for piece in buffer) for buffer in frames.buffers]


class MemoryTier(MutableMapping[str, Frames]):
    """Store objects in host memory, each one entirely or not at all. Thread-safe.

    Returned buffers refer to the tier's memory, and are valid until the key is deleted or replaced.
    Implements :class:`~dask_gpurt.memory.lower_tiers.LowerTier`.
    """

    reads_block = False

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Frames, Scattered]] = {}
        self._lock = threading.Lock()
        self._closed = False

    @abstractmethod
    def _allocate(self, header: bytes, sizes: Sequence[int]) -> tuple[Frames, Scattered]:
        """Allocate memory for an object; return its frames and the pieces to free later. Raises NoRoom."""

    @abstractmethod
    def _free(self, pieces: Scattered) -> None: ...

    @property
    @abstractmethod
    def used(self) -> int:
        """Return the bytes in use."""

    def __setitem__(self, key: str, frames: Frames) -> None:
        copy, pieces = self._allocate(frames.header, sizes(frames))
        try:
            fill(copy.buffers, frames.buffers)
        except BaseException:
            self._free(pieces)
            raise
        self._keep(key, copy, pieces)

    def put(self, key: str, frames: Frames, device: Device, *, ordered: bool) -> Fence:
        """Start to store an object, whose buffers may be on the device; return the fence of the copy."""
        if not any(map(on_device, frames.buffers)):
            self[key] = frames
            return no_fence
        sources = [buffer[0] for buffer in frames.buffers]
        into = self.adopt(key, frames.header, [source.nbytes for source in sources])
        try:
            return device.scatter(sources, into.buffers, ordered=ordered)
        except BaseException:
            del self[key]
            raise

    def adopt(self, key: str, header: bytes, sizes: Sequence[int]) -> Frames:
        """Allocate buffers under ``key`` for the caller to fill."""
        frames, pieces = self._allocate(header, sizes)
        self._keep(key, frames, pieces)
        return frames

    def _keep(self, key: str, frames: Frames, pieces: Scattered) -> None:
        with self._lock:
            before = self._entries.get(key)
            self._entries[key] = frames, pieces
        if before is not None:
            self._free(before[1])

    def __getitem__(self, key: str) -> Frames:
        return self._entries[key][0]

    def to_device(self, key: str) -> Frames:
        """Return an object in host memory, for the device to gather."""
        return self[key]

    def part(self, key: str, which: int, into: np.ndarray | None = None) -> Scattered:
        """Return one buffer of an object, which refers to the tier's memory."""
        return self._entries[key][0].buffers[which]

    def part_to_device(self, key: str, which: int) -> Scattered:
        """Return one buffer in host memory, for the device to gather."""
        return self.part(key, which)

    def part_room(self, key: str, which: int) -> int:
        """Return 0, since buffers are read in place."""
        return 0

    def part_size(self, key: str, which: int) -> int:
        """Return the bytes of one buffer of an object."""
        return sum(piece.size for piece in self.part(key, which))

    def stored(self, key: str) -> int:
        """Return the bytes that an object uses; 0 once the tier is closed."""
        with self._lock:
            return 0 if self._closed else self._size(self._entries[key][1])

    def _size(self, pieces: Scattered) -> int:
        return sum(piece.size for piece in pieces)

    def __delitem__(self, key: str) -> None:
        with self._lock:
            if self._closed:  # already freed
                return
            _, pieces = self._entries.pop(key)
        self._free(pieces)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def close(self) -> None:
        """Delete everything. Deleting a key afterwards is a no-op."""
        with self._lock:
            self._closed = True
            entries, self._entries = self._entries, {}
        for _, pieces in entries.values():
            self._free(pieces)


class HostTier(MemoryTier):
    """Map keys to pageable memory, one array for each buffer.

    ``capacity``: the most bytes of buffers. With 0 there is no such tier: it also refuses objects without
    bytes.
    """

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity
        self._used = 0

    @property
    def used(self) -> int:
        return self._used

    def _allocate(self, header: bytes, sizes: Sequence[int]) -> tuple[Frames, Scattered]:
        nbytes = sum(sizes)
        with self._lock:
            if not self.capacity or self._used + nbytes > self.capacity:
                raise NoRoom(Tier.HOST, nbytes)
            self._used += nbytes
        try:
            pieces = [np.empty(size, np.uint8) for size in sizes]
        except MemoryError as error:
            with self._lock:
                self._used -= nbytes
            raise NoRoom(Tier.HOST, nbytes) from error
        return Frames(header, tuple([piece] for piece in pieces)), pieces

    def _free(self, pieces: Scattered) -> None:
        with self._lock:
            self._used -= self._size(pieces)
