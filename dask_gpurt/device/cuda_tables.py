"""Take tables apart that pylibcudf's Parquet reader returns, and make such tables of columns.

Decisions and their figures: ``docs/decisions/reads.md``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import pylibcudf as plc

from dask_gpurt.device.copies import DeviceSpan


class TableOfFiles(plc.io.TableWithMetadata):  # type: ignore[misc]
    """Hold columns, and what the footers of their files say, as the reader's result does."""

    facts: Sequence[Mapping[bytes, bytes]] = ()

    @property
    def per_file_user_data(self) -> list[dict[bytes, bytes]]:
        """Return what else is in the footer of each file."""
        return [dict(each) for each in self.facts]


def names(table: Any) -> list[Any]:
    """Return the name of each column, with those of the fields of its type."""
    return list(table.column_names(include_children=True))


def facts(table: Any) -> list[Mapping[bytes, bytes]]:
    """Return what else is in the footer of each file."""
    return list(table.per_file_user_data)


def rows(table: Any) -> list[int]:
    """Return the rows of each file; of the whole table if the reader does not tell."""
    total, found = table.tbl.num_rows(), list(table.num_rows_per_source)
    return found if sum(found) == total else [total]


def columns(table: Any) -> list[Any]:
    """Return the columns."""
    return list(table.columns)


def kind(column: Any) -> Hashable:
    """Return the type of a column."""
    of = column.type()
    return of.id(), of.scale(), tuple(map(kind, column.children()))


def nbytes(column: Any) -> int:
    """Return the bytes of a column on the device."""
    return int(column.device_buffer_size())


def copies(columns: Sequence[Any], rows: Sequence[int], stream: Any) -> list[list[Any]]:
    """Copy so many rows of columns each time; return the copies of all columns each time."""
    table = plc.Table(list(columns))
    if len(rows) == 1:
        return [list(table.copy(stream=stream).columns())]
    spans = [at for span in pairwise(accumulate(rows, initial=0)) for at in span]
    return [
        list(each.copy(stream=stream).columns()) for each in plc.copying.slice(table, spans, stream=stream)
    ]


def joined(parts: Sequence[Sequence[Any]], stream: Any) -> list[Any]:
    """Copy the columns of several parts, as columns of all of their rows."""
    tables = [plc.Table(list(part)) for part in parts]
    whole = (
        tables[0].copy(stream=stream)
        if len(tables) == 1
        else plc.concatenate.concatenate(tables, stream=stream)
    )
    return list(whole.columns())


def table(columns: Sequence[Any], names: Sequence[Any], facts: Sequence[Mapping[bytes, bytes]]) -> Any:
    """Return a table of columns as the reader would."""
    found = TableOfFiles(plc.Table(list(columns)), list(names))
    found.facts = facts
    return found


def taken_apart(column: Any) -> tuple[Any, list[Any]]:
    """Return the shape of a column, and its buffers, which keep their memory alive."""
    spans = [
        None if span is None or not span.size else DeviceSpan(span.ptr, span.size, span)
        for span in (column.data(), column.null_mask())
    ]
    shapes, buffers = [], [span for span in spans if span is not None]
    for child in column.children():
        shape, more = taken_apart(child)
        shapes.append(shape)
        buffers += more
    there = [span is not None for span in spans]
    return (column.type(), column.size(), column.null_count(), column.offset(), there, shapes), buffers


def put_together(shape: Any, buffers: Iterator[Any]) -> Any:
    """Return a column of a shape with the next buffers."""
    of, rows, nulls, offset, there, shapes = shape
    data, mask = [next(buffers) if is_there else None for is_there in there]
    return plc.Column(of, rows, data, mask, nulls, offset, [put_together(each, buffers) for each in shapes])


def wait(stream: Any) -> None:
    """Block until all work of a stream is done."""
    stream.synchronize()
