"""Store serialised objects in host memory: what its tiers have in common, the pageable and the pinned one.

Decisions and their figures: ``docs/decisions/memory.md``.
"""

from __future__ import annotations

import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from dask_gpurt.device.base import PAGE, Device, Fence, no_fence
from dask_gpurt.device.pool import ALIGNMENT, Arena
from dask_gpurt.memory.ledger import NoRoom, Tier
from dask_gpurt.memory.serialize import Frames, Scattered, on_device


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


class MemoryTier(ABC):
    """Store objects in host memory, each one entirely or not at all. Thread-safe.

    Returned buffers refer to the tier's memory, and are valid until the key is deleted.
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
            self._entries[key] = frames, pieces

    def __getitem__(self, key: str) -> Frames:
        return self._entries[key][0]

    def to_device(self, key: str) -> Frames:
        """Return an object in host memory, for the device to gather."""
        return self[key]

    def part(
        self, key: str, which: int, into: np.ndarray | None = None, *, to_device: bool = False
    ) -> Scattered:
        """Return one buffer of an object, which refers to the tier's memory; the device gathers it."""
        return self._entries[key][0].buffers[which]

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


# ---- pinned memory -----------------------------------------------------------------------------------
#
# Pinning (registering) memory is slow, takes it away from all other processes, and delays the end of a
# process that is killed. So it is done in a few large slabs, as they are needed. Objects use any free
# blocks of the slabs, so there is no fragmentation beyond the last block of each object, and no compaction.


#: Bytes that are registered first. Each further slab doubles what there is, within limits: a registration
#: takes 50 ms for each GiB, and calls of CUDA in other threads may wait for it.
FIRST_SLAB_BYTES, LARGEST_SLAB_BYTES = 512 * 2**20, 2 * 2**30
#: Threads that touch memory before it is registered. With them, 8 GiB take 0.4 s in all on a host of H200s;
#: without, if registering itself faults the pages in, 1.9 s with huge pages and 3.5 s with small ones.
TOUCH_THREADS = 8

#: Registers memory, and returns a function that undoes it.
Register = Callable[[np.ndarray], Callable[[], None]]


class Slab:
    """Hold one page-aligned area, registered as a whole, and the blocks in it. Not thread-safe.

    Blocks of different slabs are never joined to one piece, since a copy must not cross the border of what
    was registered together.
    """

    def __init__(self, nbytes: int, block: int, register: Register | None):
        self.arena = Arena(nbytes, unit=block)
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory = np.frombuffer(memory, np.uint8)
        self._base = int(self._memory.ctypes.data)
        self._undo: Callable[[], None] | None = None
        if register:
            _advise(memory)
            _touch(self._memory)
            self._undo = register(self._memory)

    @property
    def free_bytes(self) -> int:
        """Return the bytes of free blocks."""
        return self.arena.capacity - self.arena.used

    def allocate(self, nbytes: int) -> Iterator[np.ndarray]:
        """Allocate free blocks of ``nbytes`` in total, in as few runs as possible."""
        for start, size in self.arena.allocate_pieces(nbytes) or ():
            yield self._memory[start : start + size]

    def offset(self, piece: np.ndarray) -> int | None:
        """Return the offset of a piece; None if it belongs to another slab."""
        offset = int(piece.ctypes.data) - self._base
        return offset if 0 <= offset < self.arena.capacity else None

    def close(self) -> None:
        """Undo the registration. Pieces stay valid, and keep the memory alive."""
        self._memory = np.empty(0, np.uint8)
        undo, self._undo = self._undo, None
        if undo:
            undo()


