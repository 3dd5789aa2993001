"""Measure the memory of live objects, counting each allocation once, even if several objects share it.

Arrays and frames of numpy, pandas and Arrow are walked here. The libraries of devices have a function each in
their table (:mod:`dask_gpurt.device.libraries`); :func:`register` adds one for another library of the host.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from dask.sizeof import sizeof
from dask.utils import typename
from distributed.sizeof import safe_sizeof

from dask_gpurt.device.libraries import contents, library_of, lives_on_device
from dask_gpurt.memory.ledger import RESERVATIONS, Label, Ledger, Limits, Tier
from dask_gpurt.memory.serialize import Raw

logger = logging.getLogger(__name__)

#: Bytes of root allocations by address.
Roots = dict[int, int]
#: Returns the roots of an object; see :func:`register`.
RootsOf = Callable[[Any], Iterable[tuple[int, int]] | None]

#: Types of host libraries whose buffers are walked.
_WITH_BUFFERS = (
    *(pd.DataFrame, pd.Series, pd.Index, pd.api.extensions.ExtensionArray, np.ndarray),
    *(pa.Table, pa.RecordBatch, pa.ChunkedArray, pa.Array),
)


#: Functions of further libraries, by name.
_registered: dict[str, RootsOf] = {}


def register(library: str, roots: RootsOf) -> None:
    """Account for the objects of a library.

    ``library``: the name of its top module.
    ``roots``: returns the address and the bytes of each allocation that an object of the library refers to,
    or None for objects that it does not know. It must not copy or touch the memory: it runs on the event
    loop.
    """
    _registered[library] = roots


def owned(value: Any) -> Roots:
    """Return the root allocations that an object keeps alive.

    ``value``: frames, series, indexes and arrays of known libraries are walked, also inside dicts, lists and
    tuples. Any other object counts as one allocation of the size that Dask estimates.
    """
    roots: Roots = {}
    try:
        for address, nbytes in _walk(value):
            roots[address] = max(nbytes, roots.get(address, 0))
    except Exception as error:  # classes of users may raise anything, which must not fail the task
        _warn_once(typename(type(value)), type(error).__name__)
        return {id(value): safe_sizeof(value)}
    return roots


@cache
def _warn_once(kind: str, error: str) -> None:
    logger.warning(
        "cannot measure the memory of an object of type %s (%s): using the size that Dask estimates",
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
            # Views share the objects too. No allocation starts here, in the middle of the first pointer.
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
    library = _library(value)
    if isinstance(value, Raw):
        for buffer in value.buffers:
            yield from _walk(buffer)
    elif library == "dask_gpurt" and hasattr(value, "owner"):  # a view of another buffer
        yield from _walk(value.owner)
    elif (roots := _roots_in_library(value, library)) is not None:
        yield from roots
    elif any(map(_has_buffers, held := contents(value))):
        yield id(value), sys.getsizeof(value)
        for each in held:
            yield from _walk(each)
    else:
        yield id(value), sizeof(value)


def _library(value: Any) -> str:
    return str(type(value).__module__).partition(".")[0]


def _roots_in_library(value: Any, library: str) -> Iterable[tuple[int, int]] | None:
    if (known := _registered.get(library)) is not None:
        return known(value)
    on_device = library_of(type(value))
    return None if on_device is None else on_device.roots(value)


def _has_buffers(value: Any) -> bool:
    """Return whether an object may share its memory with other objects."""
    return isinstance(value, _WITH_BUFFERS) or lives_on_device(value) or _library(value) in _registered


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
    """Return the array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _root(array: np.ndarray) -> tuple[int, int]:
    base = _base(array)
    if base.base is not None:
        try:
            held = np.frombuffer(base.base, np.uint8)
        except (TypeError, ValueError, BufferError):
            pass  # not a buffer: only the bytes of the array are known
        else:
            return int(held.ctypes.data), int(held.nbytes)
    return int(base.ctypes.data), int(base.nbytes)


def _buffer_root(buffer: Any) -> tuple[int, int]:
    while buffer.parent is not None:
        buffer = buffer.parent
    return buffer.address, buffer.size


# ---- Python objects in arrays: their size is estimated from a sample, on the event loop ----

