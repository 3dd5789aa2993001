"""Take apart tables and frames that Parquet readers return, and make them again of their columns.

Decisions and their figures: ``docs/decisions/reads.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import cudf
import pylibcudf as plc
from cudf.core.column import ColumnBase
from cudf.core.column_accessor import ColumnAccessor

from dask_gpurt.device.copies import DeviceSpan

# ---- tables of pylibcudf ----------------------------------------------------------------------------


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


# ---- frames of cudf ---------------------------------------------------------------------------------

#: The options by which cudf reads, or makes columns, in other ways.
_OTHER_RULES = ("io.parquet.low_memory", "mode.pandas_compatible", "spill")


@dataclass(frozen=True)
class FrameOfRead:
    """Describe a frame by the columns of the table that it was made of, without their data.

    ``dtypes``: the dtypes by label.
    ``index``: makes its index of the columns.
    """

    dtypes: Mapping[Any, Any]
    level_names: tuple[Any, ...]
    label_dtype: Any
    index: Callable[[Mapping[Any, ColumnBase]], Any]

    @classmethod
    def of(cls, frame: Any, table: Any) -> FrameOfRead | None:
        """Return how to make a frame of a table with the same columns; None if it has anything else.

        What cudf makes of columns of files, such as dates with a time, is compared by value.
        """
        if type(frame) is not cudf.DataFrame or not _is_plain():
            return None
        data = frame._data
        if not data or data.multiindex or data.rangeindex:
            return None
        if frame.attrs or not frame.flags.allows_duplicate_labels:
            return None
        read = cudf.DataFrame.from_pylibcudf(table)._data
        if not all(label in read and _is_same(column, read[label]) for label, column in data.items()):
            return None
        index = _index(frame.index, read)
        dtypes = {label: column.dtype for label, column in data.items()}
        return None if index is None else cls(dtypes, tuple(data.level_names), data.label_dtype, index)

    def frame(self, table: Any) -> Any:
        """Return the frame of a table that has the same columns as that one; None if the rules are others."""
        if not _is_plain():
            return None
        read = cudf.DataFrame.from_pylibcudf(table)._data
        columns = {label: _as(read[label], dtype) for label, dtype in self.dtypes.items()}
        data = ColumnAccessor(
            columns, level_names=self.level_names, label_dtype=self.label_dtype, verify=False
        )
        return cudf.DataFrame._from_data(data, index=self.index(read))


def _is_plain() -> bool:
    return not any(map(cudf.get_option, _OTHER_RULES))


def _is_same(column: ColumnBase, read: ColumnBase) -> bool:
    one, other = column.plc_column, read.plc_column
    if one.type() != other.type():
        return False
    return _memory(one) == _memory(other) or bool(column.equals(read))


def _memory(column: Any) -> Any:
    spans = [None if span is None else (span.ptr, span.size) for span in (column.data(), column.null_mask())]
    return column.size(), column.offset(), spans, [*map(_memory, column.children())]


def _as(column: ColumnBase, dtype: Any) -> ColumnBase:
    return column if column.dtype == dtype else ColumnBase.create(column.plc_column, dtype)


def _index(index: Any, read: Mapping[Any, ColumnBase]) -> Callable[[Mapping[Any, ColumnBase]], Any] | None:
    """Return what makes an index of the columns that were read; None if it is of others."""
    if type(index) is cudf.RangeIndex:
        return partial(_numbered, index.start, index.stop, index.step, index.name)
    if type(index) not in (cudf.Index, cudf.DatetimeIndex) or getattr(index, "freq", None) is not None:
        return None
    memory = _memory(index._columns[0].plc_column)
    found = [label for label, column in read.items() if _memory(column.plc_column) == memory]
    return partial(_of_column, found[0], index.dtype, index.name) if found else None


def _numbered(start: int, stop: int, step: int, name: Any, read: Mapping[Any, ColumnBase]) -> Any:
    return cudf.RangeIndex(start, stop, step, name=name)


def _of_column(label: Any, dtype: Any, name: Any, read: Mapping[Any, ColumnBase]) -> Any:
    return cudf.Index._from_column(_as(read[label], dtype), name=name)
