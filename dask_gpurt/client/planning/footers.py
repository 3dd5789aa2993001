"""Read what the footers of local Parquet files tell, each as the file is at that moment.

Arrow's datasets keep the first footer that they have read of a file. Here a footer is kept only as long as
what the operating system tells of the file stays the same. That includes the time of its last change, which
no program can set: a file of the same size and time of modification may be another one. Only a file that is
written in place twice within a tick of the kernel's clock, at most 10 ms, may look the same.
"""

from __future__ import annotations

import datetime
import hashlib
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from dask_gpurt.client.planning.packed import LRU

#: What tells whether a file is the same: device and inode, size, and times of modification and change.
FileState = tuple[int, int, int, int, int]
#: The least and the largest value of a column; nothing if there are no rows.
Range = tuple[int, int] | tuple[()]
#: The same of integers, days or times.
Bounds = tuple[Any, Any] | tuple[()]

#: The type of a column in Arrow, and the dtype that it had in the frame of pandas that was written.
ColumnType = tuple[str, str | None]

#: The least bytes of a value in a dictionary.
BYTES_OF_AN_ENTRY = 8
#: The most footers that a process keeps.
FOOTERS_LIMIT = 1_024
#: The most folders of whose files it keeps a schema.
FOLDERS_LIMIT = 64


class ChangingFileError(OSError):
    """A file is being written, or is no Parquet file."""


def state_of(path: str) -> FileState:
    """Return the state of a file.

    Raises OSError if there is no such file.
    """
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _state_or_none(path: str) -> FileState | None:
    try:
        return state_of(path)
    except OSError:
        return None


class FilesSeen(NamedTuple):
    """Tell whether any of some files has changed since they were looked at.

    ``paths``: the files.
    ``digest``: the digest of their states.
    """

    paths: tuple[str, ...]
    digest: bytes

    @classmethod
    def now(cls, paths: Iterable[str]) -> FilesSeen:
        """Look at files. One that is missing has a state, too."""
        named = tuple(paths)
        states = repr(list(map(_state_or_none, named))).encode()
        return cls(named, hashlib.blake2b(states, digest_size=16).digest())

    def are_the_same(self) -> bool:
        """Return whether the files are as they were."""
        return FilesSeen.now(self.paths).digest == self.digest


class Column(NamedTuple):
    """Hold what a footer says of a column of some rows: their number, and the bytes before compression."""

    rows: int
    encoded: int
    has_fixed_width: bool


class Values(NamedTuple):
    """Estimate what values a column of some rows has.

    ``rows``: the number of rows.
    ``distinct``: about how many values differ.
    ``low``, ``high``: the least and the largest number, or time in nanoseconds; None if unknown.
    ``width``: the bytes of a value in memory.
    """

    rows: float
    distinct: float
    low: float | None
    high: float | None
    width: float


class _Leaf(NamedTuple):
    """Describe a column of primitive values as which a column, or a part of a nested one, is stored.

    In pandas the values are an array, for a column or for each list, or single objects in a dictionary.
    """

    position: int
    type: pa.DataType
    is_array: bool
    is_nested: bool


class _Schema(NamedTuple):
    """Describe the columns of a file, which are the same in most files of a folder.

    ``names``: all names, in order.
    ``types``: the type of each column whose name no other column has.
    ``leaves``: the leaves of each of these; none if they are not known.
    """

    names: list[str]
    types: dict[str, ColumnType]
    leaves: dict[str, tuple[_Leaf, ...]]