#: Cells sampled to count distinct objects, and the most objects sampled to measure their size.
_CELLS, _OBJECTS = 512, 64
#: Fixed pseudo-random offsets of positions within their strides.
_JITTER = np.random.default_rng(0).permutation(_CELLS)


def sizeof_objects(array: np.ndarray) -> int:
    """Estimate the bytes of the distinct objects in an array, excluding the array itself.

    Takes about 0.2 ms for strings.
    """
    cells = array.flat[_spread(array.size)].tolist()
    counts = Counter(map(id, cells))
    objects = list({id(cell): cell for cell in cells}.values())
    chosen = objects[:: len(objects) // _OBJECTS + 1]
    mean: float = sum(map(sizeof, chosen)) / max(1, len(chosen))
    return round(mean * (len(objects) + _unseen(array.size, counts)))


def _unseen(size: int, counts: Counter[int]) -> float:
    """Estimate how many distinct objects are not in a sample, from how often sampled objects occur.

    This is Chao's estimator for unseen species, from the numbers of objects that occur once and twice. If
    none occurs twice, assume a distinct object in each cell outside the sample.
    """
    seen = Counter(counts.values())
    once, twice = seen[1], seen[2]
    most = once * (size / max(1, counts.total()) - 1)
    return min(most, once * once / (2 * twice)) if twice else most


def _spread(size: int) -> np.ndarray:
    """Return positions in a sequence for a sample, one in each stride, at irregular distances."""
    if size <= _CELLS:
        return np.arange(size)
    return np.arange(_CELLS) * size // _CELLS + _JITTER * (size // _CELLS) // _CELLS


# ---- accounts ------------------------------------------------------------------------


class Owned:
    """Track the union of the allocations that keys own. Not thread-safe."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, Roots] = {}
        #: The keys that own an allocation, in order of insertion; the first is charged for it.
        self._sharers: defaultdict[int, dict[Hashable, None]] = defaultdict(dict)
        #: Sizes as first seen: an allocation has one size, even if two objects report different ones.
        self._sizes: Roots = {}
        #: Allocations that are currently in another tier, and count as 0 bytes.
        self._elsewhere: frozenset[int] = frozenset()
        self.total = 0

    def add(self, key: Hashable, roots: Roots) -> int:
        """Add a key; return the bytes it is charged for, which no other key owned before."""
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
        """Return the bytes of allocations that no key owns."""
        return sum(nbytes for address, nbytes in roots.items() if address not in self._sizes)

    def discard(self, key: Hashable) -> dict[Hashable | None, int]:
        """Remove a key; return the bytes it was charged for, by the key charged instead, None if freed."""
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
        """Return the bytes that removing this key alone would free."""
        return sum(self._here(a) for a in self._roots.get(key, {}) if len(self._sharers[a]) == 1)

    def is_here(self, key: Hashable) -> bool:
        """Return whether a key owns bytes in this tier."""
        return any(map(self._here, self._roots.get(key, {})))

    def _here(self, address: int) -> int:
        return 0 if address in self._elsewhere else self._sizes[address]

    def set_elsewhere(self, addresses: Iterable[int]) -> dict[Hashable, int]:
        """Set the allocations that are in another tier now; return the change of the charge by key."""
        addresses, changes = frozenset(addresses), defaultdict[Hashable, int](int)
        for address in (addresses ^ self._elsewhere) & self._sizes.keys():
            nbytes = -self._sizes[address] if address in addresses else self._sizes[address]
            changes[next(iter(self._sharers[address]))] += nbytes
        self._elsewhere = addresses
        self.total += sum(changes.values())
        return changes

    def clear(self) -> None:
        """Remove all keys."""
        self._roots.clear()
        self._sharers.clear()
        self._sizes.clear()
        self.total = 0


_RESERVED = Label(RESERVATIONS)


class LiveAccount:
    """Account for live objects and reservations, counting shared memory once. Not thread-safe.

    ``ledger``: updated with each change. Shared memory is charged to the oldest key that owns it.
    """

    def __init__(self, limits: Limits, ledger: Ledger):
        self._limits = {Tier.DEVICE: limits.device, Tier.HOST: limits.host}
        self._owned = {tier: Owned() for tier in self._limits}
        self._ledger = ledger
        self._of: dict[Hashable, tuple[Tier, Label]] = {}
        self._reservations: dict[Hashable, tuple[Tier, int]] = {}
        self._reserved: Counter[Tier] = Counter()
        #: Cumulative bytes that have become live, and number of objects removed.
        self.admitted: Counter[Tier] = Counter()
        self.removals = 0

    def add(self, key: Hashable, tier: Tier, label: Label, roots: Roots) -> None:
        """Add a live key."""
        self._of[key] = tier, label
        added = self._owned[tier].add(key, roots)
        self.admitted[tier] += added
        self._ledger.add(tier, label, added)

    def discard(self, key: Hashable) -> None:
        """Remove a key that is no longer live."""
        self._discount(key)
        self.removals += 1

    def _discount(self, key: Hashable) -> None:
        tier, label = self._of.pop(key)
        for heir, nbytes in self._owned[tier].discard(key).items():
            self._ledger.add(tier, label, -nbytes)
            if heir is not None:
                self._ledger.add(tier, self._of[heir][1], nbytes)

    def revise(self, key: Hashable, roots: Roots) -> None:
        """Replace the allocations of a live key, if they have changed."""
        tier, label = self._of[key]
        if roots != self._owned[tier].roots(key):
            self._discount(key)
            self.add(key, tier, label, roots)

    def keys(self, tier: Tier) -> list[Any]:
        """Return the live keys of a tier, oldest first."""
        return [key for key, (where, _) in self._of.items() if where is tier]

    def total(self, tier: Tier) -> int:
        """Return the bytes of live objects in a tier."""
        return self._owned[tier].total if tier in self._owned else 0

    def lacking(self, tier: Tier, roots: Roots) -> int:
        """Return the bytes that a new object would add to a tier; views of live objects add none."""
        return self._owned[tier].lacking(roots)

    def gain(self, key: Hashable, tier: Tier) -> int:
        """Return the bytes that removing this key alone would free."""
        return self._owned[tier].gain(key)

    def is_here(self, key: Hashable, tier: Tier) -> bool:
        """Return whether a live key of a tier currently has bytes there."""
        return self._owned[tier].is_here(key)

    def set_elsewhere(self, tier: Tier, roots: Iterable[int]) -> None:
        """Set the allocations of live objects in a tier that are currently in another one."""
        for key, nbytes in self._owned[tier].set_elsewhere(roots).items():
            self._ledger.add(tier, self._of[key][1], nbytes)

    def reserve(self, key: Hashable, tier: Tier, nbytes: int) -> None:
        """Reserve bytes for a key, replacing its previous reservation."""
        self.cancel(key)
        self._reservations[key] = tier, nbytes
        self._add_reserved(tier, nbytes)

    def reserved(self, key: Hashable, tier: Tier) -> int:
        """Return the bytes reserved for a key in a tier."""
        where, nbytes = self._reservations.get(key, (tier, 0))
        return nbytes if where is tier else 0

    def is_reserved(self, key: Hashable) -> bool:
        """Return whether a key has a reservation. From any thread."""
        return key in self._reservations

    def cancel(self, key: Hashable) -> bool:
        """Cancel the reservation of a key; return whether it had any bytes."""
        if (promised := self._reservations.pop(key, None)) is None:
            return False
        tier, nbytes = promised
        self._add_reserved(tier, -nbytes)
        return nbytes > 0

    def _add_reserved(self, tier: Tier, nbytes: int) -> None:
        self._reserved[tier] += nbytes
        self._ledger.add(tier, _RESERVED, nbytes)

    def excess(self, tier: Tier, nbytes: int, others: int = 0) -> int:
        """Return by how many bytes a tier with ``others`` in it would exceed its limit by ``nbytes`` more."""
        return self.total(tier) + self._reserved[tier] + others + nbytes - self._limits[tier]

    def clear(self) -> None:
        """Forget all live objects and reservations."""
        for owned in self._owned.values():
            owned.clear()
        for counted in (self._of, self._reservations, self._reserved):
            counted.clear()
