"""Store a worker's data in tiers, as one mapping from keys to objects.

Tasks read live objects, which are on the device, or in host memory for host objects of a worker with a GPU.
The lower tiers (pinned memory, host memory, disk) hold serialised objects. The components are

- :mod:`~dask_gpurt.memory.entries`: the table of all entries, under one lock,
- :mod:`~dask_gpurt.memory.spilling`: the order of eviction, moves down, and memory reserved before it is
  allocated,
- :mod:`~dask_gpurt.memory.reading`: reads in the lower tiers without a move, and moves up.

Moves block, so they run in threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from typing import Any, NamedTuple

from dask.typing import Key
from distributed.protocol.serialize import Serialized

from dask_gpurt.device import Device
from dask_gpurt.memory.disk import CorruptFile
from dask_gpurt.memory.entries import Entry, EntryTable, ExternalRef, Priority, label_of
from dask_gpurt.memory.ledger import PARTITIONS, Ledger, Limits, Tier
from dask_gpurt.memory.lower_tiers import LowerTier
from dask_gpurt.memory.reading import BufferAndMemo, EntryReader, Unspiller
from dask_gpurt.memory.serialize import Frames
from dask_gpurt.memory.spilling import Reservations, Spiller
from dask_gpurt.observe import Metrics

#: The objects that the current coroutine is sending; `TieredBuffer` returns these copies to it.
serving: ContextVar[dict[Key, Any] | None] = ContextVar("serving", default=None)


class Spilled(NamedTuple):
    """Report to Dask's metrics the bytes that are not in host memory, and the bytes on disk."""

    memory: int
    disk: int