class Footer:
    """Hold the footer of a file. Created by :func:`footer_of`.

    Columns are found by the order in which the schema lists their leaves. The paths of leaves do not tell
    them apart: ``a.id`` is the path of a column of that name, and of the field ``id`` of a column ``a``.

    ``state``: the state of the file.
    ``rows``: the number of its rows.
    """

    def __init__(self, state: FileState, metadata: pq.FileMetaData, schema: _Schema):
        self.state = state
        self._metadata, self.rows = metadata, int(metadata.num_rows)
        self._names, self._types, self._leaves = schema
        self._values: dict[Any, Values | None] = {}

    def type_of(self, column: Any) -> ColumnType | None:
        """Return the type of a column; None if the file has no such column, or several."""
        return self._types.get(column)

    def sizes_of(self, column: Any) -> list[Column] | None:
        """Return what is known of the size of a column, by leaf; None if nothing is.

        A column that the file does not have has nulls there.
        """
        if not self._leaves or not isinstance(column, str):
            return None
        if column not in self._names:
            return [Column(self._metadata.num_rows, 0, has_fixed_width=True)]
        if column not in self._leaves:
            return None
        return [
            Column(max(rows, chunk.num_values), chunk.total_uncompressed_size, _has_fixed_width(chunk))
            for leaf in self._leaves[column]
            for rows, chunk in self._chunks(leaf)
        ]

    def has_one_dtype(self, column: Any) -> bool:
        """Return whether the dtype of a column in pandas follows from its type, and that of lists in it.

        Integers with nulls are floats in all rows that are read together, and booleans are objects.
        """
        leaves = self._leaves.get(column)
        if leaves is None:
            return False
        return not any(leaf.is_array and _is_exact(leaf.type) and self._has_nulls(leaf) for leaf in leaves)

    def has_nulls(self, column: Any) -> bool:
        """Return whether a column has nulls, or may have."""
        leaves = self._leaves.get(column)
        return leaves is None or any(leaf.is_nested or self._has_nulls(leaf) for leaf in leaves)

    def range_of(self, column: Any) -> Range | None:
        """Return the range of a column of integers without nulls; None if it is another, or unknown."""
        leaf = self._only_leaf(column)
        if leaf is None or not pa.types.is_signed_integer(leaf.type):
            return None
        return _span(self._limits(leaf, with_nulls=False))

    def bounds_of(self, column: Any) -> Bounds | None:
        """Return the range of a column of integers without nulls, or of days or times; None if unknown."""
        if (leaf := self._only_leaf(column)) is None:
            return None
        is_time = pa.types.is_timestamp(leaf.type) and leaf.type.tz is None
        if not is_time and not pa.types.is_date32(leaf.type):
            return self.range_of(column)
        found = _span(self._limits(leaf, with_nulls=True))
        return found and (pd.Timestamp(found[0]), pd.Timestamp(found[1]))

    def _only_leaf(self, column: Any) -> _Leaf | None:
        """Return the leaf of a column of primitive values; None for any other."""
        leaf, *others = self._leaves.get(column, (None,))
        return None if leaf is None or others or leaf.is_nested else leaf

    def _limits(self, leaf: _Leaf, *, with_nulls: bool) -> list[tuple[Any, Any]] | None:
        """Return the least and the largest value of each chunk that has any; None if one is not known."""
        found: list[tuple[Any, Any]] = []
        for rows, chunk in self._chunks(leaf):
            facts = chunk.statistics
            if not rows:
                continue
            if facts is None or not facts.has_null_count or (facts.null_count and not with_nulls):
                return None
            if facts.null_count < rows:
                if not facts.has_min_max:
                    return None
                found.append((facts.min, facts.max))
        return found

    def values_of(self, column: Any) -> Values | None:
        """Estimate the values of a column; None if nothing is known of it.

        Columns with few values are stored as numbers of these in a dictionary.
        """
        if column not in self._values:
            self._values[column] = self._estimated(column)
        return self._values[column]

    def _estimated(self, column: Any) -> Values | None:
        if (leaf := self._only_leaf(column)) is None:
            return None
        chunks = [(rows, chunk) for rows, chunk in self._chunks(leaf) if rows]
        rows = sum(count for count, _ in chunks)
        encoded = sum(chunk.total_uncompressed_size for _, chunk in chunks)
        fixed = all(_has_fixed_width(chunk) for _, chunk in chunks)
        low, high = _bounds(chunk.statistics for _, chunk in chunks)
        distinct = min(rows, _entries(rows, encoded))
        if pa.types.is_integer(leaf.type) and low is not None and high is not None:
            distinct = min(distinct, high - low + 1)
        return Values(rows, distinct, low, high, 8 if fixed else max(16, encoded / max(rows, 1)))

    def _has_nulls(self, leaf: _Leaf) -> bool:
        found = ((rows, chunk.statistics) for rows, chunk in self._chunks(leaf))
        return any(
            rows and (facts is None or not facts.has_null_count or bool(facts.null_count))
            for rows, facts in found
        )

    def _chunks(self, leaf: _Leaf) -> Iterator[tuple[int, Any]]:
        """Yield the chunks of a leaf, each with its number of rows."""
        for at in range(self._metadata.num_row_groups):
            group = self._metadata.row_group(at)
            yield group.num_rows, group.column(leaf.position)


