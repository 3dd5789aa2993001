"""Cut a contiguous range into blocks: first fit, with free neighbours merged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dask_gpurt.device.ranges import Range, Ranges

#: Satisfies CUDA's vector loads, cache lines and Arrow's 64 byte recommendation.
ALIGNMENT = 256


class Extent(NamedTuple):
    """Locate a block: its first byte in the range, and its bytes."""

    offset: int
    nbytes: int


class Arena:
    """Cut blocks from a range of ``capacity`` bytes. Pure; not thread-safe.

    First fit keeps the blocks at the low end, so that the memory behind the range is
    touched, and paid for, only as far as it is needed.

    Parameters
    ----------
    capacity
        Bytes in the range; rounded down to whole units.
    unit
        Bytes that offsets and sizes of blocks are multiples of.
    """

    def __init__(self, capacity: int, unit: int = ALIGNMENT):
        self.capacity = max(capacity, 0) // unit * unit
        #: Bytes in blocks. It is counted apart since other threads read it: between the removal of a free
        #: range and the addition of its rest the total of these is too low.
        self.used = 0
        self._unit = unit
        self._blocks: dict[int, int] = {}
        self._free = Ranges()
        self._free.add(0, self.capacity)

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a new block of at least ``nbytes`` bytes, None without room for it."""
        size = max(1, -(-nbytes // self._unit)) * self._unit
        offset = self._free.first(size)
        if offset is not None:
            self._cut(offset, size)
        return offset

    def allocate_pieces(self, nbytes: int) -> list[Extent] | None:
        """Return new blocks of at least ``nbytes`` bytes together, None without room for them.

        That is one block where a free range is long enough, and else as few as there may be.
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
        """Return the bytes of the block at ``offset``; KeyError when there is none."""
        return self._blocks[offset]

    def free(self, offset: int) -> None:
        """Give the block at ``offset`` back; KeyError when there is none."""
        size = self._blocks.pop(offset)
        self.used -= size
        self._free.add(offset, offset + size)

    def free_ranges(self) -> Iterator[Range]:
        """Yield where no block is, in order."""
        return iter(self._free)

    def is_free(self, start: int, stop: int) -> bool:
        """Return whether no block has any of the bytes from ``start`` to before ``stop``."""
        return self._free.within(start, stop) == [(start, stop)]


def _length(part: Range) -> int:
    return part[1] - part[0]
