"""Store the columns of a pandas frame one after the other, and read them from many buffers at once.

This is for numbers, dates and strings of Arrow; frames with other columns are pickled. A buffer consists of

- two int64 for each column of strings: the bytes of its characters, and the number of missing strings;
- the index, unless it was dropped;
- the numbers and dates of each such column;
- for each column of strings the start of each string, and the end of the last one, as int64; a bitmap of the
  strings that are there, unless all are; and the characters.

Each of these is aligned.

Decisions and their figures: ``docs/decisions/shuffle.md``.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from dask_gpurt.device.pool import ALIGNMENT
from dask_gpurt.frames.backend import BlockAllocator, Packed, Part, giving_back

try:
    from pandas.api.internals import create_dataframe_from_blocks  # type: ignore[import-not-found]
except ImportError:  # not in pandas 2, whose frames are pickled
    create_dataframe_from_blocks = None


@dataclass(frozen=True)
class Text:
    """Describe a column of Arrow strings.

    ``marks_missing``: whether missing strings are ``pandas.NA``; they are NaN otherwise.
    """

    marks_missing: bool

    @property
    def dtype(self) -> Any:
        """The dtype of pandas."""
        return pd.StringDtype("pyarrow", na_value=pd.NA if self.marks_missing else np.nan)


@dataclass(frozen=True)
class PandasLayout:
    """Describe the columns in a buffer.

    ``columns``: labels of the columns.
    ``kinds``: for each column a dtype of numpy, or :class:`Text`.
    ``index``: the dtype of the index; None if it was dropped.
    ``name``: the name of the index.
    """

    columns: pd.Index
    kinds: tuple[np.dtype[Any] | Text, ...]
    index: np.dtype[Any] | None
    name: Hashable

    @classmethod
    def of(cls, frame: pd.DataFrame, *, ignore_index: bool) -> PandasLayout | None:
        """Return the layout of a frame; None if it has to be pickled."""
        index = frame.index
        known = type(frame) is pd.DataFrame and type(index) in (pd.Index, pd.RangeIndex)
        if not (create_dataframe_from_blocks and known and len(frame.columns) and not frame.attrs):
            return None
        kinds = [kind for kind in map(_kind, frame.dtypes) if kind is not None]
        labels: Any = index.dtype
        numbered = isinstance(labels, np.dtype) and labels.kind in "biufc"
        if len(kinds) < len(frame.columns) or not numbered:
            return None
        return cls(frame.columns, tuple(kinds), None if ignore_index else labels, index.name)

    def texts(self) -> list[tuple[int, Text]]:
        """Return the columns of strings, by position."""
        return [(at, kind) for at, kind in enumerate(self.kinds) if isinstance(kind, Text)]

    def fixed(self) -> list[tuple[int, np.dtype[Any]]]:
        """Return the columns of numbers and dates, by position."""
        return [(at, kind) for at, kind in enumerate(self.kinds) if not isinstance(kind, Text)]

    def nbytes(self, rows: int, texts: Sequence[Strings]) -> int:
        """Return the bytes of a buffer for this many rows, of which ``texts`` are the strings."""
        fixed = sum(_padded(rows * dtype.itemsize) for dtype in self._dtypes())
        return self._table_nbytes() + fixed + sum(text.nbytes for text in texts)

    def _table_nbytes(self) -> int:
        return _padded(16 * len(self.texts()))

    def _dtypes(self) -> list[np.dtype[Any]]:
        """Return the dtypes of the index, if any, and of numbers and dates."""
        columns = [dtype for _, dtype in self.fixed()]
        return columns if self.index is None else [self.index, *columns]

    # ---- writing ---------------------------------------------------------------------

    def views(self, buffer: np.ndarray, rows: int) -> Iterator[np.ndarray]:
        """Yield views of the index, if any, and of numbers and dates in a buffer."""
        start = self._table_nbytes()
        for dtype in self._dtypes():
            nbytes = rows * dtype.itemsize
            yield buffer[start : start + nbytes].view(dtype)
            start += _padded(nbytes)

    def write_texts(self, texts: Sequence[Strings], buffer: np.ndarray, rows: int) -> None:
        """Write strings behind the other columns of a buffer, and their sizes to its begin."""
        table = buffer[: 16 * len(texts)].view(np.int64)
        start = self.nbytes(rows, ())
        for at, text in enumerate(texts):
            table[2 * at : 2 * at + 2] = len(text.characters), text.missing
            for part in (text.edges.view(np.uint8), text.present, text.characters):
                buffer[start : start + len(part)] = part
                start += _padded(len(part))

    # ---- reading ---------------------------------------------------------------------

    def read(self, parts: Sequence[Part]) -> pd.DataFrame:
        """Concatenate parts of this layout into new memory."""
        rows = sum(part.offsets[part.index + 1] - part.offsets[part.index] for part in parts)
        index = [] if self.index is None else [np.empty(rows, self.index)]
        arrays = self._blocks(rows)
        placed = [pair for block, at in arrays for pair in zip(at, np.atleast_2d(block), strict=True)]
        targets = [*index, *(column for _, column in sorted(placed, key=itemgetter(0)))]
        for target, pieces in zip(targets, zip(*map(self._rows, parts), strict=True), strict=True):
            np.concatenate(pieces, out=target)
        blocks = [(block if block.ndim == 2 else pd.array(block, copy=False), at) for block, at in arrays]
        labels = pd.Index(index[0], name=self.name, copy=False) if index else pd.RangeIndex(rows)
        frame: pd.DataFrame = create_dataframe_from_blocks(
            [*blocks, *self._read_texts(parts)], labels, self.columns
        )
        return frame

    def _rows(self, part: Part) -> list[np.ndarray]:
        """Return views of the index, if any, and of numbers and dates of a part."""
        start, stop = part.offsets[part.index : part.index + 2]
        return [view[start:stop] for view in self.views(part.buffer, part.offsets[-1])]

    def _blocks(self, rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Allocate memory for numbers and dates; return each array with the positions of its columns.

        Numbers of the same dtype share an array. pandas wraps dates, one column at a time.
        """
        places: dict[Any, list[int]] = {}
        for at, kind in self.fixed():
            places.setdefault(at if _is_date(kind) else kind, []).append(at)
        blocks: list[tuple[np.ndarray, np.ndarray]] = []
        for positions in places.values():
            dtype: Any = self.kinds[positions[0]]
            shape = (rows,) if _is_date(dtype) else (len(positions), rows)
            blocks.append((np.empty(shape, dtype), np.array(positions)))
        return blocks

    def _read_texts(
        self, parts: Sequence[Part]
    ) -> Iterator[tuple[pd.api.extensions.ExtensionArray, np.ndarray]]:
        """Yield each column of strings in new memory, with its position."""
        texts = self.texts()
        if not texts:
            return
        pieces = zip(*(self._text_views(part, len(texts)) for part in parts), strict=True)
        for (at, kind), views in zip(texts, pieces, strict=True):
            array = pa.concat_arrays(views)  # which copies a single one, too
            yield kind.dtype.__from_arrow__(array), np.array([at])

    def _text_views(self, part: Part, count: int) -> list[pa.LargeStringArray]:
        """Return views of the strings of a part, by column."""
        rows, (first, stop) = part.offsets[-1], part.offsets[part.index : part.index + 2]
        memory, start = pa.py_buffer(part.buffer), self.nbytes(rows, ())

        def following(nbytes: int) -> pa.Buffer:
            nonlocal start
            found = memory.slice(start, nbytes)
            start += _padded(nbytes)
            return found

        views = []
        for characters, missing in part.buffer[: 16 * count].view(np.int64).reshape(count, 2).tolist():
            edges = following(8 * (rows + 1))
            present = following(_bitmap_nbytes(rows)) if missing else None
            unknown = -1 if missing else 0  # how many are missing among the rows of the part
            views.append(
                pa.LargeStringArray.from_buffers(
                    stop - first, edges, following(characters), present, unknown, first
                )
            )
        return views


