"""Store serialised objects in host memory: the pageable tier and the pinned tier.

Pinning (registering) memory is slow, and takes it away from all other processes, so it is done once, for a
pool of fixed size. Objects use any free blocks of the pool, so there is no fragmentation beyond the last
block of each object, and no compaction.
"""

from __future__ import annotations

import mmap
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from dask_gpurt.device.arena import ALIGNMENT, Arena
from dask_gpurt.device.base import PAGE, Device, Fence, passed
from dask_gpurt.memory.serialize import Frames, Scattered, on_device
from dask_gpurt.memory.tiers import NoRoom, Tier

#: Threads that touch memory before it is registered. With them, 8 GiB take 0.4 s in all on a host of H200s;
#: without, if registering itself faults the pages in, 1.9 s with huge pages and 3.5 s with small ones.
TOUCH_THREADS = 8


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
            return passed
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

    Parameters
    ----------
    capacity
        The most bytes of buffers. With 0 there is no such tier: it also refuses objects without bytes.
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


class BlockPool:
    """Allocate blocks of equal size from one page-aligned area. Thread-safe.

    The system provides a page when it is first touched or registered.

    Parameters
    ----------
    capacity
        Bytes, rounded down to whole blocks.
    block
        Bytes in a block, a multiple of 256.
    register
        Called once with the whole area, in a thread; returns a function that undoes it. Until it has
        returned, there is no room.

    Attributes
    ----------
    ready
        Set once registering has succeeded or failed.
    """

    def __init__(
        self,
        capacity: int,
        *,
        block: int = 1 << 20,
        register: Callable[[np.ndarray], Callable[[], None]] | None = None,
    ):
        if block <= 0 or block % ALIGNMENT:
            raise ValueError(f"a block of {block} bytes: expected a multiple of {ALIGNMENT}")
        self._arena = Arena(capacity, unit=block)
        self.capacity = self._arena.capacity
        self._memory = np.empty(0, np.uint8)
        if self.capacity:
            memory = mmap.mmap(-1, self.capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if register:
                _advise(memory)
            self._memory = np.frombuffer(memory, np.uint8)
        self._base = self._memory.ctypes.data
        self._lock = threading.Lock()
        self._undo: Callable[[], None] | None = None
        self.error: Exception | None = None
        self.ready = threading.Event()
        if register and self.capacity:
            self._registering = threading.Thread(
                target=self._register, args=[register], name="gpurt-pin", daemon=True
            )
            self._registering.start()
        else:
            self.ready.set()

    def _register(self, register: Callable[[np.ndarray], Callable[[], None]]) -> None:
        try:
            _touch(self._memory)
            self._undo = register(self._memory)
        except Exception as error:  # `allocate` raises it
            self.error = error
        self.ready.set()

    @property
    def used(self) -> int:
        """Return the bytes of blocks in use."""
        return self._arena.used

    def allocate(self, nbytes: int) -> Scattered:
        """Allocate blocks, in a single contiguous run if possible, otherwise in few.

        Returns
        -------
        list of numpy.ndarray
            Runs of blocks with ``nbytes`` in total; the last one is trimmed.

        Raises
        ------
        NoRoom
            If there are not enough free blocks.
        """
        if not self.ready.is_set() or self.error is not None:
            raise NoRoom(Tier.PINNED, nbytes, f"could not be pinned: {self.error}" if self.error else "")
        with self._lock:
            found = self._arena.allocate_pieces(nbytes) if nbytes <= self.capacity else None
        if found is None:
            raise NoRoom(Tier.PINNED, nbytes)
        pieces = [self._memory[start : start + size] for start, size in found]
        if pieces:
            pieces[-1] = pieces[-1][: nbytes - sum(piece.size for piece in pieces[:-1])]
        return pieces

    def free(self, pieces: Iterable[np.ndarray]) -> None:
        """Free the result of :meth:`allocate`; raise KeyError for anything else."""
        with self._lock:
            for piece in pieces:
                self._arena.free(self._offset(piece))

    def size(self, pieces: Iterable[np.ndarray]) -> int:
        """Return the bytes of the blocks behind a result of :meth:`allocate`."""
        with self._lock:
            return sum(self._arena.size(self._offset(piece)) for piece in pieces)

    def _offset(self, piece: np.ndarray) -> int:
        return int(piece.ctypes.data) - self._base

    def close(self) -> None:
        """Refuse further allocations. Existing pieces stay valid, and keep the memory alive."""
        self.ready.wait()
        with self._lock:
            undo, self._undo = self._undo, None
            self.capacity = 0
            self._memory = np.empty(0, np.uint8)
        if undo:
            undo()


def _advise(memory: mmap.mmap) -> None:
    """Prepare memory for registration."""
    with suppress(OSError):  # a kernel without huge pages pins small ones, which takes longer
        memory.madvise(mmap.MADV_HUGEPAGE)
    # After a fork, copy-on-write could leave the parent with new pages while the device uses the pinned ones.
    memory.madvise(mmap.MADV_DONTFORK)


def _touch(memory: np.ndarray) -> None:
    """Fault in all pages, in several threads."""
    with ThreadPoolExecutor(TOUCH_THREADS, thread_name_prefix="gpurt-touch") as threads:
        list(threads.map(lambda part: part[::PAGE].fill(0), np.array_split(memory, TOUCH_THREADS)))


class PinnedTier(MemoryTier):
    """Map keys to blocks of a pool, one allocation for each object.

    A pool without blocks, as on a host without a GPU, is no tier: it also refuses objects without bytes.
    """

    def __init__(self, pool: BlockPool):
        super().__init__()
        self._pool = pool

    @property
    def capacity(self) -> int:
        return self._pool.capacity

    @property
    def used(self) -> int:
        """Return the bytes of blocks in use."""
        return self._pool.used

    def _allocate(self, header: bytes, sizes: Sequence[int]) -> tuple[Frames, Scattered]:
        ends, end = [], 0
        for size in sizes:
            end = -(-end // ALIGNMENT) * ALIGNMENT + size
            ends.append(end)
        if not self.capacity:
            raise NoRoom(Tier.PINNED, end)
        pieces = self._pool.allocate(end)
        buffers = tuple(_cut(pieces, end - size, end) for end, size in zip(ends, sizes, strict=True))
        return Frames(header, buffers), pieces

    def _free(self, pieces: Scattered) -> None:
        self._pool.free(pieces)

    def _size(self, pieces: Scattered) -> int:
        return self._pool.size(pieces)

    def close(self) -> None:
        """Delete everything, and close the pool."""
        super().close()
        self._pool.close()


def _cut(pieces: Scattered, start: int, end: int) -> Scattered:
    """Return the bytes of ``pieces`` from ``start`` to ``end``; one empty piece if there are none."""
    found, offset = [], 0
    for piece in pieces:
        part = piece[max(start - offset, 0) : max(end - offset, 0)]
        offset += piece.size
        if part.size:
            found.append(part)
    return found or [np.empty(0, np.uint8)]
