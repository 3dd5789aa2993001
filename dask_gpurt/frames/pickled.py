"""Pack pandas frames of any dtypes so that an output partition can be read without the others.

Arrays of fixed width go into the buffer as they are, by pickle protocol 5, and are read as views.
Python objects are pickled once for each output partition: reading one does not make the objects of
the others. A buffer holds chunks, one behind the other:

- where each of the following begins and ends, as pairs of int64;
- a pickle of the arrays that are read as a whole, but for the memory of large ones;
- a pickle of the frame around its arrays: labels, dtypes, and which array goes where;
- the memory of each large array, aligned;
- for each output partition a pickle of its objects, empty where the frame has none.

The header only says how many arrays there are, so that its size does not depend on the data.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from distributed.protocol import pickle as dask_pickle

from dask_gpurt.device.arena import ALIGNMENT
from dask_gpurt.frames.backend import BlockAllocator, Packed, Part, giving_back

#: Bytes below which an array (labels, above all) stays inside the pickle that it belongs to.
_INLINE_BYTES = 4096
#: Chunks in front of those of the arrays: the arrays' own pickle, and the frame around them.
_WHOLE, _AROUND, _ARRAYS = 0, 1, 2


@dataclass(frozen=True)
class Pickled:
    """Describe a packed buffer: the content of its header.

    Attributes
    ----------
    arrays
        How many arrays have a chunk of their own.
    """

    arrays: int

    def read(self, part: Part) -> pd.DataFrame:
        """Return the rows of a part. All but the Python objects in it may be views of its buffer."""
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
    """Hold rows of a frame, ready to be packed.

    Parameters
    ----------
    rows
        The rows, ordered by output partition.
    offsets
        The row at which each output partition begins, and the number of rows last.
    """

    def __init__(self, rows: pd.DataFrame, offsets: Sequence[int]):
        values = _values(rows)
        whole = [each for each in values if not _has_objects(each)]
        objects = [each for each in values if _has_objects(each)]
        arrays: list[memoryview] = []
        around = _dumps_around(rows, [*whole, *objects])
        if around:
            front = [_dumps_arrays(whole, arrays), around]
            parts = [_dumps_objects(objects, a, b) if objects else b"" for a, b in pairwise(offsets)]
        else:
            front = [b"", b""]
            parts = [dumps(rows.iloc[a:b]) for a, b in pairwise(offsets)]
        self._header = pickle.dumps(Pickled(len(arrays)))
        self._chunks: list[Any] = [*front, *arrays, *parts]
        sizes = [len(chunk) for chunk in self._chunks]
        aligned = [_ARRAYS <= at < _ARRAYS + len(arrays) for at in range(len(sizes))]
        self._spans = _laid_out(16 * len(sizes), sizes, aligned)

    def pack(self, allocator: BlockAllocator) -> Packed:
        """Write them into one block; raises PoolFull."""
        block = allocator.allocate(self._spans[-1][1])
        with giving_back(block, allocator):
            into = memoryview(block.buffer)
            table = np.array(self._spans, np.int64).tobytes()
            into[: len(table)] = table
            for chunk, (start, stop) in zip(self._chunks, self._spans, strict=True):
                if start < stop:
                    into[start:stop] = chunk
        return Packed(block, self._header)


def own(frame: pd.DataFrame) -> pd.DataFrame:
    """Return ``frame`` with its own copy of every array that is a view of a packed buffer.

    Python objects never are, and are not looked at.
    """
    objects = [each for each in _values(frame) if _has_objects(each)]
    arrays: list[memoryview] = []
    if objects and (body := _dumps_around(frame, objects, arrays)):
        return _loads_around(body, objects, [bytearray(array) for array in arrays])
    buffers: list[pickle.PickleBuffer] = []
    whole = pickle.dumps(frame, protocol=5, buffer_callback=buffers.append)
    owned: pd.DataFrame = pickle.loads(whole, buffers=[bytearray(buffer.raw()) for buffer in buffers])
    return owned


# ---- what a frame is made of ---------------------------------------------------------------


def _values(frame: pd.DataFrame) -> list[Any]:
    """Return the arrays of a frame, whose last axis are rows, and its index."""
    return [*(block.values for block in frame._mgr.blocks), frame._mgr.axes[1]]


def _has_objects(values: Any) -> bool:
    """Return whether values are, or may be, Python objects: an array of an unknown library may have some."""
    if isinstance(values, pd.Index):
        return not isinstance(values, pd.MultiIndex) and _has_objects(values.array)
    if isinstance(values, np.ndarray):
        return bool(values.dtype.hasobject)
    if type(values).__module__.partition(".")[0] != "pandas":
        return True
    inner = (getattr(values, name, None) for name in ("_ndarray", "sp_values"))
    return any(isinstance(array, np.ndarray) and array.dtype.hasobject for array in inner)


def _between(values: Any, start: int, stop: int) -> Any:
    """Return some rows of the values of a frame."""
    return values[start:stop] if values.ndim == 1 else values[:, start:stop]


# ---- pickles -------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Hand over the memory of dates too, which numpy would pickle in band."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.ndarray and value.dtype.kind in "mM":
            return np.ndarray.view, (value.view(np.int64), value.dtype)
        return NotImplemented


class _AroundPickler(_Pickler):
    """Leave values out: each is pickled as its number, and counted."""

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
    """Put values in the place of their numbers."""

    def __init__(self, file: io.BytesIO, values: Sequence[Any], **how: Any):
        super().__init__(file, **how)
        self._values = values

    def persistent_load(self, number: int) -> Any:
        return self._values[number]


def _dumps_around(
    frame: pd.DataFrame, values: Sequence[Any], arrays: list[memoryview] | None = None
) -> bytes:
    """Return a pickle of a frame without some of its values.

    Nothing where it does not have each of them in one place: a subclass may pickle otherwise, and an
    index may be that of the columns too.
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
    """Return a pickle of values without the memory of large arrays, which is added to ``arrays``."""
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


def _dumps_objects(values: Sequence[Any], start: int, stop: int) -> bytes:
    return dumps([_between(each, start, stop) for each in values])


def dumps(value: Any) -> bytes:
    """Return a pickle of Python objects; as Dask pickles them where they take more than pickle can do."""
    try:
        return pickle.dumps(value, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError):
        pickled: bytes = dask_pickle.dumps(value)
        return pickled


# ---- the buffer ----------------------------------------------------------------------------


def _laid_out(start: int, sizes: Iterable[int], aligned: Iterable[bool]) -> list[tuple[int, int]]:
    """Return where chunks of these sizes begin and end from ``start`` on."""
    spans = []
    for size, align in zip(sizes, aligned, strict=True):
        if align:
            start = -(-start // ALIGNMENT) * ALIGNMENT
        spans.append((start, start + size))
        start += size
    return spans