class BlockPool:
    """Allocate blocks of equal size from slabs of memory. Thread-safe.

    ``capacity``: bytes, rounded down to whole blocks.
    ``block``: bytes in a block, a multiple of 256.
    ``register``: called with the whole area of each slab. The first slab is registered at once, in a thread.
    Without it, there is one slab, of which the system provides pages as they are touched.
    ``failed``: called once, in any thread, if a slab cannot be made; then there will be no more slabs.
    ``error``: the error that has ended the registration of further slabs.
    """

    def __init__(
        self,
        capacity: int,
        *,
        block: int = 1 << 20,
        register: Register | None = None,
        failed: Callable[[Exception], None] = lambda error: None,
    ):
        if block <= 0 or block % ALIGNMENT:
            raise ValueError(f"a block of {block} bytes: expected a multiple of {ALIGNMENT}")
        self.capacity = max(capacity, 0) // block * block
        self.error: Exception | None = None
        self._block = block
        self._register = register
        self._failed = failed
        self._slabs: list[Slab] = []
        self._lock = threading.Lock()
        #: Held while a slab is made, which takes 50 ms for each GiB; taken before the other lock.
        self._growing = threading.Lock()
        if register and self.capacity:
            self._grow_aside(0)

    @property
    def used(self) -> int:
        """Return the bytes of blocks in use."""
        return sum(slab.arena.used for slab in list(self._slabs))

    @property
    def backed(self) -> int:
        """Return the bytes of all slabs."""
        return sum(slab.arena.capacity for slab in list(self._slabs))

    def allocate(self, nbytes: int) -> Scattered:
        """Allocate blocks, in a single contiguous run if possible, otherwise in few.

        Blocks while another slab is made, if the present ones are too full.

        Returns runs of blocks with ``nbytes`` in total; the last one is trimmed.
        Raises NoRoom if there are not enough free blocks.
        """
        # Other threads may have taken the room of a new slab before this one does.
        while (pieces := self._allocate(nbytes)) is None:
            if nbytes > self.capacity - self.used or not self._grow(nbytes):
                raise NoRoom(Tier.PINNED, nbytes, f"could not be pinned: {self.error}" if self.error else "")
        return pieces

    def is_ready(self, nbytes: int) -> bool:
        """Return whether :meth:`allocate` would not wait for another slab; otherwise have one made."""
        if self._register is None or nbytes > self.capacity - self.used:
            return True
        with self._lock:
            if self._whole_blocks(nbytes) <= self._free_bytes():
                return True
        if self.error is None and not self._growing.locked():
            self._grow_aside(nbytes)
        return False

    def _grow_aside(self, nbytes: int) -> None:
        threading.Thread(target=self._grow, args=[nbytes], name="gpurt-pin", daemon=True).start()

    def _allocate(self, nbytes: int) -> Scattered | None:
        need = self._whole_blocks(nbytes)
        with self._lock:
            if nbytes > self.capacity or need > self._free_bytes():
                return None
            enough = [slab for slab in self._slabs if slab.free_bytes >= need]
            pieces: Scattered = []
            for slab in enough[:1] or self._slabs:
                part = min(need, slab.free_bytes)
                pieces += slab.allocate(part)
                need -= part
        if pieces:
            pieces[-1] = pieces[-1][: nbytes - sum(piece.size for piece in pieces[:-1])]
        return pieces

    def _whole_blocks(self, nbytes: int) -> int:
        return -(-nbytes // self._block) * self._block

    def _free_bytes(self) -> int:
        return sum(slab.free_bytes for slab in self._slabs)

    def _grow(self, nbytes: int) -> bool:
        """Make slabs until ``nbytes`` fit, and at least one; return False if they do not fit nevertheless."""
        with self._growing:
            while self.error is None and (size := self._next_slab(nbytes)):
                try:
                    slab = Slab(size, self._block, self._register)
                except Exception as error:  # `allocate` raises it too
                    self.error = error
                    self._failed(error)
                else:
                    with self._lock:
                        self._slabs.append(slab)
            return self._whole_blocks(nbytes) <= self._free_bytes()

    def _next_slab(self, nbytes: int) -> int:
        """Return the bytes of the next slab; 0 if none is needed, or allowed."""
        backed = self.backed
        if backed and self._whole_blocks(nbytes) <= self._free_bytes():
            return 0  # another thread has made one, or freed blocks
        most = max(0, self.capacity - backed)  # a closed pool has no capacity
        if self._register is None:
            return most
        return min(most, self._whole_blocks(min(max(FIRST_SLAB_BYTES, backed), LARGEST_SLAB_BYTES)))

    def free(self, pieces: Iterable[np.ndarray]) -> None:
        """Free the result of :meth:`allocate`; raise KeyError for anything else."""
        with self._lock:
            for piece in pieces:
                slab, offset = self._find(piece)
                slab.arena.free(offset)

    def size(self, pieces: Iterable[np.ndarray]) -> int:
        """Return the bytes of the blocks behind a result of :meth:`allocate`."""
        with self._lock:
            return sum(slab.arena.size(offset) for slab, offset in map(self._find, pieces))

    def _find(self, piece: np.ndarray) -> tuple[Slab, int]:
        for slab in self._slabs:
            if (offset := slab.offset(piece)) is not None:
                return slab, offset
        raise KeyError(int(piece.ctypes.data))

    def close(self) -> None:
        """Refuse further allocations. Existing pieces stay valid, and keep the memory alive. Blocks."""
        with self._growing, self._lock:
            self.capacity = 0
            for slab in self._slabs:
                slab.close()


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

    ``give_way``: frees at least so many bytes of what is here only while nothing else needs the room, and
    returns how many; 0 if there are none.
    """

    def __init__(self, pool: BlockPool, give_way: Callable[[int], int] = lambda nbytes: 0):
        super().__init__()
        self._pool = pool
        self._give_way = give_way

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
        pieces = self._allocated(end)
        buffers = tuple(_cut(pieces, end - size, end) for end, size in zip(ends, sizes, strict=True))
        return Frames(header, buffers), pieces

    def _allocated(self, nbytes: int) -> Scattered:
        while True:
            try:
                return self._pool.allocate(nbytes)
            except NoRoom:
                if nbytes > self.capacity or not self._give_way(nbytes):
                    raise

    def is_ready(self, nbytes: int) -> bool:
        """Return whether an object of so many bytes would not wait for memory; otherwise have it made."""
        return self._pool.is_ready(nbytes)

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
