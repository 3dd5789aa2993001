"""Make the frame of cudf that a read has returned, again, of the columns that it read.

Decisions and their figures: ``docs/decisions/reads.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import cudf
from cudf.core.column import ColumnBase
from cudf.core.column_accessor import ColumnAccessor

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
