"""What owns the memory of cudf's objects, found without touching the memory.

The columns are walked: to serialise an object would do as well, but cudf copies slices first, and then
what owns the copy is told. A spillable buffer is known by its owner, which stays the same wherever the
bytes lie; its pointer is not asked for, which would bring it back to the device, for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def owners(value: Any) -> Iterator[tuple[int, int]]:
    """Identity and bytes of each allocation that a frame, series or index of cudf is a view of.

    Parameters
    ----------
    value
        A ``cudf`` object with columns. An index that is only a range has none.
    """
    if (index := getattr(value, "index", None)) is not None:
        yield from owners(index)
    if type(value).__name__ != "RangeIndex":  # whose columns would be made by asking for them
        for column in value._columns:
            yield from _of_column(column)


def _of_column(column: Any) -> Iterator[tuple[int, int]]:
    yield from _of_plc(column.plc_column)
    if (categories := getattr(column.dtype, "_categories", None)) is not None:
        yield from _of_column(categories)


def _of_plc(column: Any) -> Iterator[tuple[int, int]]:
    for buffer in (column.data(), column.null_mask()):
        if buffer is not None:
            yield _root(buffer.owner)
    for child in column.children():
        yield from _of_plc(child)


def _root(owner: Any) -> tuple[int, int]:
    return id(owner) if hasattr(owner, "is_spilled") else owner.ptr, owner.size
