"""Keep a worker's data in tiers: map keys to objects, whichever tier they lie in.

Tasks read live objects: on the device, or in host memory for host objects of a worker with a GPU. The lower
tiers (pinned memory, host memory, disk) hold serialised objects. The parts are

- the table of all entries, under one lock (:mod:`~dask_gpurt.memory.entries`),
- what moves objects down and up (:mod:`~dask_gpurt.memory.spilling`, :mod:`~dask_gpurt.memory.unspilling`),
- what reads them where they lie (:mod:`~dask_gpurt.memory.reading`),
- what reserves room before it is taken (:mod:`~dask_gpurt.memory.reservations`).

Which object goes down first is decided in :mod:`~dask_gpurt.memory.policy`. Moves block, so they are made on
threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from typing import Any, NamedTuple

from dask.typing import Key
from distributed.protocol.serialize import Serialized

from dask_gpurt.device import Device
from dask_gpurt.memory.disk import CorruptFile
from dask_gpurt.memory.entries import Entry, EntryTable, Foreign, Priority, label_of
from dask_gpurt.memory.ledger import PARTITIONS, Ledger
from dask_gpurt.memory.lower_tiers import LowerTier
from dask_gpurt.memory.reading import BufferAndMemo, Reader
from dask_gpurt.memory.reservations import Reservations
from dask_gpurt.memory.serialize import Frames
from dask_gpurt.memory.spilling import Spiller
from dask_gpurt.memory.tiers import Limits, Tier
from dask_gpurt.memory.unspilling import Unspiller
from dask_gpurt.observe import Metrics

#: Copies of objects that are being sent, for the coroutine that sends them.
serving: ContextVar[dict[Key, Any] | None] = ContextVar("serving", default=None)


class Spilled(NamedTuple):
    """Report, as Dask asks of a mapping, the bytes that are not in host memory and the bytes on disk."""

    memory: int
    disk: int


class TieredBuffer(MutableMapping[Key, Any]):
    """Take the place of a worker's ``data``, as a mapping over all tiers. Thread-safe.

    Only :meth:`__getitem__` of a key that is not live copies on the calling thread: hold
    keys first, with :meth:`hold` on a thread that may wait.

    Parameters
    ----------
    limits
        Bytes of each tier.
    lower
        The lower tiers, from fast to slow.
    home
        Returns the tier in which an object is live.
    device
        The device whose memory the device tier is.
    ledger
        The account of the worker, which is kept up to date.
    priority_of
        Returns the soonest scheduler priority among the tasks of this worker that need a key, None
        without any. Called on any thread.
    changed
        Called after each change of the ledger; must not block.

    Attributes
    ----------
    reservations
        Room in the live tiers that is promised before it is taken.
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
    ):
        self.limits = limits
        self.ledger = ledger
        self._metrics = metrics
        self._table = EntryTable(
            limits, lower, home=home, device=device, ledger=ledger, metrics=metrics, changed=changed
        )
        self._spiller = Spiller(self._table, priority_of)
        self.reservations = Reservations(self._table, self._spiller)
        self._reader = Reader(self._table, self.reservations)
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
        """Keep a live object, which takes the room that is reserved under its key.

        Parameters
        ----------
        kind
            Keys of other kinds than partitions do not show in the mapping.
        home
            The tier in which it is live, if that is not for the object to say.
        priority
            Its place among the priorities of tasks, if it is the input of none.
        """
        table, label = self._table, label_of(key, kind)
        roots = self.reservations.measured(key, value)
        with table.lock:
            if key in table.by_key:
                del self[key]
            table.live.cancel(key)
            home = home or table.home(value)
            entry = table.add(key, label, home, value, sum(roots.values()), priority)
            table.live.add(key, entry.home, label, roots)
            table.account(entry.home)

    def store_below(
        self, key: Key, frames: Frames, kind: str, *, home: Tier, priority: Priority = None
    ) -> Tier:
        """Keep what has been taken apart in a tier below its home, at once; return which. Blocks.

        Raises
        ------
        NoRoom
            When all tiers are full.
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

    def adopt(self, key: Key, nbytes: int, take: Callable[[], Any], delete: Callable[[], None]) -> None:
        """Take a key over from another mapping, in which it lies on disk.

        Parameters
        ----------
        take, delete
            Take it out of there, and delete it if it is still there.
        """
        table = self._table
        with table.lock:
            entry = table.add(key, label_of(key, PARTITIONS), Tier.DEVICE, None, nbytes)
            entry.live, entry.tier, entry.foreign = False, Tier.DISK, Foreign(take, delete)

    def __getitem__(self, key: Key) -> Any:
        served = serving.get()
        if served is not None and key in served:
            return served[key]
        # Again where another thread has spilled the object, or replaced it, between the two calls.
        while not (found := self._if_live(key)):
            self._metrics.add("memory.unspill.unheld")
            self.release(self.hold([key]))
        return found[0]

    def _if_live(self, key: Key) -> tuple[Any, ...]:
        """Return the object of a key, if it is live; KeyError without any."""
        with self._table.lock:
            entry = self._table.by_key[key]
            entry.last_used = self._table.tick()
            return (entry.value,) if entry.live else ()

    def __delitem__(self, key: Key) -> None:
        table = self._table
        with table.lock:
            entry = table.by_key.pop(key)
            if entry.live:
                table.live.discard(key)
            elif not entry.moving:  # else the thread that moves it deletes its copy
                table.delete_copy(entry)
            entry.value = None
            table.account()

    def discard(self, key: Key) -> None:
        """Delete a key, if there is one."""
        with self._table.lock:
            if key in self._table.by_key:
                del self[key]

    def __contains__(self, key: object) -> bool:
        return key in self._table.by_key

    def __iter__(self) -> Iterator[Key]:
        entries = list(self._table.by_key.items())
        return iter([key for key, entry in entries if entry.label.kind == PARTITIONS])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    # ---- held: live, and not to be spilled ---------------------------------------------

    def hold(self, keys: Iterable[Key]) -> list[Entry]:
        """Make keys live and keep them so; unknown ones are ignored. Blocks.

        Returns
        -------
        list
            For :meth:`release`.
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
        """Hold keys if all of them are live already, else return None; does not block."""
        with self._table.lock:
            entries = self._known(keys)
            if not all(entry.live for entry in entries):
                return None
            for entry in entries:
                entry.holders += 1
            return entries

    def hold_where_live(self, keys: Iterable[Key]) -> tuple[dict[Key, Entry], list[Key]]:
        """Hold those of ``keys`` that are live, and return the others too; does not block."""
        with self._table.lock:
            known = self._known(keys)
            held = {entry.key: entry for entry in known if entry.live}
            for entry in held.values():
                entry.holders += 1
            return held, [key for key in dict.fromkeys(entry.key for entry in known) if key not in held]

    def release(self, held: Iterable[Entry]) -> None:
        """Let what was held be spilled again, and look again at what it owns."""
        self._table.release(held)

    def _known(self, keys: Iterable[Key]) -> list[Entry]:
        by_key = self._table.by_key
        return [by_key[key] for key in keys if key in by_key]

    def prefetch(self, keys: Iterable[Key]) -> None:
        """Make keys live as far as there is room without spilling. Blocks."""
        self._unspiller.prefetch(keys)

    # ---- read where they lie -----------------------------------------------------------

    def copies(self, keys: Iterable[Key]) -> dict[Key, Any]:
        """Return objects, read from where they lie, which is where they stay. Blocks."""
        found, foreign = self._reader.copies(keys)
        # Another mapping gives an object out once, so that is kept here.
        return found | {key: self[key] for key in foreign}

    def unreadable(self, keys: Iterable[Key]) -> list[Key]:
        """Return those of ``keys`` that cannot be read any more. Blocks."""
        lost = []
        for key in keys:
            try:
                self.copies([key])
            except CorruptFile:
                lost.append(key)
        return lost

    def messages(self, keys: Iterable[Key], stack: ExitStack) -> dict[Key, Serialized]:
        """Return what Dask sends of objects in lower tiers; see :meth:`Reader.messages`. Blocks."""
        return self._reader.messages(keys, stack)

    def reading(
        self, wanted: Iterable[tuple[Key, int]], reserved: Key | None = None
    ) -> AbstractContextManager[dict[tuple[Key, int], BufferAndMemo]]:
        """Read some buffers of :class:`Raw` objects meanwhile; see :meth:`Reader.parts`. Blocks."""
        return self._reader.parts(wanted, reserved)

    # ---- down ------------------------------------------------------------------------

    def make_room(self, nbytes: int, tier: Tier = Tier.DEVICE) -> int:
        """Spill until ``nbytes`` more fit into a tier, as far as that goes; return the bytes. Blocks."""
        return self._spiller.make_room(nbytes, tier)

    def spill(self, nbytes: int, tier: Tier = Tier.DEVICE) -> int:
        """Spill at least ``nbytes`` out of a tier, as far as that goes; return the bytes. Blocks."""
        return self._spiller.spill(nbytes, tier)

    def set_elsewhere(self, roots: Iterable[int]) -> None:
        """Note which allocations of live objects another library has moved off the device, for now."""
        with self._table.lock:
            self._table.live.set_elsewhere(Tier.DEVICE, roots)
            self._table.account(Tier.DEVICE)

    # ---- accounts --------------------------------------------------------------------

    @property
    def host_tier(self) -> Tier:
        """Return the live tier that is host memory: the device tier itself on a worker without a GPU."""
        return Tier.DEVICE if Tier.DEVICE in self._table.host_tiers else Tier.HOST

    def live_bytes(self, tier: Tier) -> int:
        """Return the bytes of live objects in a tier, views and shared memory once."""
        return self._table.live.total(tier)

    def bytes_admitted(self, tier: Tier) -> int:
        """Return how many bytes have become live in a tier so far, whether they still are or not."""
        return self._table.live.admitted[tier]

    @property
    def removals(self) -> int:
        """Return how many objects have ceased to be live so far, spilled or deleted."""
        return self._table.live.removals

    def tier(self, key: Key) -> Tier:
        """Return where an object lies."""
        return self._table.by_key[key].tier

    def not_live(self, keys: Iterable[Key]) -> list[Key]:
        """Return those of ``keys`` that lie in lower tiers."""
        with self._table.lock:
            return [entry.key for entry in self._known(keys) if not entry.live]

    def moving(self) -> list[Key]:
        """Return the keys that are on their way from tier to tier."""
        return [key for key, entry in list(self._table.by_key.items()) if entry.moving]

    def largest(self, count: int) -> list[tuple[Key, int]]:
        """Return the live keys that take most, with their bytes."""
        with self._table.lock:
            live = [(key, entry.nbytes) for key, entry in self._table.by_key.items() if entry.live]
        return sorted(live, key=lambda item: -item[1])[:count]

    @property
    def spilled_total(self) -> Spilled:
        """Return, for Dask's metrics, what does not lie in host memory, and what lies on disk."""
        table = self._table
        with table.lock:
            entries = [entry for entry in table.by_key.values() if entry.label.kind == PARTITIONS]
        on_disk = sum(e.nbytes for e in entries if e.tier is Tier.DISK)
        on_device = sum(e.nbytes for e in entries if e.live and e.tier not in table.host_tiers)
        return Spilled(on_disk + on_device, table.lower.total(Tier.DISK))

    def close(self) -> None:
        """Delete everything, files included, when the moves under way have ended. Blocks."""
        self._table.close()
