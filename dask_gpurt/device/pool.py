"""Define memory pools that peers on the same host may map, and allocate blocks in them. Their methods block.

Decisions and their figures: ``docs/decisions/memory.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from sortedcontainers import SortedDict

#: Memory that a table backend reads from and writes to: a ``numpy`` byte array on the host,
#: an object with ``ptr`` and ``size`` on a GPU.
Buffer = Any
#: Description by which a peer maps a pool; has only values that msgpack can serialise.
Ticket = dict[str, Any]
#: The most of a GPU's free memory that a pool of automatic size takes, since others use that memory too.
AUTO_POOL_OF_FREE = 0.4
#: The most of /dev/shm, as a share of its total size, for the capacity of a pool of automatic size. Memory is
#: allocated only on demand: the pools of a host may overcommit, and then producers wait.
AUTO_POOL_OF_SHM = 0.4


class NoMemoryForPool(Exception):
    """A device has no memory for a new pool."""

    def __init__(self, nbytes: int):
        super().__init__(nbytes)
        self.nbytes = nbytes

    def __str__(self) -> str:
        return f"the device has no memory for a pool of {self.nbytes} bytes"


class PoolFull(Exception):
    """A pool has no free block of the requested size."""

    def __init__(self, nbytes: int):
        super().__init__(nbytes)
        self.nbytes = nbytes

    def __str__(self) -> str:
        return f"no free block of {self.nbytes} bytes"


class NoBacking(PoolFull):
    """A pool has a free block, but the system currently has no memory for it.

    Other pools of this host may hold that memory, so a retry may succeed.
    """


class SharedMemoryFull(MemoryError):
    """The host's shared memory has no room, whatever this worker spills; the message says what to do."""


class MappingError(Exception):
    """A peer's pool cannot be mapped; the message has the reason."""


@dataclass(frozen=True)
class Block:
    """Describe an allocation in a pool: ``nbytes`` bytes at ``offset``, and their ``buffer``."""

    offset: int
    nbytes: int
    buffer: Buffer


@dataclass(frozen=True)
class PoolLimits:
    """Limit the size of a device's pool, in bytes.

    ``whole``: the base of sizes that are given as a share.
    ``automatic``, ``most``: the size of a pool if the user sets none, and the largest that a user may set.
    ``free``, ``total``: free and total bytes of the memory that pools are allocated from.
    ``where``: the name of that memory, for messages.
    """

    whole: int
    automatic: float
    most: int
    free: int
    total: int
    where: str


class Mapping(Protocol):
    """Access a pool, of this worker or a peer, in this process."""

    def view(self, offset: int, nbytes: int) -> Buffer:
        """Return a view of a part of the pool; it keeps the mapping alive."""

    def drop_pages(self, offset: int, nbytes: int) -> None:
        """Drop a part of a peer's pool from the resident set of this process.

        Views remain valid; reading them maps the pages again.
        """

    def close(self) -> None: ...


class Pool(Mapping, Protocol):
    """Allocate blocks from memory of a fixed capacity, which peers can map."""

    @property
    def shrinks(self) -> bool:
        """Return whether :meth:`trim` can return memory to the system."""

    @property
    def capacity(self) -> int:
        """Return the capacity in bytes."""

    @property
    def used(self) -> int:
        """Return the bytes in blocks."""

    @property
    def backed(self) -> int:
        """Return the bytes of system memory currently behind it, used by blocks or not."""

    @property
    def cuts(self) -> int:
        """Return the cumulative number of allocations."""

    @property
    def short(self) -> int:
        """Return the size of the last requested block if the system had no memory for it, else 0."""

    def ticket(self) -> Ticket:
        """Return the description by which a peer maps this pool."""

    def allocate(self, nbytes: int) -> Block:
        """Allocate a block.

        Raises
        ------
        PoolFull
            If no free range is large enough.
        NoBacking
            If the system currently has no memory for it.
        MemoryError
            If it exceeds the system's total memory.
        """

    def free(self, block: Block) -> None: ...

    def trim(self) -> None:
        """Return memory that no block uses to the system, if the pool shrinks."""


# ---- blocks of a contiguous range: first fit, with coalescing of free neighbours ---------------------
#
# Sets of integers are ranges here: the free parts of a pool, and its parts with backing memory.


#: Bytes; satisfies CUDA's vector loads, cache lines and Arrow's recommendation of 64 bytes.
ALIGNMENT = 256
#: The first integer, and the last one plus 1.
Range = tuple[int, int]


