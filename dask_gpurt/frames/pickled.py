"""Pack pandas frames of any dtypes so that each output partition can be read separately.

Arrays of fixed width are stored raw, with pickle protocol 5, and read as views. Python objects are pickled
separately for each output partition, so that reading one does not create the objects of the others. A buffer
consists of

- a table of the offsets of the following chunks, as pairs of int64;
- a pickle of the arrays without Python objects, except for the memory of large ones;
- a pickle of the frame without its arrays: labels, dtypes, and the places of arrays;
- the memory of each large array, aligned;
- for each output partition a pickle of its Python objects, empty if the frame has none.

The header has only the number of large arrays, so that its size does not depend on the data.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from distributed.protocol import pickle as dask_pickle

from dask_gpurt.device.pool import ALIGNMENT
from dask_gpurt.frames.backend import BlockAllocator, Packed, Part, giving_back

#: Arrays of fewer bytes, typically labels, stay in the pickle.
_INLINE_BYTES = 4096
#: Indices of chunks: the pickle of the arrays, the pickle of the frame around them, the first large array.
_WHOLE, _AROUND, _ARRAYS = 0, 1, 2


@dataclass(frozen=True)
class Pickled:
    """Describe a packed buffer: the content of its header.

    ``arrays``: the number of arrays with a chunk of their own.
    """

    arrays: int

    def read(self, part: Part) -> pd.DataFrame:
        """Return the rows of a part. Everything except Python objects may be views of its buffer."""
        first = _ARRAYS + self.arrays
        chunks = _Chunks(part.buffer, first + len(part.offsets) - 1)
        objects = chunks[first + part.index]
        if not len(chunks[_AROUND]):
            frame: pd.DataFrame = pickle.loads(objects)
            return frame
        start, stop = part.offsets[part.index : part.index + 2]
        arrays = pickle.loads(chunks[_WHOLE], buffers=[chunks[at] for at in range(_ARRAYS, first)])
        found = [_between(array, start, stop) for array in arrays]
        if len(objects):
            found += pickle.loads(objects)
        return _loads_around(chunks[_AROUND], found)


class _Chunks:
    """Read the chunks in a packed buffer."""

    def __init__(self, buffer: np.ndarray, count: int):
        self._buffer = buffer
        self._edges = buffer[: 16 * count].view(np.int64)

    def __getitem__(self, at: int) -> Any:
        start, stop = self._edges[2 * at : 2 * at + 2].tolist()
        return self._buffer[start:stop]


class Chunks:
    """Hold serialised rows of a frame, ready to be packed.

    ``rows``: the rows, ordered by output partition.
    ``offsets``: the row at which each output partition starts, followed by the number of rows.
    """

    def __init__(self, rows: pd.DataFrame, offsets: Sequence[int]):
        values = _values(rows)
        whole = [each for each in values if not _has_objects(each)]
        objects = [each for each in values if _has_objects(each)]
        arrays: list[memoryview] = []
        around = _dumps_around(rows, [*whole, *objects])
        if around:
            front = [_dumps_arrays(whole, arrays), around]
            of_parts = ([_between(each, a, b) for each in objects] for a, b in pairwise(offsets))
            parts = [dumps(each) if each else b"" for each in of_parts]
        else:
            front = [b"", b""]
            parts = [dumps(rows.iloc[a:b]) for a, b in pairwise(offsets)]
        self._header = pickle.dumps(Pickled(len(arrays)))
        self._chunks: list[Any] = [*front, *arrays, *parts]
        sizes = [len(chunk) for chunk in self._chunks]
        aligned = [_ARRAYS <= at < _ARRAYS + len(arrays) for at in range(len(sizes))]
        self._spans = _laid_out(16 * len(sizes), sizes, aligned)

    def pack(self, allocator: BlockAllocator) -> Packed:
        """Write the chunks to one block; raise PoolFull if there is no room."""
        block = allocator.allocate(self._spans[-1][1])
        with giving_back(block, allocator):
            into = memoryview(block.buffer)
            table = np.array(self._spans, np.int64).tobytes()
            into[: len(table)] = table
            for chunk, (start, stop) in zip(self._chunks, self._spans, strict=True):
                if start < stop:
                    into[start:stop] = chunk
        return Packed(block, self._header)


def own(frame: pd.DataFrame, kept: Collection[int] = ()) -> pd.DataFrame:
    """Return ``frame`` with a copy of every array that may be a view of a packed buffer.

    Python objects never are, and are not copied.

    ``kept``: the addresses of arrays that are no such views.
    """

    def copied(array: memoryview) -> Any:
        return array if np.asarray(array).ctypes.data in kept else bytearray(array)

    objects = [each for each in _values(frame) if _has_objects(each)]
    arrays: list[memoryview] = []
    if objects and (body := _dumps_around(frame, objects, arrays)):
        return _loads_around(body, objects, list(map(copied, arrays)))
    buffers: list[pickle.PickleBuffer] = []
    whole = pickle.dumps(frame, protocol=5, buffer_callback=buffers.append)
    owned: pd.DataFrame = pickle.loads(whole, buffers=[copied(buffer.raw()) for buffer in buffers])
    return owned


def own_rest(frame: Any) -> Any:
    """Return a frame or series with a copy of every array whose memory is not numpy's own.

    pandas concatenates numbers into new memory, but keeps the chunks of Arrow's strings, labels and
    categories as they are, each of which keeps the whole buffer that it is a view of.
    """
    values = [each for each in _values(frame) if isinstance(each, np.ndarray)]
    try:
        return own(frame, {each.ctypes.data for each in values if _is_numpys(each)})
    except (
        pickle.PicklingError,
        AttributeError,
        TypeError,
    ):  # attributes or labels that only Dask can pickle
        return frame


def _is_numpys(array: Any) -> bool:
    """Return whether an array, or the one that it is a view of, has its own memory."""
    while isinstance(array, np.ndarray) and array.base is not None:
        array = array.base
    return isinstance(array, np.ndarray)


# ---- arrays of a frame ---------------------------------------------------------------------


def _values(frame: pd.DataFrame) -> list[Any]:
    """Return the arrays of a frame, with rows along the last axis, and its index."""
    return [*(block.values for block in frame._mgr.blocks), frame._mgr.axes[-1]]


def _has_objects(values: Any) -> bool:
    """Return whether values may contain Python objects, as arrays of unknown libraries may."""
    if isinstance(values, pd.Index):
        return not isinstance(values, pd.MultiIndex) and _has_objects(values.array)
    if isinstance(values, np.ndarray):
        return bool(values.dtype.hasobject)
    if type(values).__module__.partition(".")[0] != "pandas":
        return True
    inner = (getattr(values, name, None) for name in ("_ndarray", "sp_values"))
    return any(isinstance(array, np.ndarray) and array.dtype.hasobject for array in inner)


def _between(values: Any, start: int, stop: int) -> Any:
    """Return a range of rows of an array of a frame."""
    return values[start:stop] if values.ndim == 1 else values[:, start:stop]


# ---- pickles -------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Pickle dates out of band too, which numpy would pickle in band."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.ndarray and value.dtype.kind in "mM":
            return np.ndarray.view, (value.view(np.int64), value.dtype)
        return NotImplemented


class _AroundPickler(_Pickler):
    """Pickle each of some values as its number, and count the occurrences."""

    def __init__(self, file: io.BytesIO, values: Sequence[Any], **how: Any):
        super().__init__(file, **how)
        self._numbers = {id(each): number for number, each in enumerate(values)}
        self.met: Counter[int] = Counter()

    def persistent_id(self, value: Any) -> int | None:
        number = self._numbers.get(id(value))
        if number is not None:
            self.met[number] += 1
        return number


class _AroundUnpickler(pickle.Unpickler):
    """Replace numbers by their values."""

    def __init__(self, file: io.BytesIO, values: Sequence[Any], **how: Any):
        super().__init__(file, **how)
        self._values = values

    def persistent_load(self, number: int) -> Any:
        return self._values[number]


def _dumps_around(
    frame: pd.DataFrame, values: Sequence[Any], arrays: list[memoryview] | None = None
) -> bytes:
    """Pickle a frame without some of its values.

    Return nothing unless each of them occurs exactly once: a subclass may pickle differently, and one index
    may be that of rows and columns.
    """
    file = io.BytesIO()
    pickler = _AroundPickler(file, values, **_out_of_band(arrays))
    pickler.dump(frame)
    once = len(pickler.met) == len(values) == pickler.met.total()
    return file.getvalue() if once else b""


def _loads_around(body: Any, values: Sequence[Any], arrays: Sequence[Any] = ()) -> pd.DataFrame:
    frame: pd.DataFrame = _AroundUnpickler(io.BytesIO(body), values, buffers=arrays).load()
    return frame


def _dumps_arrays(values: Sequence[Any], arrays: list[memoryview]) -> bytes:
    """Pickle values without the memory of large arrays, which is appended to ``arrays``."""
    file = io.BytesIO()
    _Pickler(file, **_out_of_band(arrays)).dump(values)
    return file.getvalue()


def _out_of_band(arrays: list[memoryview] | None) -> dict[str, Any]:
    def stays(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if arrays is None or raw.nbytes < _INLINE_BYTES:
            return True
        arrays.append(raw)
        return False

    return {"protocol": 5, "buffer_callback": stays}


def dumps(value: Any) -> bytes:
    """Pickle Python objects, with Dask's pickling if the standard one fails."""
    try:
        return pickle.dumps(value, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError):
        pickled: bytes = dask_pickle.dumps(value)
        return pickled


# ---- the buffer ----------------------------------------------------------------------------


def _laid_out(start: int, sizes: Iterable[int], aligned: Iterable[bool]) -> list[tuple[int, int]]:
    """Return the start and the end of consecutive chunks of these sizes, from ``start`` on."""
    spans = []
    for size, align in zip(sizes, aligned, strict=True):
        if align:
            start = -(-start // ALIGNMENT) * ALIGNMENT
        spans.append((start, start + size))
        start += size
    return spans
