"""Take tables of Arrow apart, and make such tables of columns.

Columns are copied as they are kept, into memory that the system has again once they are dropped: what Arrow's
allocator has freed stays with the thread that had allocated it. Later they are handed out as they are, since
Arrow's columns do not change.

Decisions and their figures: ``docs/decisions/reads.md``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa


def names(table: pa.Table) -> list[Any]:
    """Return the name of each column, with its field."""
    return [(field.name, field) for field in table.schema]


def facts(table: pa.Table) -> list[Mapping[bytes, bytes]]:
    """Return what else is in the footer of the file."""
    return [table.schema.metadata or {}]


def rows(table: pa.Table) -> list[int]:
    """Return the rows of the file."""
    return [table.num_rows]


def columns(table: pa.Table) -> list[Any]:
    """Return the columns."""
    return list(table.columns)


def kind(column: pa.ChunkedArray) -> Hashable:
    """Return the type of a column."""
    return str(column.type)


def nbytes(column: pa.ChunkedArray) -> int:
    """Return the bytes of a column."""
    return int(column.get_total_buffer_size())


def copies(columns: Sequence[Any], rows: Sequence[int], stream: Any) -> list[list[Any]]:
    """Copy columns of one file."""
    (_,) = rows
    return [[_copied(column) for column in columns]]


def _copied(column: pa.ChunkedArray) -> pa.ChunkedArray:
    whole, size = pa.table({"": column}), pa.MockOutputStream()
    _write(whole, size)
    memory = pa.allocate_buffer(size.size(), pa.system_memory_pool())
    _write(whole, pa.FixedSizeBufferWriter(memory))
    return pa.ipc.open_stream(memory).read_all().column(0)


def _write(whole: pa.Table, into: Any) -> None:
    """Write one batch for each chunk: `write_table` leaves empty ones out, and with them their categories."""
    (column,) = whole.columns
    with pa.ipc.new_stream(into, whole.schema) as writer:
        for chunk in column.chunks:
            writer.write_batch(pa.record_batch([chunk], schema=whole.schema))


def give_back() -> None:
    """Have the system take memory back that was freed. Blocks."""
    pa.system_memory_pool().release_unused()


def joined(parts: Sequence[Sequence[Any]], stream: Any) -> list[Any]:
    """Return the columns of one file."""
    (only,) = parts
    return list(only)


def table(columns: Sequence[Any], names: Sequence[Any], facts: Sequence[Mapping[bytes, bytes]]) -> pa.Table:
    """Return a table of columns as the reader would."""
    schema = pa.schema([field for _, field in names], dict(facts[0]) or None)
    return pa.Table.from_arrays(list(columns), schema=schema)


def taken_apart(column: Any) -> tuple[Any, list[Any]]:
    """Raise: there is no tier below."""
    raise NotImplementedError


def put_together(shape: Any, buffers: Iterator[Any]) -> Any:
    """Raise: there is no tier below."""
    raise NotImplementedError


def wait(stream: Any) -> None:
    """Return: there are no streams."""
