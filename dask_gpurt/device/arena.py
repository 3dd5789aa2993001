"""Allocate parts of a contiguous range: first fit, with free neighbours merged."""

from __future__ import annotations

from collections.abc import Iterator

from sortedcontainers import SortedDict

#: Satisfies CUDA's vector loads, cache lines and Arrow's 64 byte recommendation.
ALIGNMENT = 256


class Arena:
    """Offsets of blocks in a range of ``capacity`` bytes. Pure; not thread-safe.

    First fit keeps the blocks at the low end, so that the memory behind the range is
    touched, and paid for, only as far as it is needed.

    Parameters
    ----------
    capacity
        Bytes in the range.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        self.used = 0
        self._blocks: dict[int, int] = {}
        self._free = SortedDict({0: self.capacity} if self.capacity else {})

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a new block of at least ``nbytes`` bytes, None without room."""
        size = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        found = next((entry for entry in self._free.items() if entry[1] >= size), None)
        if found is None:
            return None
        offset, free = found
        del self._free[offset]
        if free > size:
            self._free[offset + size] = free - size
        self._blocks[offset] = size
        self.used += size
        return int(offset)

    def free(self, offset: int) -> None:
        """Give the block at ``offset`` back; KeyError when there is none."""
        size = self._blocks.pop(offset)
        self.used -= size
        after = self._free.pop(offset + size, 0)
        index = self._free.bisect_left(offset) - 1
        if index >= 0:
            before, length = self._free.peekitem(index)
            if before + length == offset:
                offset, size = before, size + length
        self._free[offset] = size + after

    def free_ranges(self) -> Iterator[tuple[int, int]]:
        """Return the free ranges in order, each from its first byte to the one behind its last."""
        return ((offset, offset + size) for offset, size in self._free.items())

    def is_free(self, start: int, stop: int) -> bool:
        """Return whether no block has any of the bytes from ``start`` to before ``stop``."""
        index = self._free.bisect_right(start) - 1
        if index < 0:
            return False
        offset, size = self._free.peekitem(index)
        return bool(offset + size >= stop)
