"""Keep columns in a tier below the device, to which they were copied from it, and copy them back.

They come down as other columns need their room on the device, or find none there, and go as other data needs
that of the tier.

Decisions and their figures: ``docs/decisions/reads.md``.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from dask_gpurt.device import Device
from dask_gpurt.memory.host import PinnedTier
from dask_gpurt.memory.ledger import NoRoom
from dask_gpurt.memory.serialize import Scattered, raw_frames
from dask_gpurt.reads.columns import Column, ColumnCache, Kept, Part, Tables


class Stored:
    """Represent a column in the tier. It is there until the last reference to this object is gone.

    ``shape``: what the column is made of, for the library.
    ``buffers``: its memory in the tier.
    ``nbytes``: the bytes of the column on the device.
    """

    def __init__(self, shape: Any, buffers: Sequence[Scattered], nbytes: int):
        self.shape, self.buffers, self.nbytes = shape, buffers, nbytes


class ColumnsBelow(ColumnCache):
    """Hold columns of parts in a tier in host memory. Thread-safe.

    ``tier``, ``device``: the tier, and the device of the columns.
    ``tables``: returns the functions of the library.
    """

    def __init__(
        self,
        tier: PinnedTier,
        device: Device,
        tables: Callable[[], Tables],
        room: Callable[[], int],
        changed: Callable[[int], None],
    ):
        super().__init__(room, changed)
        self._tier, self._device, self._tables = tier, device, tables
        self._names = itertools.count()
        #: The names of those without a reference. Deleted later, since the last one may go at any place.
        self._unused: deque[str] = deque()

    def holds(self, column: Column) -> bool:
        """Return whether a column is in the tier."""
        return isinstance(column.data, Stored)

    def take(self, part: Part, kept: Kept, *, ordered: bool = True) -> None:
        """Copy columns down, as far as there is room. Blocks, but not until more memory is pinned.

        ``ordered``: whether pending work on the device may still write them.
        """
        for name, column in kept.columns.items():
            if self.has(part, kept.version, name) or not self.takes(column.nbytes):
                continue
            if not self._tier.is_ready(column.nbytes):  # to decode it again takes less than all would wait
                continue
            try:
                found = {name: self._stored(column, ordered)}
            except NoRoom:  # others were faster
                return
            self.keep(part, Kept(kept.version, kept.facts, kept.layouts, found))
            found.clear()
            self.delete_unused()  # if there was no room for all of its blocks

    def _stored(self, column: Column, ordered: bool) -> Column:
        shape, buffers = self._tables().taken_apart(column.data)
        name = f"column-{next(self._names)}"
        self._tier.put(name, raw_frames(buffers), self._device, ordered=ordered)()
        stored = Stored(shape, self._tier[name].buffers, column.nbytes)
        weakref.finalize(stored, self._unused.append, name).atexit = False
        return column._replace(data=stored, nbytes=self._tier.stored(name))

    def raised(self, columns: Sequence[Column]) -> list[Column]:
        """Return copies of columns on the device, which may share their memory. Blocks.

        Raises MemoryError if there is no memory on the device.
        """
        buffers, complete = self._device.gather_all(
            [pieces for column in columns for pieces in column.data.buffers]
        )
        complete()
        tables, rest = self._tables(), iter(buffers)
        found = [tables.put_together(column.data.shape, rest) for column in columns]
        return [
            column._replace(data=data, nbytes=column.data.nbytes)
            for column, data in zip(columns, found, strict=True)
        ]

    def release(self, nbytes: int) -> int:
        freed = self.delete_unused()
        return freed + super().release(nbytes - freed)

    def _free(self, dropped: list[Any]) -> None:
        super()._free(dropped)
        self.delete_unused()

    def delete_unused(self) -> int:
        """Delete columns without a reference, and return their bytes."""
        freed = 0
        with suppress(IndexError):  # when all are
            while True:
                name = self._unused.popleft()
                freed += self._tier.stored(name)
                del self._tier[name]
        return freed