class Strings:
    """Hold strings as they are stored in a buffer.

    ``array``: the strings.
    ``edges``: the start of each string among the characters, and the end of the last one.
    ``present``: a bitmap of the strings that are not missing; empty if none is.
    ``characters``: the characters, in UTF-8.
    ``missing``: the number of missing strings.
    """

    def __init__(self, array: pa.LargeStringArray):
        if array.offset:
            array = pa.concat_arrays([array])
        present, edges, characters = array.buffers()
        rows, self.missing = len(array), array.null_count
        self.edges = np.frombuffer(edges, np.int64, rows + 1) if rows else np.zeros(1, np.int64)
        first, stop = self.edges[[0, -1]].tolist()
        if first:
            self.edges = self.edges - first
        self.present = _bytes(present, 0, _bitmap_nbytes(rows)) if self.missing else _bytes(None, 0, 0)
        self.characters = _bytes(characters, first, stop)

    @property
    def nbytes(self) -> int:
        """Bytes in a buffer."""
        return sum(_padded(part.nbytes) for part in (self.edges, self.present, self.characters))


class Columns:
    """Hold the columns of a frame to write rows from.

    ``frame``: a frame with this ``layout``.
    """

    def __init__(self, frame: pd.DataFrame, layout: PandasLayout):
        self.layout = layout
        self.header = pickle.dumps(layout)
        self._index = None if layout.index is None else frame.index
        self._fixed = [frame.iloc[:, at].to_numpy() for at, _ in layout.fixed()]
        self._texts = [_whole(frame.iloc[:, at]) for at, _ in layout.texts()]

    def texts(self, order: np.ndarray) -> list[Strings]:
        """Return the strings of rows, selected by position, by column."""
        positions = pa.array(order)
        return [Strings(text.take(positions)) for text in self._texts]

    def write(self, order: np.ndarray, texts: Sequence[Strings], buffer: np.ndarray) -> None:
        """Write rows, selected by position, to a buffer; ``texts`` are their strings."""
        views = self.layout.views(buffer, len(order))
        if isinstance(self._index, pd.RangeIndex):
            numbers = next(views)
            np.multiply(order, self._index.step, out=numbers)
            numbers += self._index.start
        elif self._index is not None:
            take(self._index.to_numpy(), order, next(views))
        for column, view in zip(self._fixed, views, strict=True):
            take(column, order, view)
        self.layout.write_texts(texts, buffer, len(order))


