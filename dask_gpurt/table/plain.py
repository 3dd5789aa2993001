"""pandas frames of plain numbers, column by column straight into packed buffers and out of them.

Nothing is pickled but the names, and each number is copied once on either side.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd

from dask_gpurt.device.arena import ALIGNMENT
from dask_gpurt.table.order import order_of
from dask_gpurt.table.protocol import Part

try:
    from pandas.api.internals import create_dataframe_from_blocks  # type: ignore[import-not-found]
except ImportError:  # pandas 2 has no such thing: its frames are pickled
    create_dataframe_from_blocks = None


@dataclass(frozen=True)
class Layout:
    """What columns lie one behind the other in a buffer.

    Attributes
    ----------
    columns, dtypes
        Labels and dtypes of the columns.
    index
        The dtype of the index, which comes first; None where it was left behind.
    name
        Of the index.
    """

    columns: pd.Index
    dtypes: tuple[np.dtype[Any], ...]
    index: np.dtype[Any] | None
    name: Hashable

    @classmethod
    def of(cls, frame: pd.DataFrame, *, ignore_index: bool) -> Layout | None:
        """That of a frame; None where it is not made of plain numbers."""
        index = frame.index
        dtypes = [*frame.dtypes, index.dtype]
        known = type(frame) is pd.DataFrame and type(index) in (pd.Index, pd.RangeIndex)
        if not (create_dataframe_from_blocks and known and len(frame.columns) and not frame.attrs):
            return None
        if not all(isinstance(dtype, np.dtype) and dtype.kind in "biufc" for dtype in dtypes):
            return None
        return cls(frame.columns, tuple(dtypes[:-1]), None if ignore_index else dtypes[-1], index.name)

    def nbytes(self, rows: int) -> int:
        """Bytes of a buffer for so many rows."""
        return sum(_padded(rows * dtype.itemsize) for dtype in self._all())

    def _all(self) -> list[np.dtype[Any]]:
        return [*([] if self.index is None else [self.index]), *self.dtypes]

    def views(self, buffer: np.ndarray, rows: int) -> Iterator[np.ndarray]:
        """The index, if it is there, and the columns in a buffer."""
        start = 0
        for dtype in self._all():
            nbytes = rows * dtype.itemsize
            yield buffer[start : start + nbytes].view(dtype)
            start += _padded(nbytes)

    def read(self, parts: Sequence[Part], order_by: Hashable = None) -> pd.DataFrame:
        """Parts of this layout one behind the other, in memory of its own.

        In the order of a column, where that is known at once, and is the same whoever sorts.
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
        """The index, if it is there, and the columns of a part."""
        start, stop = part.offsets[part.index : part.index + 2]
        return [view[start:stop] for view in self.views(part.buffer, part.offsets[-1])]

    def _order(self, columns: Sequence[Sequence[np.ndarray]], by: Hashable) -> np.ndarray | None:
        """The order of a column, in pieces; None if it is not to be told, or there is no such column."""
        found = [column for label, column in zip(self.columns, columns, strict=True) if label == by]
        return (
            order_of(np.concatenate(found[0]), distinct=True) if by is not None and len(found) == 1 else None
        )

    def _blocks(self, rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Memory for the columns of each dtype, and which columns these are."""
        dtypes = dict.fromkeys(self.dtypes)
        places = [np.flatnonzero([other == dtype for other in self.dtypes]) for dtype in dtypes]
        return [(np.empty((len(at), rows), self.dtypes[at[0]]), at) for at in places]


class Plain:
    """A frame of plain numbers whose rows are to be packed.

    Parameters
    ----------
    frame
        It has this ``layout``.
    """

    def __init__(self, frame: pd.DataFrame, layout: Layout):
        self.layout = layout
        self.header = pickle.dumps(layout)
        self._index = None if layout.index is None else frame.index
        self._columns = [frame.iloc[:, at].to_numpy() for at in range(len(layout.dtypes))]

    def take(self, order: np.ndarray, buffer: np.ndarray) -> None:
        """Write some rows into a buffer of their size."""
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
    # To clip is to check nothing: with checks numpy would write to a copy first.
    np.take(column, order, out=into, mode="clip")


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