class TieredBuffer(MutableMapping[Key, Any]):
    """Map keys to objects across all tiers, in place of a worker's ``data``. Thread-safe.

    :meth:`__getitem__` of a key that is not live blocks for a copy. To avoid that, call :meth:`hold` for the
    key first, in a thread that may block.

    ``priority_of``: returns the soonest scheduler priority among the tasks of this worker that need a key;
    None if there are none. Called from any thread.
    ``changed``: called after each change of the ledger; must not block.
    ``beside``: returns the bytes by which others reduce the live tier in host memory; must not block.
    ``reservations``: reserves memory of the live tiers before it is allocated.
    """

    def __init__(
        self,
        limits: Limits,
        lower: Mapping[Tier, LowerTier],
        *,
        home: Callable[[Any], Tier],
        device: Device,
        ledger: Ledger,
        metrics: Metrics,
        priority_of: Callable[[Key], Priority],
        changed: Callable[[], None],
        beside: Callable[[], int] = int,
    ):
        self.limits = limits
        self.ledger = ledger
        self._metrics = metrics
        self._table = EntryTable(
            limits,
            lower,
            home=home,
            device=device,
            ledger=ledger,
            metrics=metrics,
            changed=changed,
            beside=beside,
        )
        self._spiller = Spiller(self._table, priority_of)
        self.reservations = Reservations(self._table, self._spiller)
        self._reader = EntryReader(self._table, self.reservations)
        self._unspiller = Unspiller(self._table, self._spiller, self.reservations, self._reader)

    # ---- the mapping -----------------------------------------------------------------

    def __setitem__(self, key: Key, value: Any) -> None:
        self.store(key, value)

    def store(
        self,
        key: Key,
        value: Any,
        kind: str = PARTITIONS,
        *,
        home: Tier | None = None,
        priority: Priority = None,
    ) -> None:
        """Store a live object, which uses up the reservation of its key.

        ``kind``: keys of kinds other than partitions are hidden when iterating.
        ``priority``: its eviction priority, if it is not an input of tasks.
        """
        table, label = self._table, label_of(key, kind)
        roots = self.reservations.measured(key, value)
        with table.lock:
            replaced = self._remove(key) if key in table.by_key else None
            table.live.cancel(key)
            home = home or table.home(value)
            entry = table.add(key, label, home, value, sum(roots.values()), priority)
            table.live.add(key, entry.home, label, roots)
            table.account(entry.home)
        del replaced

    def store_below(
        self, key: Key, frames: Frames, kind: str, *, home: Tier, priority: Priority = None
    ) -> Tier:
        """Store a serialised object directly in a tier below its home; return that tier. Blocks.

        Raises NoRoom if all lower tiers are full.
        """
        table, label = self._table, label_of(key, kind)
        name = table.new_name()
        tier, fence = table.lower.put(name, frames, label, home, ordered=False)
        fence()
        with table.lock:
            entry = table.add(key, label, home, None, frames.nbytes, priority)
            entry.live, entry.tier, entry.name = False, tier, name
            table.account(tier)
        return tier

    def adopt_external(
        self, key: Key, nbytes: int, take: Callable[[], Any], delete: Callable[[], None]
    ) -> None:
        """Take over a key that another mapping has on disk.

        ``take``, ``delete``: remove the key from the other mapping: ``take`` returns its object, ``delete``
        does not.
        """
        table = self._table
        with table.lock:
            entry = table.add(key, label_of(key, PARTITIONS), Tier.DEVICE, None, nbytes)
            entry.live, entry.tier, entry.foreign = False, Tier.DISK, ExternalRef(take, delete)

    def __getitem__(self, key: Key) -> Any:
        served = serving.get()
        if served is not None and key in served:
            return served[key]
        # Retry if another thread spills or replaces the object between the two calls.
        while not (found := self._if_live(key)):
            self._metrics.add("memory.unspill.unheld")
            self.release(self.hold([key]))
        return found[0]

    def _if_live(self, key: Key) -> tuple[Any, ...]:
        """Return the object of a key in a tuple, empty if it is not live; raise KeyError if unknown."""
        with self._table.lock:
            entry = self._table.by_key[key]
            entry.last_used = self._table.tick()
            return (entry.value,) if entry.live else ()

    def __delitem__(self, key: Key) -> None:
        with self._table.lock:
            value = self._remove(key)
        del value

    def _remove(self, key: Key) -> Any:
        """Remove a key, under the lock; return its object if it is live.

        The caller drops the object without the lock. Freeing device memory may wait for running kernels::

            Thread 1: drops x under the lock, and     Thread 2, the event loop: asks which inputs are live,
            waits for a kernel                        and waits for the lock
        """
        table = self._table
        entry = table.by_key.pop(key)
        if entry.live:
            table.live.discard(key)
        elif not entry.moving:  # otherwise the thread that moves it deletes its copy
            table.delete_copy(entry)
        value, entry.value = entry.value, None
        table.account()
        return value

    def discard(self, key: Key) -> None:
        """Delete a key if it exists."""
        with self._table.lock:
            value = self._remove(key) if key in self._table.by_key else None
        del value

    def __contains__(self, key: object) -> bool:
        return key in self._table.by_key

    def __iter__(self) -> Iterator[Key]:
        entries = list(self._table.by_key.items())
        return iter([key for key, entry in entries if entry.label.kind == PARTITIONS])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    # ---- held: live and not evictable -------------------------------------------------

    def hold(self, keys: Iterable[Key]) -> list[Entry]:
        """Make keys live and prevent their eviction; unknown keys are ignored. Blocks.

        Returns the held entries, for :meth:`release`.
        """
        with self._table.lock:
            held = self._known(keys)
            for entry in held:
                entry.holders += 1
        try:
            self._unspiller.make_live(held)
        except BaseException:
            self.release(held)
            raise
        return held

    def hold_live(self, keys: Iterable[Key]) -> list[Entry] | None:
        """Hold keys if all of them are live already, otherwise return None. Does not block."""
        with self._table.lock:
            entries = self._known(keys)
            if not all(entry.live for entry in entries):
                return None
            for entry in entries:
                entry.holders += 1
            return entries

    def hold_where_live(self, keys: Iterable[Key]) -> tuple[dict[Key, Entry], list[Key]]:
        """Hold the live ones of ``keys``; return their entries and the other keys. Does not block."""
        with self._table.lock:
            known = self._known(keys)
            held = {entry.key: entry for entry in known if entry.live}
            for entry in held.values():
                entry.holders += 1
            return held, [key for key in dict.fromkeys(entry.key for entry in known) if key not in held]

    def release(self, held: Iterable[Entry]) -> None:
        """Make held entries evictable again, and measure their memory again."""
        self._table.release(held)

    def _known(self, keys: Iterable[Key]) -> list[Entry]:
        by_key = self._table.by_key
        return [by_key[key] for key in keys if key in by_key]

    def prefetch(self, keys: Iterable[Key]) -> None:
        """Make keys live as long as there is room without spilling. Blocks."""
        self._unspiller.prefetch(keys)

    # ---- reads in place ----------------------------------------------------------------

    def copies(self, keys: Iterable[Key]) -> dict[Key, Any]:
        """Return objects without moving them between tiers. Blocks."""
        found, foreign = self._reader.copies(keys)
        # Another mapping returns an object only once, so make these live here.
        return found | {key: self[key] for key in foreign}

    def unreadable(self, keys: Iterable[Key]) -> list[Key]:
        """Return the keys whose copies are corrupt. Blocks."""
        lost = []
        for key in keys:
            try:
                self.copies([key])
            except CorruptFile:
                lost.append(key)
        return lost

    def messages(self, keys: Iterable[Key], stack: ExitStack) -> dict[Key, Serialized]:
        """Return Dask messages of objects in lower tiers; see :meth:`EntryReader.messages`. Blocks."""
        return self._reader.messages(keys, stack)

    def device_objects(self, held: Iterable[Entry], limit: float = math.inf) -> dict[Key, Any]:
        """Return the objects of held entries on a GPU that have at most ``limit`` bytes. Does not block.

        Threads that copy objects need these, since an entry drops its object when its key is deleted::

            Event loop                                Thread
            holds x, and gets its object here
            deletes x                                 copies the object
            stores x, which was computed again
            sends the copy
        """
        table = self._table
        with table.lock:
            small = [entry for entry in held if entry.live and entry.nbytes <= limit]
            return {entry.key: entry.value for entry in small if entry.home not in table.host_tiers}

    def device_messages(self, objects: Mapping[Key, Any]) -> dict[Key, Serialized]:
        """Return Dask messages of device objects; see :meth:`EntryReader.device_messages`. Blocks."""
        return self._reader.device_messages(objects)

    def reading(
        self, wanted: Iterable[tuple[Key, int]], reserved: Key | None = None
    ) -> AbstractContextManager[dict[tuple[Key, int], BufferAndMemo]]:
        """Read buffers of :class:`Raw` objects in a context; see :meth:`EntryReader.parts`. Blocks."""
        return self._reader.parts(wanted, reserved)

    # ---- spilling --------------------------------------------------------------------

    def make_room(self, nbytes: int, tier: Tier = Tier.DEVICE) -> int:
        """Spill until ``nbytes`` more fit into a tier, if possible; return the bytes spilled. Blocks."""
        return self._spiller.make_room(nbytes, tier)

    def spill(self, nbytes: int, tier: Tier = Tier.DEVICE) -> int:
        """Spill at least ``nbytes`` from a tier, if possible; return the bytes spilled. Blocks."""
        return self._spiller.spill(nbytes, tier)

    def set_elsewhere(self, roots: Iterable[int]) -> None:
        """Set the allocations of live objects that another library has currently moved off the device."""
        with self._table.lock:
            self._table.live.set_elsewhere(Tier.DEVICE, roots)
            self._table.account(Tier.DEVICE)

    # ---- accounts --------------------------------------------------------------------

    @property
    def host_tier(self) -> Tier:
        """Return the live tier in host memory: the device tier itself on a worker without a GPU."""
        return self._table.host_tier

    def live_bytes(self, tier: Tier) -> int:
        """Return the bytes of live objects in a tier, counting shared memory once."""
        return self._table.live.total(tier)

    def bytes_admitted(self, tier: Tier) -> int:
        """Return the cumulative bytes that have become live in a tier."""
        return self._table.live.admitted[tier]

    @property
    def removals(self) -> int:
        """Return the cumulative number of live objects spilled or deleted."""
        return self._table.live.removals

    def tier(self, key: Key) -> Tier:
        """Return the current tier of an object."""
        return self._table.by_key[key].tier

    def not_live(self, keys: Iterable[Key]) -> list[Key]:
        """Return those of ``keys`` that are in lower tiers."""
        with self._table.lock:
            return [entry.key for entry in self._known(keys) if not entry.live]

    def moving(self) -> list[Key]:
        """Return the keys that are moving between tiers."""
        return [key for key, entry in list(self._table.by_key.items()) if entry.moving]

    def largest(self, count: int) -> list[tuple[Key, int]]:
        """Return the ``count`` largest live keys, with their bytes."""
        with self._table.lock:
            live = [(key, entry.nbytes) for key, entry in self._table.by_key.items() if entry.live]
        return sorted(live, key=lambda item: -item[1])[:count]

    @property
    def spilled_total(self) -> Spilled:
        """Return Dask's metrics of spilled bytes; see :class:`Spilled`."""
        table = self._table
        with table.lock:
            entries = [entry for entry in table.by_key.values() if entry.label.kind == PARTITIONS]
        on_disk = sum(e.nbytes for e in entries if e.tier is Tier.DISK)
        on_device = sum(e.nbytes for e in entries if e.live and e.tier not in table.host_tiers)
        return Spilled(on_disk + on_device, table.lower.total(Tier.DISK))

    def close(self) -> None:
        """Wait for moves in flight, then delete everything, including files. Blocks."""
        self._table.close()