class Selected:
    """Hold rows of a frame, selected by position, ready to be packed.

    Their strings are taken first, since the size of the buffer depends on them.
    """

    def __init__(self, columns: Columns, order: np.ndarray):
        self._columns, self._order = columns, order
        self._texts = columns.texts(order)

    def pack(self, allocator: BlockAllocator) -> Packed:
        """Write the rows to one block; raise PoolFull if there is no room."""
        columns = self._columns
        block = allocator.allocate(columns.layout.nbytes(len(self._order), self._texts))
        with giving_back(block, allocator):
            columns.write(self._order, self._texts, block.buffer)
        return Packed(block, columns.header)


def _kind(dtype: Any) -> np.dtype[Any] | Text | None:
    """Return how a column is stored; None if it can not be.

    A new dtype is returned for each column: columns that share one would be pickled otherwise than those
    that do not, and the headers of equal layouts would differ.
    """
    if isinstance(dtype, np.dtype) and dtype.kind in "biufcmM":
        return np.dtype(dtype.str)
    if isinstance(dtype, pd.StringDtype) and dtype.storage == "pyarrow":
        return Text(dtype.na_value is pd.NA)
    return None


def _is_date(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is of points in time, or of durations."""
    return dtype.kind in "mM"


def _whole(column: pd.Series) -> pa.LargeStringArray:
    """Return the strings of a column in one piece."""
    found = pa.array(column.array)
    if isinstance(found, pa.ChunkedArray):
        found = found.chunk(0) if found.num_chunks == 1 else found.combine_chunks()
    return found.cast(pa.large_string())


def _bytes(buffer: pa.Buffer | None, start: int, stop: int) -> np.ndarray:
    """Return a view of bytes, of which there may be none."""
    if buffer is None or start == stop:
        return np.empty(0, np.uint8)
    return np.frombuffer(buffer, np.uint8)[start:stop]


def _bitmap_nbytes(rows: int) -> int:
    return -(-rows // 8)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def take(column: np.ndarray, order: np.ndarray, into: np.ndarray) -> None:
    """Copy elements, selected by position, into an array."""
    # mode="clip" avoids the bounds check, for which numpy would write to a temporary copy first.
    np.take(column, order, out=into, mode="clip")
