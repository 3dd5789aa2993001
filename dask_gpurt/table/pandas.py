"""pandas partitions, packed column by column where they are plain numbers, or else by pickle protocol 5."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from pandas.core.util.hashing import combine_hash_arrays  # type: ignore[attr-defined]

from dask_gpurt.dask_hooks.graph import concat
from dask_gpurt.device import Device, PoolFull
from dask_gpurt.table.order import is_whole, order_of
from dask_gpurt.table.pickled import Chunks, Pickled, own
from dask_gpurt.table.plain import Layout, Plain
from dask_gpurt.table.protocol import Hashed, Packed, Part, Piece, Ranged, Room, Routed

#: Rows that are hashed at a time: what comes up in between stays in the cache, and in memory
#: that the allocator does not ask the system for anew each time.
_STEP = 8192


@dataclass(frozen=True)
class _Rows:
    """Rows of a frame, by their positions; ``plain`` where it is made of plain numbers."""

    frame: pd.DataFrame
    order: np.ndarray
    ignore_index: bool
    plain: Plain | None
    #: What was pickled of them, while there is no room for it: pickling is not cheap.
    waiting: list[Chunks] = field(default_factory=list)

    def taken(self) -> pd.DataFrame:
        taken = self.frame.take(self.order)
        if self.ignore_index:
            taken.index = pd.RangeIndex(len(taken))
        return taken


class PandasTable:
    """pandas frames in host memory."""

    name = "pandas"

    def __init__(self, device: Device):
        self.device = device

    def split(
        self,
        frame: pd.DataFrame | Routed,
        column: str,
        groups: Sequence[Sequence[int]],
        npartitions: int,
        *,
        drop_column: bool,
        ignore_index: bool,
    ) -> list[Piece | None]:
        rows, targets = _targets(frame, column, npartitions, drop_column=drop_column)
        order = np.argsort(targets, kind="stable")  # small integers by radix, in their order
        ends = np.cumsum(sum(np.bincount(step, minlength=npartitions) for step in _steps(targets)))
        layout = Layout.of(rows, ignore_index=ignore_index)
        plain = Plain(rows, layout) if layout else None
        pieces: list[Piece | None] = []
        for partitions in groups:
            spans = [(ends[p - 1] if p else 0, ends[p]) for p in partitions]
            offsets = (0, *np.cumsum([stop - start for start, stop in spans]).tolist())
            if not offsets[-1]:
                pieces.append(None)
                continue
            mine = _Rows(rows, _joined(order, spans), ignore_index, plain)
            pieces.append(Piece(mine, tuple(partitions), offsets))
        return pieces

    def cut(self, rows: _Rows, start: int, stop: int) -> _Rows:
        rows.waiting.clear()
        return replace(rows, order=rows.order[start:stop], waiting=[])

    def pack(self, piece: Piece, room: Room) -> Packed:
        rows: _Rows = piece.rows
        if rows.plain is None:
            return _pickled(rows, piece.offsets, room)
        block = room.allocate(rows.plain.layout.nbytes(len(piece)))
        rows.plain.take(rows.order, block.buffer)
        return Packed(block, rows.plain.header)

    def settle(self) -> None:
        pass

    def assemble(
        self, parts: Sequence[Part], meta: pd.DataFrame, *, ignore_index: bool, order_by: Any = None
    ) -> pd.DataFrame:
        if not parts:
            return meta.copy()
        read = pickle.loads(parts[0].header)
        if isinstance(read, Layout) and len({part.header for part in parts}) == 1:
            return read.read(parts, order_by)
        frames, leases = [], []
        for part in parts:
            lease = part.buffer.view(_Lease)
            leases.append(weakref.ref(lease))
            frames.append(_opened(replace(part, buffer=lease)))
            del lease
        result: pd.DataFrame = frames[0].copy() if len(frames) == 1 else concat(frames, ignore_index)
        del frames
        if ignore_index:
            result.index = pd.RangeIndex(len(result))
        # Categories, labels or Arrow chunks may still be views; those are copied now.
        return own(result) if any(lease() is not None for lease in leases) else result

    def fence(self) -> None:
        return None


def _pickled(rows: _Rows, offsets: tuple[int, ...], room: Room) -> Packed:
    """Rows packed by pickle, whatever they are made of."""
    chunks = rows.waiting.pop() if rows.waiting else Chunks(rows.taken(), offsets)
    try:
        return chunks.pack(room)
    except PoolFull:
        rows.waiting.append(chunks)
        raise


def _targets(
    frame: pd.DataFrame | Routed, column: str, npartitions: int, *, drop_column: bool
) -> tuple[pd.DataFrame, np.ndarray]:
    """The rows to split, and the output partition of each in as few bytes as will do."""
    narrow = np.min_scalar_type(npartitions - 1)
    if isinstance(frame, Hashed):
        keys = _hashable(frame) if drop_column else None
        if keys is not None:
            return frame.frame, _hashed(keys, npartitions, narrow)
    if isinstance(frame, Ranged) and drop_column and (found := _in_ranges(frame, narrow)) is not None:
        return frame.frame, found
    rows: pd.DataFrame = frame.assign() if isinstance(frame, Routed) else frame
    targets = np.asarray(rows[column]).astype(narrow, copy=False)
    return rows.drop(columns=column) if drop_column else rows, targets


def _in_ranges(ranged: Ranged, dtype: np.dtype[Any]) -> np.ndarray | None:
    """The range of each row, where the column is whole numbers.

    To sort these and look the divisions up takes less time than to look each row up.
    """
    keys, divisions = ranged.frame[ranged.by], ranged.divisions
    if keys.ndim != 1 or not (is_whole(keys.dtype) and is_whole(divisions.dtype)):
        return None
    if not is_whole(np.result_type(keys.dtype, divisions.dtype)):
        return None  # as of int64 and uint64, which are looked up as floats
    numbers = keys.to_numpy()
    order = order_of(numbers)
    if order is None:
        return None
    starts = np.searchsorted(numbers, divisions.to_numpy()[:-1], sorter=order)
    if starts[0]:
        return None  # what lies before the first division Dask puts elsewhere
    targets = np.empty(len(order), dtype)
    targets[order] = np.repeat(np.arange(len(starts), dtype=dtype), np.diff(starts, append=len(order)))
    return targets


def _hashable(hashed: Hashed) -> list[np.ndarray] | None:
    """The key columns, where all that Dask does is to hash numbers; else None."""
    if hashed.by is None:
        return None
    names = list(hashed.by)
    dtypes = [*hashed.keys[names].dtypes, *hashed.like[names].dtypes]
    plain = all(isinstance(dtype, np.dtype) and dtype.kind in "biuf" for dtype in dtypes)
    if not plain or len(dtypes) != 2 * len(names):  # a name may stand for several columns
        return None
    return [hashed.keys[name].to_numpy() for name in names]


def _hashed(keys: list[np.ndarray], npartitions: int, dtype: np.dtype[Any]) -> np.ndarray:
    """The output partition of each row; as Dask has it, of numbers as float64: so types that differ meet."""
    targets, count = np.empty(len(keys[0]), dtype), np.uint64(npartitions)
    for into, *step in zip(_steps(targets), *map(_steps, keys), strict=True):
        arrays = (pd.util.hash_array(key.astype(np.float64)) for key in step)
        hashes = combine_hash_arrays(arrays, len(keys))
        # The remainder; numpy has a fast way to divide by one number, but none to take it.
        into[:] = hashes - hashes // count * count
    return targets


def _steps(array: np.ndarray) -> Iterator[np.ndarray]:
    """An array in views that are not too large, at least one."""
    for start in range(0, max(1, len(array)), _STEP):
        yield array[start : start + _STEP]


def _opened(part: Part) -> pd.DataFrame:
    """The rows of a part, which may be views of its buffer."""
    read: Layout | Pickled = pickle.loads(part.header)
    return read.read([part]) if isinstance(read, Layout) else read.read(part)


class _Lease(np.ndarray):
    """A view that everything read out of a packed buffer keeps alive."""


def _joined(order: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
    """The spans of ``order`` one behind the other, without a copy where they are neighbours."""
    if all(left[1] == right[0] for left, right in pairwise(spans)):
        return order[spans[0][0] : spans[-1][1]]
    return np.concatenate([order[start:stop] for start, stop in spans])
