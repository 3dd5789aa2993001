"""Allocate blocks from a contiguous range: first fit, with coalescing of free neighbours.

Sets of integers are ranges here: the free parts of a pool, and its parts with backing memory.

Decisions and their figures: ``docs/decisions/memory.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sortedcontainers import SortedDict

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
