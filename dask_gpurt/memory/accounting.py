"""Account for what live objects own: each allocation once, however many views of it there are.

The columns of cudf's objects are walked without touching the memory: to serialise an object would do as
well, but cudf copies slices first, and then what owns the copy is told. A spillable buffer is known by its
owner, which stays the same wherever the bytes lie; its pointer is not asked for, which would bring it back to
the device, for ever.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from dask.sizeof import sizeof
from dask.utils import typename
from distributed.sizeof import safe_sizeof

from dask_gpurt.device.base import contents, lives_on_device
from dask_gpurt.memory.ledger import RESERVATIONS, Label, Ledger
from dask_gpurt.memory.objects import sizeof_objects
from dask_gpurt.memory.serialize import Raw
from dask_gpurt.memory.tiers import Limits, Tier

logger = logging.getLogger(__name__)

#: Bytes by the address of each root allocation.
Roots = dict[int, int]

#: Objects of host libraries whose memory is looked into.
_WITH_BUFFERS = (
    *(pd.DataFrame, pd.Series, pd.Index, pd.api.extensions.ExtensionArray, np.ndarray),
    *(pa.Table, pa.RecordBatch, pa.ChunkedArray, pa.Array),
)


def owned(value: Any) -> Roots:
    """Return the memory that an object keeps alive.

    Parameters
    ----------
    value
        Frames, series, indexes and arrays of numpy, pandas, Arrow, cudf and cupy are looked
        into, also where a dict, list or tuple holds them; of anything else Dask's ``sizeof`` is taken, or
        where that fails, as for a dict that holds itself, the size that Dask takes then.
    """
    roots: Roots = {}
    try:
        for address, nbytes in _walk(value):
            roots[address] = max(nbytes, roots.get(address, 0))
    except Exception as error:  # any class of a user may fail here in any way, which is not to fail its task
        _warn_once(typename(type(value)), type(error).__name__)
        return {id(value): safe_sizeof(value)}
    return roots


@cache
def _warn_once(kind: str, error: str) -> None:
    logger.warning(
        "what an object of type %s owns cannot be told (%s): its size is taken as Dask estimates it",
        kind,
        error,
    )


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
    library = str(type(value).__module__).partition(".")[0]
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
        yield from _cudf_owners(value)
    elif any(map(_has_buffers, held := contents(value))):
        yield id(value), sys.getsizeof(value)
        for each in held:
            yield from _walk(each)
    else:
        yield id(value), sizeof(value)


def _has_buffers(value: Any) -> bool:
    """Return whether an object may share its memory with others."""
    return isinstance(value, _WITH_BUFFERS) or lives_on_device(value)


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
    """Return the array whose view another is."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _root(array: np.ndarray) -> tuple[int, int]:
    base = _base(array)
    if base.base is not None:
        try:
            held = np.frombuffer(base.base, np.uint8)
        except (TypeError, ValueError, BufferError):
            pass  # it is not a buffer: what the array sees is all that is known
        else:
            return int(held.ctypes.data), int(held.nbytes)
    return int(base.ctypes.data), int(base.nbytes)


def _buffer_root(buffer: Any) -> tuple[int, int]:
    while buffer.parent is not None:
        buffer = buffer.parent
    return buffer.address, buffer.size


def _cudf_owners(value: Any) -> Iterator[tuple[int, int]]:
    """Yield the identity and bytes of each allocation that a frame, series or index of cudf is a view of.

    Parameters
    ----------
    value
        A ``cudf`` object with columns. An index that is only a range has none.
    """
    if (index := getattr(value, "index", None)) is not None:
        yield from _cudf_owners(index)
    if type(value).__name__ != "RangeIndex":  # whose columns would be made by asking for them
        for column in value._columns:
            yield from _of_cudf_column(column)


def _of_cudf_column(column: Any) -> Iterator[tuple[int, int]]:
    yield from _of_plc(column.plc_column)
    if (categories := getattr(column.dtype, "_categories", None)) is not None:
        yield from _of_cudf_column(categories)


def _of_plc(column: Any) -> Iterator[tuple[int, int]]:
    for buffer in (column.data(), column.null_mask()):
        if buffer is not None:
            yield _cudf_root(buffer.owner)
    for child in column.children():
        yield from _of_plc(child)


def _cudf_root(owner: Any) -> tuple[int, int]:
    return id(owner) if hasattr(owner, "is_spilled") else owner.ptr, owner.size


class Owned:
    """Keep the union of the memory that some keys own. Not thread-safe."""

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
        """Count what a new key owns; the bytes it is charged with, which no key owned before."""
        self._roots[key], before = roots, self.total
        for address, nbytes in roots.items():
            if address not in self._sizes:
                self._sizes[address] = nbytes
                self.total += self._here(address)
            self._sharers[address][key] = None
        return self.total - before

    def roots(self, key: Hashable) -> Roots:
        """Return the allocations that a key owns."""
        return self._roots[key]

    def lacking(self, roots: Roots) -> int:
        """Return the bytes that no key owns so far."""
        return sum(nbytes for address, nbytes in roots.items() if address not in self._sizes)

    def discard(self, key: Hashable) -> dict[Hashable | None, int]:
        """Count a key no more; the bytes it was charged with, by the key charged now, or None."""
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
        """Return the bytes that would be free if this key went alone."""
        return sum(self._here(a) for a in self._roots.get(key, {}) if len(self._sharers[a]) == 1)

    def is_here(self, key: Hashable) -> bool:
        """Return whether a key owns bytes that do not lie somewhere else."""
        return any(map(self._here, self._roots.get(key, {})))

    def _here(self, address: int) -> int:
        return 0 if address in self._elsewhere else self._sizes[address]

    def set_elsewhere(self, addresses: Iterable[int]) -> dict[Hashable, int]:
        """Set the allocations that lie somewhere else now; returns by how much the bytes charged change."""
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