class Ranges:
    """Hold disjoint ranges, with neighbours merged. Pure; not thread-safe."""

    def __init__(self) -> None:
        self._stops = SortedDict()
        #: The number of integers in all ranges.
        self.total = 0

    def __iter__(self) -> Iterator[Range]:
        return iter(list(self._stops.items()))

    def add(self, start: int, stop: int) -> None:
        """Add a range, which may overlap with the set."""
        if start >= stop:
            return
        touching = list(self._touching(start, stop))
        start = min([start, *(first for first, _ in touching)])
        stop = max([stop, *(last for _, last in touching)])
        self._replace(touching, [(start, stop)])

    def remove(self, start: int, stop: int) -> None:
        """Remove a range, which need not be in the set entirely."""
        if start >= stop:
            return
        found = [
            (first, last) for first, last in self._touching(start, stop) if last > start and first < stop
        ]
        left = [(first, start) for first, _ in found if first < start]
        right = [(stop, last) for _, last in found if last > stop]
        self._replace(found, [*left, *right])

    def first(self, length: int) -> int | None:
        """Return the start of the first range of at least ``length`` integers; None if there is none."""
        return next((start for start, stop in self._stops.items() if stop - start >= length), None)

    def within(self, start: int, stop: int) -> list[Range]:
        """Return the parts of a range that are in the set."""
        cut = [(max(first, start), min(last, stop)) for first, last in self._touching(start, stop)]
        return [(first, last) for first, last in cut if first < last]

    def gaps(self, start: int, stop: int) -> list[Range]:
        """Return the parts of a range that are not in the set."""
        found = self.within(start, stop)
        edges = [start, *(edge for part in found for edge in part), stop]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [(first, last) for first, last in pairs if first < last]

    def _touching(self, start: int, stop: int) -> Iterator[Range]:
        """Yield the ranges that overlap with or adjoin a range."""
        at = max(0, self._stops.bisect_right(start) - 1)
        for first in self._stops.islice(at):
            if first > stop:
                return
            if self._stops[first] >= start:
                yield first, self._stops[first]

    def _replace(self, old: list[Range], new: list[Range]) -> None:
        for first, last in old:
            del self._stops[first]
            self.total -= last - first
        for first, last in new:
            self._stops[first] = last
            self.total += last - first


class Extent(NamedTuple):
    """Locate a block in the range."""

    offset: int
    nbytes: int


class Arena:
    """Allocate blocks from a range of ``capacity`` bytes. Pure; not thread-safe.

    First fit keeps the blocks at the low end, so that the memory behind the range is touched only as far as
    needed.

    ``capacity``: bytes in the range, rounded down to whole units.
    ``unit``: offsets and sizes of blocks are multiples of this many bytes.
    """

    def __init__(self, capacity: int, unit: int = ALIGNMENT):
        self.capacity = max(capacity, 0) // unit * unit
        #: Bytes in blocks. Counted separately, since other threads read it without a lock: the total of the
        #: free ranges is temporarily wrong while a range is removed and its rest added.
        self.used = 0
        self._unit = unit
        self._blocks: dict[int, int] = {}
        self._free = Ranges()
        self._free.add(0, self.capacity)

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a new block of at least ``nbytes`` bytes; None if it does not fit."""
        size = max(1, -(-nbytes // self._unit)) * self._unit
        offset = self._free.first(size)
        if offset is not None:
            self._cut(offset, size)
        return offset

    def allocate_pieces(self, nbytes: int) -> list[Extent] | None:
        """Return new blocks of at least ``nbytes`` bytes in total; None if they do not fit.

        It is a single block if a free range is large enough, otherwise as few as possible.
        """
        need = -(-nbytes // self._unit) * self._unit
        if need > self._free.total:
            return None
        offset = self._free.first(need) if need else None
        if offset is not None:
            return [self._cut(offset, need)]
        pieces = []
        for start, stop in sorted(self._free, key=_length, reverse=True):
            if not need:
                break
            pieces.append(self._cut(start, min(need, stop - start)))
            need -= pieces[-1].nbytes
        return pieces

    def _cut(self, offset: int, size: int) -> Extent:
        self._free.remove(offset, offset + size)
        self._blocks[offset] = size
        self.used += size
        return Extent(offset, size)

    def size(self, offset: int) -> int:
        """Return the bytes of the block at ``offset``; raise KeyError if there is none."""
        return self._blocks[offset]

    def free(self, offset: int) -> None:
        """Free the block at ``offset``; raise KeyError if there is none."""
        size = self._blocks.pop(offset)
        self.used -= size
        self._free.add(offset, offset + size)

    def free_ranges(self) -> Iterator[Range]:
        """Yield the free ranges in ascending order."""
        return iter(self._free)

    def is_free(self, start: int, stop: int) -> bool:
        """Return whether all bytes from ``start`` up to ``stop``, exclusive, are free."""
        return self._free.within(start, stop) == [(start, stop)]


def _length(part: Range) -> int:
    return part[1] - part[0]
