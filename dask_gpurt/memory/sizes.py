"""What objects own: each allocation once, however many views of it there are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from dask.sizeof import sizeof

from dask_gpurt.memory import cudf_owners
from dask_gpurt.memory.frames import Raw
from dask_gpurt.memory.objects import sizeof_objects

#: Bytes by the address of each root allocation.
Roots = dict[int, int]


def owned(value: Any) -> Roots:
    """The memory that an object keeps alive.

    Parameters
    ----------
    value
        Frames, series, indexes and arrays of numpy, pandas, Arrow, cudf and cupy are looked
        into; of anything else Dask's ``sizeof`` is taken.
    """
    roots: Roots = {}
    for address, nbytes in _walk(value):
        roots[address] = max(nbytes, roots.get(address, 0))
    return roots


def _walk(value: Any) -> Iterator[tuple[int, int]]:
    if isinstance(value, pd.DataFrame):
        yield from _walk(value.index)
        for block in value._mgr.blocks:
            yield from _walk(block.values)
    elif isinstance(value, pd.MultiIndex):
        for part in (*value.levels, *value.codes):
            yield from _walk(part)
    elif isinstance(value, pd.RangeIndex):
        yield id(value), sizeof(value)
    elif isinstance(value, (pd.Series, pd.Index)):
        yield from _walk(value.array)
        if isinstance(value, pd.Series):
            yield from _walk(value.index)
    elif isinstance(value, np.ndarray):
        address, nbytes = _root(value)
        yield address, nbytes
        if value.dtype == object:
            # Views share the objects too. No other allocation begins there: pointers have more bytes.
            yield address + 1, sizeof_objects(_base(value))
    elif isinstance(value, pd.api.extensions.ExtensionArray):
        yield from _walk_extension(value)
    elif isinstance(value, (pa.Table, pa.RecordBatch)):
        for column in value.columns:
            yield from _walk(column)
    elif isinstance(value, pa.ChunkedArray):
        for chunk in value.chunks:
            yield from _walk(chunk)
    elif isinstance(value, pa.Array):
        yield from (_buffer_root(buffer) for buffer in value.buffers() if buffer is not None)
    else:
        yield from _walk_other(value)


def _walk_other(value: Any) -> Iterator[tuple[int, int]]:
    library = type(value).__module__.partition(".")[0]
    if isinstance(value, Raw):
        for buffer in value.buffers:
            yield from _walk(buffer)
    elif library == "rmm" and hasattr(value, "ptr"):
        yield value.ptr, value.size
    elif library == "dask_gpurt" and hasattr(value, "owner"):  # a part of another buffer
        yield from _walk(value.owner)
    elif library == "cupy" and hasattr(value, "data"):
        yield value.data.mem.ptr, value.data.mem.size
    elif library == "cudf" and hasattr(type(value), "_columns"):
        yield from cudf_owners.owners(value)
    else:
        yield id(value), sizeof(value)


def _walk_extension(array: Any) -> Iterator[tuple[int, int]]:
    parts = [getattr(array, name, None) for name in ("_pa_array", "_ndarray", "_data", "_mask", "_codes")]
    if isinstance(array, pd.Categorical):
        parts.append(array.categories)
    elif isinstance(array, pd.arrays.IntervalArray):
        parts += [array.left, array.right]
    known = [part for part in parts if isinstance(part, (np.ndarray, pa.ChunkedArray, pd.Index))]
    known += [part for part in parts if isinstance(part, pd.api.extensions.ExtensionArray)]
    if not known:
        yield id(array), sizeof(pd.Series(array, copy=False))
    for part in known:
        yield from _walk(part)


def _base(array: np.ndarray) -> Any:
    """The array whose view another is."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _root(array: np.ndarray) -> tuple[int, int]:
    base = _base(array)
    if base.base is not None:
        try:
            held = np.frombuffer(base.base, np.uint8)
        except (TypeError, ValueError, BufferError):
            pass  # it is no buffer: what the array sees is all that is known
        else:
            return int(held.ctypes.data), int(held.nbytes)
    return int(base.ctypes.data), int(base.nbytes)


def _buffer_root(buffer: Any) -> tuple[int, int]:
    while buffer.parent is not None:
        buffer = buffer.parent
    return buffer.address, buffer.size


class Owned:
    """The union of what some keys own. Not thread-safe."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, Roots] = {}
        #: The keys that own an allocation, in order: the first is charged with it.
        self._sharers: defaultdict[int, dict[Hashable, None]] = defaultdict(dict)
        #: As first seen: an allocation has one size, whatever two objects know of it.
        self._sizes: Roots = {}
        #: Allocations that lie somewhere else for now, and count nothing.
        self._elsewhere: frozenset[int] = frozenset()
        self.total = 0

    def add(self, key: Hashable, roots: Roots) -> int:
        """Count what a new key owns; the bytes it is charged with, which nobody owned before."""
        self._roots[key], before = roots, self.total
        for address, nbytes in roots.items():
            if address not in self._sizes:
                self._sizes[address] = nbytes
                self.total += self._here(address)
            self._sharers[address][key] = None
        return self.total - before

    def roots(self, key: Hashable) -> Roots:
        """What a key owns."""
        return self._roots[key]

    def lacking(self, roots: Roots) -> int:
        """Bytes that nobody owns so far."""
        return sum(nbytes for address, nbytes in roots.items() if address not in self._sizes)

    def discard(self, key: Hashable) -> dict[Hashable | None, int]:
        """Count a key no more; the bytes it was charged with, by who is charged now: None if nobody."""
        heirs: defaultdict[Hashable | None, int] = defaultdict(int)
        for address in self._roots.pop(key, {}):
            sharers = self._sharers[address]
            charged = next(iter(sharers)) == key
            del sharers[key]
            if not sharers:
                del self._sharers[address]
                heirs[None] += self._here(address)
                del self._sizes[address]
            elif charged:
                heirs[next(iter(sharers))] += self._here(address)
        self.total -= heirs[None]
        return heirs

    def gain(self, key: Hashable) -> int:
        """Bytes that would be free if this key went alone."""
        return sum(self._here(a) for a in self._roots.get(key, {}) if len(self._sharers[a]) == 1)

    def is_here(self, key: Hashable) -> bool:
        """Whether a key owns bytes that do not lie somewhere else."""
        return any(map(self._here, self._roots.get(key, {})))

    def _here(self, address: int) -> int:
        return 0 if address in self._elsewhere else self._sizes[address]

    def set_elsewhere(self, addresses: Iterable[int]) -> dict[Hashable, int]:
        """Which allocations lie somewhere else now; the bytes more, or less, that keys are charged with."""
        addresses, changes = frozenset(addresses), defaultdict[Hashable, int](int)
        for address in (addresses ^ self._elsewhere) & self._sizes.keys():
            nbytes = -self._sizes[address] if address in addresses else self._sizes[address]
            changes[next(iter(self._sharers[address]))] += nbytes
        self._elsewhere = addresses
        self.total += sum(changes.values())
        return changes

    def clear(self) -> None:
        """Count nothing any more."""
        self._roots.clear()
        self._sharers.clear()
        self._sizes.clear()
        self.total = 0
