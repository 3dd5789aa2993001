"""Pack pandas partitions of plain numbers column by column, and others with pickle protocol 5."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd
from pandas.core.util.hashing import combine_hash_arrays  # type: ignore[attr-defined]

from dask_gpurt.dask_hooks.graph import concat
from dask_gpurt.device import Device, PoolFull
from dask_gpurt.device.arena import ALIGNMENT
from dask_gpurt.frames.backend import (
    BlockAllocator,
    Hashed,
    Packed,
    Part,
    Piece,
    Ranged,
    Routed,
    giving_back,
)
from dask_gpurt.frames.pickled import Chunks, Pickled, own

try:
    from pandas.api.internals import create_dataframe_from_blocks  # type: ignore[import-not-found]
except ImportError:  # not in pandas 2, whose frames are pickled
    create_dataframe_from_blocks = None

#: Rows that are hashed at a time, so that temporary arrays fit into the cache, and into memory that the
#: allocator reuses without a system call.
_HASHED_ROWS = 8192


@dataclass(frozen=True)
class _PandasRows:
    """Refer to rows of a frame by position; ``plain`` is set if it has only plain numbers."""

    frame: pd.DataFrame
    order: np.ndarray
    ignore_index: bool
    plain: Plain | None
    #: The pickled rows while there is no room for them, since pickling again would be slow.
    waiting: list[Chunks] = field(default_factory=list)

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
    ) -> list[Piece | None]:
        rows, targets = _targets(frame, column, npartitions, drop_column=drop_column)
        order = np.argsort(targets, kind="stable")  # numpy uses a radix sort for small integers
        ends = np.cumsum(sum(np.bincount(step, minlength=npartitions) for step in _steps(targets)))
        layout = PandasLayout.of(rows, ignore_index=ignore_index)
        plain = Plain(rows, layout) if layout else None
        pieces: list[Piece | None] = []
        for partitions in groups:
            spans = [(ends[p - 1] if p else 0, ends[p]) for p in partitions]
            offsets = (0, *np.cumsum([stop - start for start, stop in spans]).tolist())
            if not offsets[-1]:
                pieces.append(None)
                continue
            mine = _PandasRows(rows, _joined(order, spans), ignore_index, plain)
            pieces.append(Piece(mine, tuple(partitions), offsets))
        return pieces

    def cut(self, rows: _PandasRows, start: int, stop: int) -> _PandasRows:
        rows.waiting.clear()
        return replace(rows, order=rows.order[start:stop], waiting=[])

    def pack(self, piece: Piece, allocator: BlockAllocator) -> Packed:
        rows: _PandasRows = piece.rows
        if rows.plain is None:
            return _pickled(rows, piece.offsets, allocator)
        block = allocator.allocate(rows.plain.layout.nbytes(len(piece)))
        with giving_back(block, allocator):
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
        if isinstance(read, PandasLayout) and len({part.header for part in parts}) == 1:
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
        # Categories, labels or Arrow chunks may still be views of the buffers: copy them.
        return own(result) if any(lease() is not None for lease in leases) else result

    def fence(self) -> None:
        return None


def _pickled(rows: _PandasRows, offsets: tuple[int, ...], allocator: BlockAllocator) -> Packed:
    """Pack rows of any dtype with pickle."""
    chunks = rows.waiting.pop() if rows.waiting else Chunks(rows.taken(), offsets)
    try:
        return chunks.pack(allocator)
    except PoolFull:
        rows.waiting.append(chunks)
        raise


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
    if keys.ndim != 1 or not (is_whole(keys.dtype) and is_whole(divisions.dtype)):
        return None
    if not is_whole(np.result_type(keys.dtype, divisions.dtype)):
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


def _hashable(hashed: Hashed) -> list[np.ndarray] | None:
    """Return the key columns if Dask just hashes numbers; else None."""
    if hashed.by is None:
        return None
    names = list(hashed.by)
    dtypes = [*hashed.keys[names].dtypes, *hashed.like[names].dtypes]
    plain = all(isinstance(dtype, np.dtype) and dtype.kind in "biuf" for dtype in dtypes)
    if not plain or len(dtypes) != 2 * len(names):  # labels may be duplicated
        return None
    return [hashed.keys[name].to_numpy() for name in names]


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


# ---- frames of plain numbers, column by column ---------------------------------------------


@dataclass(frozen=True)
class PandasLayout:
    """Describe columns that are stored one after the other in a buffer.

    Attributes
    ----------
    columns, dtypes
        Labels and dtypes of the columns.
    index
        The dtype of the index, which is stored first; None if it was dropped.
    name
        The name of the index.
    """

    columns: pd.Index
    dtypes: tuple[np.dtype[Any], ...]
    index: np.dtype[Any] | None
    name: Hashable

    @classmethod
    def of(cls, frame: pd.DataFrame, *, ignore_index: bool) -> PandasLayout | None:
        """Return the layout of a frame; None unless it has only plain numbers."""
        index = frame.index
        dtypes = [*frame.dtypes, index.dtype]
        known = type(frame) is pd.DataFrame and type(index) in (pd.Index, pd.RangeIndex)
        if not (create_dataframe_from_blocks and known and len(frame.columns) and not frame.attrs):
            return None
        if not all(isinstance(dtype, np.dtype) and dtype.kind in "biufc" for dtype in dtypes):
            return None
        return cls(frame.columns, tuple(dtypes[:-1]), None if ignore_index else dtypes[-1], index.name)

    def nbytes(self, rows: int) -> int:
        """Return the bytes of a buffer for this many rows."""
        return sum(_padded(rows * dtype.itemsize) for dtype in self._all())

    def _all(self) -> list[np.dtype[Any]]:
        return [*([] if self.index is None else [self.index]), *self.dtypes]

    def views(self, buffer: np.ndarray, rows: int) -> Iterator[np.ndarray]:
        """Yield views of the index, if any, and the columns in a buffer."""
        start = 0
        for dtype in self._all():
            nbytes = rows * dtype.itemsize
            yield buffer[start : start + nbytes].view(dtype)
            start += _padded(nbytes)

    def read(self, parts: Sequence[Part], order_by: Hashable = None) -> pd.DataFrame:
        """Concatenate parts of this layout into new memory.

        The rows are sorted by ``order_by`` if that is fast and unambiguous; see :func:`order_of`.
        """
        rows = sum(part.offsets[part.index + 1] - part.offsets[part.index] for part in parts)
        index = [] if self.index is None else [np.empty(rows, self.index)]
        blocks = self._blocks(rows)
        placed = [pair for block, places in blocks for pair in zip(places, block, strict=True)]
        targets = [*index, *(column for _, column in sorted(placed, key=itemgetter(0)))]
        sources = list(zip(*map(self._rows, parts), strict=True))
        order = self._order(sources[len(index) :], order_by)
        for target, pieces in zip(targets, sources, strict=True):
            if order is None:
                np.concatenate(pieces, out=target)
            else:
                _take(np.concatenate(pieces), order, target)
        labels = pd.Index(index[0], name=self.name, copy=False) if index else pd.RangeIndex(rows)
        frame: pd.DataFrame = create_dataframe_from_blocks(blocks, labels, self.columns)
        return frame

    def _rows(self, part: Part) -> list[np.ndarray]:
        """Return views of the index, if any, and the columns of a part."""
        start, stop = part.offsets[part.index : part.index + 2]
        return [view[start:stop] for view in self.views(part.buffer, part.offsets[-1])]

    def _order(self, columns: Sequence[Sequence[np.ndarray]], by: Hashable) -> np.ndarray | None:
        """Return the sort order of a column given in pieces; None if there is none, or no such column."""
        found = [column for label, column in zip(self.columns, columns, strict=True) if label == by]
        return (
            order_of(np.concatenate(found[0]), distinct=True) if by is not None and len(found) == 1 else None
        )

    def _blocks(self, rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Allocate a block for the columns of each dtype; return it with the positions of these columns."""
        dtypes = dict.fromkeys(self.dtypes)
        places = [np.flatnonzero([other == dtype for other in self.dtypes]) for dtype in dtypes]
        return [(np.empty((len(at), rows), self.dtypes[at[0]]), at) for at in places]


