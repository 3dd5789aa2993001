"""Define the table of a tiered buffer: the tier and the users of each object, and the memory accounts.

One lock guards the table, and it is never held while bytes are copied. A move therefore has two steps under
the lock, with the copy in between. ``Entry.moving`` excludes other moves of the entry. Everything else may
happen concurrently, so the second step checks again what the first one saw. The second steps,
``Spiller._end`` and ``Unspiller._end``, spell out the interleavings.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

from dask.typing import Key
from dask.utils import key_split

from dask_gpurt.device import Device
from dask_gpurt.device.libraries import lives_on_device
from dask_gpurt.memory.accounting import LiveAccount, owned
from dask_gpurt.memory.ledger import PARTITIONS, Label, Ledger, Limits, Tier
from dask_gpurt.memory.lower_tiers import LowerTier, LowerTiers
from dask_gpurt.observe import Metrics

#: A priority of Dask's scheduler, of which smaller ones run sooner; None if no task needs the object.
Priority = tuple[Any, ...] | None

#: Seconds for which closing waits for moves in flight.
CLOSE_TIMEOUT_S = 30.0


class ExternalRef(NamedTuple):
    """Refer to an object in another mapping: take it from there, or delete it there."""

    take: Callable[[], Any]
    delete: Callable[[], None]


@dataclass(eq=False)
class Entry:
    """Describe one key of a tiered buffer.

    ``value``: the object, while it is live.
    ``last_used``: time of the last use, on the table's clock.
    ``priority``: eviction priority of an object that is not an input of Dask's tasks, in place of their
    priorities.
    ``name``: the name of its copy in a lower tier.
    ``holders``: number of users of the live object; it must not be spilled while there are any.
    ``moving``: whether it is being moved between tiers.
    ``readers``, ``doomed``: number of readers of its copies in lower tiers, and the copies to delete after
    the last reader.
    ``immovable``: whether serialising it has failed.
    ``foreign``: refers to the object while it is in another mapping.
    """

    key: Key
    label: Label
    home: Tier
    tier: Tier
    value: Any
    nbytes: int
    last_used: int
    priority: Priority = None
    live: bool = True
    name: str = ""
    holders: int = 0
    moving: bool = False
    readers: int = 0
    doomed: list[tuple[Tier, str]] = field(default_factory=list)
    immovable: bool = False
    foreign: ExternalRef | None = field(default=None, repr=False)


class StoredCopy(NamedTuple):
    """Identify a copy in a lower tier; valid while it is retained."""

    entry: Entry
    tier: Tier
    name: str


class EntryTable:
    """Hold the entries by key, the lower tiers, and the memory accounts. Thread-safe.

    ``changed``: called after each change of the ledger; must not block.
    ``beside``: returns the bytes by which others reduce the live tier in host memory; must not block.
    ``lock``: guards the entries and the account. Re-entrant.
    ``stopped_moving``: condition on that lock, notified when a move ends.
    ``host_tiers``: the live tiers in host memory; copies of their objects in lower tiers can be read in
    place.
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
        changed: Callable[[], None],
        beside: Callable[[], int],
    ):
        self.limits = limits
        self.ledger = ledger
        self.device = device
        self._beside = beside
        self.metrics = metrics
        self.changed = changed
        self.home = home
        self.host_tiers = frozenset({Tier.HOST, Tier.DEVICE} if device.on_host else {Tier.HOST})
        self.lower = LowerTiers(lower, device, ledger, self._host_has_room)
        self.live = LiveAccount(limits, ledger)
        self.by_key: dict[Key, Entry] = {}
        self.lock = threading.RLock()
        self.stopped_moving = threading.Condition(self.lock)
        self._names = itertools.count()
        self._clock = itertools.count()

    def _host_has_room(self, nbytes: int) -> bool:
        # Live host objects and spilled ones share the host tier of a worker with a GPU.
        return Tier.DEVICE in self.host_tiers or self.excess(nbytes, Tier.HOST) <= 0

    def excess(self, nbytes: int, tier: Tier) -> int:
        """Return by how many bytes ``nbytes`` more would exceed a tier's limit; negative if there is room."""
        with self.lock:
            return self.live.excess(tier, nbytes, self.lower.total(tier) + self.beside(tier))

    def beside(self, tier: Tier) -> int:
        """Return the bytes by which others, such as pages of the exchange pool, reduce a live tier."""
        return self._beside() if tier is self.host_tier else 0

    @property
    def host_tier(self) -> Tier:
        """Return the live tier in host memory: the device tier itself on a worker without a GPU."""
        return Tier.DEVICE if Tier.DEVICE in self.host_tiers else Tier.HOST

    # ---- one entry -------------------------------------------------------------------

    def add(
        self, key: Key, label: Label, home: Tier, value: Any, nbytes: int, priority: Priority = None
    ) -> Entry:
        """Create the entry of a key, replacing any previous one."""
        entry = Entry(key, label, home, home, value, nbytes, self.tick(), priority)
        self.by_key[key] = entry
        return entry

    def is_current(self, entry: Entry) -> bool:
        """Return whether an entry is still in the table."""
        return self.by_key.get(entry.key) is entry

    def tick(self) -> int:
        """Advance the clock that orders uses, and return its time."""
        return next(self._clock)

    def new_name(self) -> str:
        """Return a unique name for a copy, since a previous copy of an object may still be read."""
        return str(next(self._names))

    def stop_moving(self, entry: Entry) -> None:
        """End the move of an entry, so that others can start."""
        with self.lock:
            entry.moving = False
            self.stopped_moving.notify_all()

    def release(self, held: Iterable[Entry]) -> None:
        """Make held entries evictable again, and measure their memory again."""
        held = list(held)
        with self.lock:
            for entry in held:
                entry.holders -= 1
                entry.last_used = self.tick()
            for entry in held:
                self.remeasure(entry)

    def remeasure(self, entry: Entry) -> None:
        """Measure the memory of an object again, after it was read. Under the lock.

        cudf's copy-on-write copies shared memory when its address is requested, as serialisation does.
        """
        if entry.live and lives_on_device(entry.value) and self.is_current(entry):
            self.live.revise(entry.key, owned(entry.value))
            self.account(entry.tier)

    # ---- copies in lower tiers -------------------------------------------------------

    def retain(self, entry: Entry, stack: ExitStack) -> StoredCopy:
        """Keep the copy of an entry in its lower tier until ``stack`` is closed. Under the lock.

        This makes reads without the lock safe::

            Thread 1                                  Thread 2
            retain(x), releases the lock
            reads the copy                            makes x live, or deletes it
                                                      delete_copy(x): x has a reader, so its copy is doomed
            closes the stack: the last reader
            deletes the doomed copies

        Names are never reused, so a copy made concurrently is a different one.
        """
        entry.readers += 1
        stack.callback(self._release_copy, entry)
        return StoredCopy(entry, entry.tier, entry.name)

    def _release_copy(self, entry: Entry) -> None:
        with self.lock:
            entry.readers -= 1
            while entry.doomed and not entry.readers:
                self.lower.discard(*entry.doomed.pop())
                self.account()

    def delete_copy(self, entry: Entry) -> None:
        """Delete the copy of an entry in its lower tier, after its last reader. Under the lock."""
        if entry.foreign is not None:
            entry.foreign.delete()
        elif entry.readers:
            entry.doomed.append((entry.tier, entry.name))
        else:
            self.lower.discard(entry.tier, entry.name)

    # ---- accounts --------------------------------------------------------------------

    def account(self, grown: Tier | None = None) -> None:
        """Publish a change of the ledger; ``grown`` is the tier whose peak may have risen."""
        if grown is not None:
            self.metrics.peak("memory.{tier}.peak", self.ledger.used(grown), str(grown))
        self.changed()

    def record_move(self, source: Tier, target: Tier, nbytes: int, seconds: float) -> None:
        """Count and record a completed move."""
        self.metrics.add("memory.spill.bytes.{from}.{to}", nbytes, str(source), str(target))
        self.metrics.add("memory.spill.seconds", seconds)
        if (recording := self.metrics.recording) is not None:
            step = "spill" if list(Tier).index(target) > list(Tier).index(source) else "unspill"
            began = perf_counter() - seconds
            recording.timed(step, began, seconds, source=str(source), target=str(target), bytes=nbytes)

    def close(self) -> None:
        """Wait for moves in flight, then delete everything, including files. Blocks."""
        with self.lock:
            self.stopped_moving.wait_for(
                lambda: not any(e.moving for e in self.by_key.values()), CLOSE_TIMEOUT_S
            )
            self.by_key.clear()
            self.live.clear()
        self.lower.close()


def label_of(key: Key, kind: str) -> Label:
    """Return the ledger's label of an object."""
    return Label(kind, key_split(key)) if kind == PARTITIONS else Label(kind)
