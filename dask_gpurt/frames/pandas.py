"""Split pandas partitions, pack them column by column or with pickle, and assemble outputs.

Decisions and their figures: ``docs/decisions/shuffle.md``.
"""

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

from dask_gpurt.dask_hooks.types import concat
from dask_gpurt.device import Device, PoolFull
from dask_gpurt.frames.backend import (
    BlockAllocator,
    Hashed,
    Packed,
    Part,
    Piece,
    Ranged,
    Routed,
)
from dask_gpurt.frames.columns import Columns, PandasLayout, Selected
from dask_gpurt.frames.pickled import Chunks, Pickled, own

#: Rows that are hashed at a time, so that temporary arrays fit into the cache, and into memory that the
#: allocator reuses without a system call.
_HASHED_ROWS = 8192


@dataclass(frozen=True)
class _PandasRows:
    """Refer to rows of a frame by position; without ``columns`` they have to be pickled."""

    frame: pd.DataFrame
    order: np.ndarray
    ignore_index: bool
    columns: Columns | None
    #: The rows ready to be packed while there is no room for them, since preparing them again would be slow.
    waiting: list[Chunks | Selected] = field(default_factory=list)

    def ready(self, offsets: tuple[int, ...]) -> Chunks | Selected:
        """Prepare the rows, of output partitions that start at ``offsets``, to be packed."""
        if self.columns is not None:
            return Selected(self.columns, self.order)
        return Chunks(self.taken(), offsets)

    def taken(self) -> pd.DataFrame:
        taken = self.frame.take(self.order)
        if self.ignore_index:
            taken.index = pd.RangeIndex(len(taken))
        return taken


class PandasTable:
    """Split, pack and assemble pandas frames in host memory."""

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
        in_order: bool = False,  # in any case
    ) -> list[Piece | None]:
        rows, targets = _targets(frame, column, npartitions, drop_column=drop_column)
        order = np.argsort(targets, kind="stable")  # numpy uses a radix sort for small integers
        ends = np.cumsum(sum(np.bincount(step, minlength=npartitions) for step in _steps(targets)))
        layout = PandasLayout.of(rows, ignore_index=ignore_index)
        columns = Columns(rows, layout) if layout else None
        pieces: list[Piece | None] = []
        for partitions in groups:
            spans = [(ends[p - 1] if p else 0, ends[p]) for p in partitions]
            offsets = (0, *np.cumsum([stop - start for start, stop in spans]).tolist())
            if not offsets[-1]:
                pieces.append(None)
                continue
            mine = _PandasRows(rows, _joined(order, spans), ignore_index, columns)
            pieces.append(Piece(mine, tuple(partitions), offsets))
        return pieces

    def cut(self, rows: _PandasRows, start: int, stop: int) -> _PandasRows:
        rows.waiting.clear()
        return replace(rows, order=rows.order[start:stop], waiting=[])

    def pack(self, piece: Piece, allocator: BlockAllocator) -> Packed:
        rows: _PandasRows = piece.rows
        ready = rows.waiting.pop() if rows.waiting else rows.ready(piece.offsets)
        try:
            return ready.pack(allocator)
        except PoolFull:
            rows.waiting.append(ready)
            raise

    def settle(self) -> None:
        pass

    def assemble(self, parts: Sequence[Part], meta: pd.DataFrame, *, ignore_index: bool) -> pd.DataFrame:
        if not parts:
            return meta.copy()
        read = pickle.loads(parts[0].header)
        if isinstance(read, PandasLayout) and len({part.header for part in parts}) == 1:
            return read.read(parts)
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
        # Categories, labels or Arrow chunks may still be views of the buffers: copy them.
        return own(result) if any(lease() is not None for lease in leases) else result

    def fence(self) -> None:
        return None


def _targets(
    frame: pd.DataFrame | Routed, column: str, npartitions: int, *, drop_column: bool
) -> tuple[pd.DataFrame, np.ndarray]:
    """Return the rows to split, and their output partitions in the smallest sufficient dtype."""
    narrow = np.min_scalar_type(npartitions - 1)
    if isinstance(frame, Hashed):
        keys = _hashable(frame) if drop_column else None
        if keys is not None:
            return frame.frame, _hashed(keys, npartitions, narrow)
    if isinstance(frame, Ranged) and drop_column and (found := _in_ranges(frame, narrow)) is not None:
        return frame.frame, found
    rows: pd.DataFrame = frame.assigned() if isinstance(frame, Routed) else frame
    targets = np.asarray(rows[column]).astype(narrow, copy=False)
    return rows.drop(columns=column) if drop_column else rows, targets


