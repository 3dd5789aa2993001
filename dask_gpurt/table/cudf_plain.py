"""cudf rows of fixed width and without nulls, copied column by column into packed buffers and out of them.

libcudf's contiguous split takes about a millisecond for each piece, however small it is; a copy
takes microseconds, and nothing has to be unpacked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import pylibcudf as plc
import rmm
from rmm.pylibrmm.stream import DEFAULT_STREAM

from dask_gpurt.device.arena import ALIGNMENT
from dask_gpurt.device.copies import Copy, address
from dask_gpurt.device.cuda import CudaDevice, DeviceSpan
from dask_gpurt.device.protocol import Buffer
from dask_gpurt.table.protocol import Part

#: The first row, and the one behind the last.
Span = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """What columns lie one behind the other in a buffer.

    Attributes
    ----------
    types
        The type of each column, its scale, and the bytes of one row of it.
    schema
        What else there is to know of the frame, as whoever packs it says.
    """

    types: tuple[tuple[int, int, int], ...]
    schema: bytes

    @classmethod
    def of(cls, table: plc.Table, schema: bytes) -> Layout | None:
        """That of a table; None where a column has nulls, or rows of different sizes."""
        columns = table.columns()
        if not columns or not all(
            plc.traits.is_fixed_width(c.type()) and not c.null_count() for c in columns
        ):
            return None
        kinds = [column.type() for column in columns]
        return cls(tuple((int(kind.id()), kind.scale(), plc.types.size_of(kind)) for kind in kinds), schema)

    def starts(self, rows: int) -> list[int]:
        """Where the columns begin in a buffer of so many rows, and where the last one ends."""
        sizes = (-(-rows * size // ALIGNMENT) * ALIGNMENT for _, _, size in self.types)
        return list(accumulate(sizes, initial=0))

    def view(self, buffer: Buffer, rows: int) -> plc.Table:
        """The columns in a buffer, where they lie."""
        base = address(buffer)
        return plc.Table(
            [
                plc.Column(kind, rows, DeviceSpan(base + start, rows * size, buffer), None, 0, 0, [])
                for (kind, size), start in zip(self._kinds(), self.starts(rows), strict=False)
            ]
        )

    def read(self, parts: Sequence[Part], device: CudaDevice) -> plc.Table:
        """Parts one behind the other, in memory of the user's stream; complete in its order."""
        rows = sum(part.offsets[part.index + 1] - part.offsets[part.index] for part in parts)
        kinds = list(self._kinds())
        buffers = [rmm.DeviceBuffer(size=rows * size, stream=DEFAULT_STREAM) for _, size in kinds]
        copies: list[Copy] = []
        end = 0
        for part in parts:
            start, stop = part.offsets[part.index : part.index + 2]
            begin, end = end, end + stop - start
            sources = self.starts(part.offsets[-1])
            for (_, size), buffer, source in zip(kinds, buffers, sources, strict=False):
                at = part.buffer.ptr + source + start * size
                copies.append(Copy(buffer.ptr + begin * size, at, size * (stop - start)))
        device.copy_in_order(copies)
        return plc.Table(
            [
                plc.Column.from_rmm_buffer(buffer, kind, rows, [])
                for buffer, (kind, _) in zip(buffers, kinds, strict=True)
            ]
        )

    def _kinds(self) -> Iterator[tuple[plc.DataType, int]]:
        for kind, scale, size in self.types:
            yield plc.DataType(plc.TypeId(kind), scale), size


@dataclass(frozen=True)
class PlainRows:
    """Some rows of a table of a layout; ``header`` is what is needed to read them."""

    table: plc.Table
    layout: Layout
    header: bytes
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, table: plc.Table, layout: Layout, header: bytes, spans: Sequence[Span]) -> PlainRows:
        """Rows from spans; those that adjoin are copied as one."""
        joined: list[Span] = []
        for start, stop in spans:
            if joined and joined[-1][1] == start:
                joined[-1] = joined[-1][0], stop
            else:
                joined.append((start, stop))
        return cls(table, layout, header, tuple(joined))

    def between(self, start: int, stop: int) -> PlainRows:
        """Some of these rows."""
        ends = accumulate((b - a for a, b in self.spans), initial=0)
        cut = [
            (first + max(start - before, 0), last - max(after - stop, 0))
            for (first, last), (before, after) in zip(self.spans, pairwise(ends), strict=True)
        ]
        return PlainRows(self.table, self.layout, self.header, tuple((a, b) for a, b in cut if a < b))

    def copies(self, ptr: int) -> Iterator[Copy]:
        """What to copy to where their layout fits."""
        rows = sum(stop - start for start, stop in self.spans)
        starts = self.layout.starts(rows)
        for column, (_, _, size), into in zip(self.table.columns(), self.layout.types, starts, strict=False):
            base = column.data().ptr + column.offset() * size
            for first, last in self.spans:
                yield Copy(ptr + into, base + first * size, (last - first) * size)
                into += (last - first) * size