class Plain:
    """Hold a frame of plain numbers to pack rows from.

    Parameters
    ----------
    frame
        A frame with this ``layout``.
    """

    def __init__(self, frame: pd.DataFrame, layout: PandasLayout):
        self.layout = layout
        self.header = pickle.dumps(layout)
        self._index = None if layout.index is None else frame.index
        self._columns = [frame.iloc[:, at].to_numpy() for at in range(len(layout.dtypes))]

    def take(self, order: np.ndarray, buffer: np.ndarray) -> None:
        """Write rows, selected by position, to a buffer."""
        views = self.layout.views(buffer, len(order))
        if isinstance(self._index, pd.RangeIndex):
            numbers = next(views)
            np.multiply(order, self._index.step, out=numbers)
            numbers += self._index.start
        elif self._index is not None:
            _take(self._index.to_numpy(), order, next(views))
        for column, view in zip(self._columns, views, strict=True):
            _take(column, order, view)


def _take(column: np.ndarray, order: np.ndarray, into: np.ndarray) -> None:
    # mode="clip" avoids the bounds check, for which numpy would write to a temporary copy first.
    np.take(column, order, out=into, mode="clip")


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


# ---- sorting of integers ---------------------------------------------------------------------


def order_of(numbers: np.ndarray, *, distinct: bool = False) -> np.ndarray | None:
    """Return the positions that sort integers in ascending order; the sort is stable.

    Each number is combined with its position into one integer of 64 bits, and these are sorted, which takes a
    third of the time of ``argsort``.

    Parameters
    ----------
    distinct
        Whether to return None if numbers are equal, so that the order is the same for every sort.

    Returns
    -------
    numpy.ndarray or None
        Positions as int64; None for other dtypes, or if the range of numbers is too wide to fit next to a
        position.
    """
    if not is_whole(numbers.dtype):
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
    if distinct and ((order[1:] >> bits) == (order[:-1] >> bits)).any():
        return None
    order &= (1 << bits) - 1
    return order


def is_whole(dtype: Any) -> bool:
    """Return whether a dtype is an integer dtype of numpy."""
    return isinstance(dtype, np.dtype) and dtype.kind in "iu"