def _in_ranges(ranged: Ranged, dtype: np.dtype[Any]) -> np.ndarray | None:
    """Return the range of each row if the column has integers, else None.

    Sorting the column and searching for the divisions is faster than searching for each row.
    """
    keys, divisions = ranged.frame[ranged.by], ranged.divisions
    if keys.ndim != 1 or not (_is_whole(keys.dtype) and _is_whole(divisions.dtype)):
        return None
    if not _is_whole(np.result_type(keys.dtype, divisions.dtype)):
        return None  # such as int64 and uint64, which are compared as floats
    numbers = keys.to_numpy()
    order = order_of(numbers)
    if order is None:
        return None
    starts = np.searchsorted(numbers, divisions.to_numpy()[:-1], sorter=order)
    if starts[0]:
        return None  # Dask treats rows below the first division differently
    targets = np.empty(len(order), dtype)
    targets[order] = np.repeat(np.arange(len(starts), dtype=dtype), np.diff(starts, append=len(order)))
    return targets


def order_of(numbers: np.ndarray) -> np.ndarray | None:
    """Return the positions that sort integers in ascending order; the sort is stable.

    Each number is combined with its position into one integer of 64 bits, and these are sorted, which takes a
    third of the time of ``argsort``.

    Returns positions as int64; None for other dtypes, or if the range of numbers is too wide to fit next to a
    position.
    """
    if not _is_whole(numbers.dtype):
        return None
    if not len(numbers):
        return np.empty(0, np.int64)
    lowest = numbers.min()
    bits = (len(numbers) - 1).bit_length()
    if (int(numbers.max()) - int(lowest)).bit_length() + bits > 63:
        return None
    order = numbers.astype(np.int64)  # for uint64 modulo 2**64, as are the differences
    order -= lowest.astype(np.int64)
    order <<= bits
    order |= np.arange(len(order))
    order.sort()
    order &= (1 << bits) - 1
    return order


def _is_whole(dtype: Any) -> bool:
    """Return whether a dtype is an integer dtype of numpy."""
    return isinstance(dtype, np.dtype) and dtype.kind in "iu"


def _hashable(hashed: Hashed) -> list[np.ndarray] | None:
    """Return the key columns if Dask just hashes numbers; else None."""
    if not hashed.by:  # the index, or distinct rows of a frame without columns
        return None
    # One by one, as pandas takes ten times as long to select a list of columns. Labels may be duplicated.
    keys = [hashed.keys[name] for name in hashed.by]
    compared = [*keys, *(hashed.like[name] for name in hashed.by)]
    plain = all(each.ndim == 1 and _is_number(each.dtype) for each in compared)
    return [key.to_numpy() for key in keys] if plain else None


def _is_number(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and dtype.kind in "biuf"


def _hashed(keys: list[np.ndarray], npartitions: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Return the output partition of each row.

    As in Dask, numbers are hashed as float64, so that equal keys of different dtypes have the same hash.
    """
    targets, count = np.empty(len(keys[0]), dtype), np.uint64(npartitions)
    for into, *step in zip(_steps(targets), *map(_steps, keys), strict=True):
        arrays = (pd.util.hash_array(key.astype(np.float64)) for key in step)
        hashes = combine_hash_arrays(arrays, len(keys))
        # The remainder. numpy has a fast path for division by a scalar, but not for the remainder.
        into[:] = hashes - hashes // count * count
    return targets


def _steps(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield views of at most ``_HASHED_ROWS`` elements of an array, at least one."""
    for start in range(0, max(1, len(array)), _HASHED_ROWS):
        yield array[start : start + _HASHED_ROWS]


def _opened(part: Part) -> pd.DataFrame:
    """Return the rows of a part, which may be views of its buffer."""
    read: PandasLayout | Pickled = pickle.loads(part.header)
    return read.read([part]) if isinstance(read, PandasLayout) else read.read(part)


class _Lease(np.ndarray):
    """View a packed buffer; everything that is read from it keeps this view alive."""


def _joined(order: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
    """Concatenate spans of ``order``, without a copy if they are adjacent."""
    if all(left[1] == right[0] for left, right in pairwise(spans)):
        return order[spans[0][0] : spans[-1][1]]
    return np.concatenate([order[start:stop] for start, stop in spans])