def footer_of(path: str) -> Footer:
    """Return the footer of a file as it is now.

    Raises OSError if there is no such file, or it is being written.
    """
    state = state_of(path)
    kept = _KEPT.get(path)
    if kept is not None and kept.state == state:
        return kept
    try:
        metadata = pq.read_metadata(path)
    except pa.ArrowInvalid as error:
        raise ChangingFileError(f"{path}: {error}") from error
    if state_of(path) != state:
        raise ChangingFileError(f"{path} has changed while its footer was read")
    footer = Footer(state, metadata, _schema_of(path, metadata))
    _KEPT.put(path, footer)
    return footer


#: The footers that have been read last, by file.
_KEPT: LRU[Footer] = LRU(FOOTERS_LIMIT)
#: By folder, a schema as it is stored, what else its file says of it, and its description.
_SCHEMAS: LRU[tuple[Any, Any, _Schema]] = LRU(FOLDERS_LIMIT)


def _schema_of(path: str, metadata: pq.FileMetaData) -> _Schema:
    folder, stored, notes = os.path.dirname(path), metadata.schema, metadata.metadata
    known = _SCHEMAS.get(folder)
    if known is not None and known[0].equals(stored) and known[1] == notes:
        return known[2]
    schema = stored.to_arrow_schema()
    unique = [each for each in schema if schema.names.count(each.name) == 1]
    in_pandas = _dtypes_in_pandas(schema)
    types = {each.name: (str(each.type), in_pandas.get(each.name)) for each in unique}
    found = _Schema(schema.names, types, _leaves_of(schema, metadata))
    _SCHEMAS.put(folder, (stored, notes, found))
    return found


def _span(limits: list[tuple[Any, Any]] | None) -> Bounds | None:
    """Return the least and the largest value of all chunks; nothing if no chunk has values."""
    if not limits:
        return None if limits is None else ()
    lows, highs = zip(*limits, strict=True)
    return min(lows), max(highs)


def _entries(rows: int, encoded: int) -> float:
    """Return how many values a dictionary has with which rows take that many bytes: each has bits for one."""
    bits = 0
    while bits < 64 and (BYTES_OF_AN_ENTRY << bits) + rows * bits / 8 < encoded:
        bits += 1
    return float(1 << bits)


def _bounds(statistics: Iterable[Any]) -> tuple[float | None, float | None]:
    """Return the least and the largest number or time of some chunks; None if they are not known."""
    known = list(statistics)
    if not all(facts is not None and facts.has_min_max for facts in known):
        return None, None
    found = [(number_of(facts.min), number_of(facts.max)) for facts in known]
    low = [least for least, _ in found if least is not None]
    high = [most for _, most in found if most is not None]
    return (min(low), max(high)) if low and len(low) == len(high) == len(found) else (None, None)


def number_of(value: Any) -> float | None:
    """Return a number, or a time in nanoseconds; None for anything else."""
    if isinstance(value, (int, float)):
        return float(value)
    return float(pd.Timestamp(value).value) if isinstance(value, (datetime.date, np.datetime64)) else None


def _leaves_of(schema: pa.Schema, metadata: pq.FileMetaData) -> dict[str, tuple[_Leaf, ...]]:
    """Return the leaves of each column whose name no other column has; none if they are not known.

    They are stored depth first, in the order of the schema.
    """
    found: dict[str, tuple[_Leaf, ...]] = {}
    position = 0
    for field in schema:
        kinds = list(_leaf_types(field.type))
        is_nested = pa.types.is_nested(field.type)
        found[field.name] = tuple(_Leaf(position + at, *kind, is_nested) for at, kind in enumerate(kinds))
        position += len(kinds)
    if position != metadata.num_columns:
        return {}
    return {name: leaves for name, leaves in found.items() if schema.names.count(name) == 1}


def _leaf_types(kind: pa.DataType, is_array: bool = True) -> Iterator[tuple[pa.DataType, bool]]:
    """Yield the types of the leaves of a type, each with whether it is an array in pandas."""
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if not pa.types.is_nested(kind):
        yield kind, is_array
        return
    for at in range(kind.num_fields):
        yield from _leaf_types(kind.field(at).type, _is_list(kind))


def _is_list(kind: pa.DataType) -> bool:
    return any(test(kind) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def _is_exact(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def _has_fixed_width(chunk: Any) -> bool:
    return chunk.physical_type not in ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")


def _dtypes_in_pandas(schema: pa.Schema) -> dict[str, str]:
    """Return the dtypes that pandas gives columns as it reads the file, as far as it has noted them there."""
    found = schema.pandas_metadata or {}
    return {each.get("field_name"): each.get("numpy_type") for each in found.get("columns", ())}