_RESERVED = Label(RESERVATIONS)


class LiveAccount:
    """Account for live objects, shared memory once. Not thread-safe.

    Parameters
    ----------
    limits
        Bytes of each tier.
    ledger
        Told of each change. Shared memory counts as what the first key is that is still there.
    """

    def __init__(self, limits: Limits, ledger: Ledger):
        self._limits = {Tier.DEVICE: limits.device, Tier.HOST: limits.host}
        self._owned = {tier: Owned() for tier in self._limits}
        self._ledger = ledger
        self._of: dict[Hashable, tuple[Tier, Label]] = {}
        self._reservations: dict[Hashable, tuple[Tier, int]] = {}
        self._reserved: Counter[Tier] = Counter()
        #: Bytes that have become live so far, and how many objects have ceased to be.
        self.admitted: Counter[Tier] = Counter()
        self.removals = 0

    def add(self, key: Hashable, tier: Tier, label: Label, roots: Roots) -> None:
        """Note that a key is live now."""
        self._of[key] = tier, label
        added = self._owned[tier].add(key, roots)
        self.admitted[tier] += added
        self._ledger.add(tier, label, added)

    def discard(self, key: Hashable) -> None:
        """Note that a key is live no more."""
        self._discount(key)
        self.removals += 1

    def _discount(self, key: Hashable) -> None:
        tier, label = self._of.pop(key)
        for heir, nbytes in self._owned[tier].discard(key).items():
            self._ledger.add(tier, label, -nbytes)
            if heir is not None:
                self._ledger.add(tier, self._of[heir][1], nbytes)

    def revise(self, key: Hashable, roots: Roots) -> None:
        """Look again at what a live key owns, which may have changed."""
        tier, label = self._of[key]
        if roots != self._owned[tier].roots(key):
            self._discount(key)
            self.add(key, tier, label, roots)

    def keys(self, tier: Tier) -> list[Any]:
        """Return the keys that are live in a tier, the oldest first."""
        return [key for key, (where, _) in self._of.items() if where is tier]

    def total(self, tier: Tier) -> int:
        """Return the bytes of live objects in a tier."""
        return self._owned[tier].total if tier in self._owned else 0

    def lacking(self, tier: Tier, roots: Roots) -> int:
        """Return the bytes that a new object would add to a tier: none for views of what is live there."""
        return self._owned[tier].lacking(roots)

    def gain(self, key: Hashable, tier: Tier) -> int:
        """Return the bytes that would be free if this key went alone."""
        return self._owned[tier].gain(key)

    def is_here(self, key: Hashable, tier: Tier) -> bool:
        """Return whether a key has bytes in a tier, and not only somewhere else for now."""
        return self._owned[tier].is_here(key)

    def set_elsewhere(self, tier: Tier, roots: Iterable[int]) -> None:
        """Set the allocations of a tier that lie somewhere else now, though what owns them is live."""
        for key, nbytes in self._owned[tier].set_elsewhere(roots).items():
            self._ledger.add(tier, self._of[key][1], nbytes)

    def reserve(self, key: Hashable, tier: Tier, nbytes: int) -> None:
        """Keep room for a key; a later promise to it replaces the one before."""
        self.cancel(key)
        self._reservations[key] = tier, nbytes
        self._add_reserved(tier, nbytes)

    def reserved(self, key: Hashable, tier: Tier) -> int:
        """Return the bytes that a key has been promised in a tier."""
        where, nbytes = self._reservations.get(key, (tier, 0))
        return nbytes if where is tier else 0

    def is_reserved(self, key: Hashable) -> bool:
        """Return whether a key has been promised room; from any thread."""
        return key in self._reservations

    def cancel(self, key: Hashable) -> bool:
        """End a promise; whether there was one."""
        if (promised := self._reservations.pop(key, None)) is None:
            return False
        tier, nbytes = promised
        self._add_reserved(tier, -nbytes)
        return nbytes > 0

    def _add_reserved(self, tier: Tier, nbytes: int) -> None:
        self._reserved[tier] += nbytes
        self._ledger.add(tier, _RESERVED, nbytes)

    def excess(self, tier: Tier, nbytes: int, others: int = 0) -> int:
        """Return by how many bytes a tier is too full once ``nbytes`` more are live, next to ``others``."""
        return self.total(tier) + self._reserved[tier] + others + nbytes - self._limits[tier]

    def clear(self) -> None:
        """Forget all live objects."""
        for owned in self._owned.values():
            owned.clear()
        for counted in (self._of, self._reservations, self._reserved):
            counted.clear()


#: Bytes by the identity of what owns them.
BytesByOwner = dict[int, int]


def cudf_spill_manager() -> Any:
    """Return cudf's spill manager, None where cudf does not spill or has not been imported."""
    module = sys.modules.get("cudf.core.buffer.spill_manager")
    return module.get_global_manager() if module is not None else None


def spilled_by_cudf(manager: Any) -> BytesByOwner:
    """Return the buffers of a manager that lie in host memory."""
    return {id(owner): owner.size for owner in manager.buffers() if owner.is_spilled}
