"""Keep the table of a tiered buffer: where each object lies, what uses it, and the account of all of them.

One lock guards the table, and it is never held while bytes move. A move therefore has two steps under the
lock, with the copy in between. ``Entry.moving`` keeps other moves of the entry out meanwhile; everything else
goes on, so the second step looks again at what the first one saw. The cases are spelt out where the second
steps are: in ``Spiller._end`` and ``Unspiller._end``.
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
from dask_gpurt.device.base import lives_on_device
from dask_gpurt.memory.accounting import LiveAccount, owned
from dask_gpurt.memory.ledger import PARTITIONS, Label, Ledger
from dask_gpurt.memory.lower_tiers import LowerTier, LowerTiers
from dask_gpurt.memory.tiers import Limits, Tier
from dask_gpurt.observe import Metrics

#: A priority of Dask's scheduler: a smaller one runs sooner; None where no task needs an object.
Priority = tuple[Any, ...] | None

#: Seconds for which closing waits for the end of moves.
CLOSE_TIMEOUT_S = 30.0


class Foreign(NamedTuple):
    """Stand for an object that still lies in another mapping: take it out of there, or delete it there."""

    take: Callable[[], Any]
    delete: Callable[[], None]


@dataclass(eq=False)
class Entry:
    """Describe one key of a tiered buffer.

    Attributes
    ----------
    home
        The tier in which the object is live.
    tier
        The tier in which it lies.
    value
        The object, while it is live.
    last_used
        When it was used last, on a clock of the table.
    priority
        Stands for the priorities of tasks, for objects that no task of Dask's waits for.
    name
        What the object is called in the lower tier where it lies.
    holders
        How many use it as a live object, so that it must not be spilled.
    moving
        Whether it is on its way from one tier to another.
    readers, doomed
        How many read its copies in lower tiers, and the copies that go when the last of them is done.
    immovable
        Whether it has been found that it cannot be taken apart.
    foreign
        Where it lies, as long as that is not one of our tiers.
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
    foreign: Foreign | None = field(default=None, repr=False)


class StoredCopy(NamedTuple):
    """Name a copy in a lower tier, which stays as long as it is retained."""

    entry: Entry
    tier: Tier
    name: str


class EntryTable:
    """Keep the entries by key, the tiers below them, and the account. Thread-safe.

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
    changed
        Called after each change of the ledger; must not block.

    Attributes
    ----------
    lock
        Guards the entries and the account. Re-entrant.
    stopped_moving
        The condition, on that lock, which is notified when an entry has stopped moving.
    host_tiers
        The live tiers that are host memory, so that what lies in lower tiers is read as it is.
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
    ):
        self.limits = limits
        self.ledger = ledger
        self.device = device
        self.metrics = metrics
        self.changed = changed
        self.home = home
        self.host_tiers = frozenset({Tier.HOST} if device.host_links else {Tier.HOST, Tier.DEVICE})
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
        """Return the bytes that are too many in a tier with ``nbytes`` more in it; negative is room."""
        with self.lock:
            return self.live.excess(tier, nbytes, self.lower.total(tier))

    # ---- one entry -------------------------------------------------------------------

    def add(
        self, key: Key, label: Label, home: Tier, value: Any, nbytes: int, priority: Priority = None
    ) -> Entry:
        """Make the entry of a key, in the place of any that it had."""
        entry = Entry(key, label, home, home, value, nbytes, self.tick(), priority)
        self.by_key[key] = entry
        return entry

    def is_current(self, entry: Entry) -> bool:
        """Return whether an entry is still the one of its key."""
        return self.by_key.get(entry.key) is entry

    def tick(self) -> int:
        """Return the next time of the clock by which uses are ordered."""
        return next(self._clock)

    def new_name(self) -> str:
        """Return a name for a copy: never one twice, since an earlier copy of an object may still be read."""
        return str(next(self._names))

    def stop_moving(self, entry: Entry) -> None:
        """Let other moves of an entry begin."""
        with self.lock:
            entry.moving = False
            self.stopped_moving.notify_all()

    def release(self, held: Iterable[Entry]) -> None:
        """Let live entries that were held be spilled again, and look again at what they own."""
        held = list(held)
        with self.lock:
            for entry in held:
                entry.holders -= 1
                entry.last_used = self.tick()
            for entry in held:
                self.remeasure(entry)

    def remeasure(self, entry: Entry) -> None:
        """Look again at what an object owns, now that it has been read. Under the lock.

        cudf copies memory that objects share for the one whose address is asked for, and to serialise it
        asks for that.
        """
        if entry.live and lives_on_device(entry.value) and self.is_current(entry):
            self.live.revise(entry.key, owned(entry.value))
            self.account(entry.tier)

    # ---- copies in lower tiers -------------------------------------------------------

    def retain(self, entry: Entry, stack: ExitStack) -> StoredCopy:
        """Keep the copy of an entry in its lower tier until ``stack`` is left. Under the lock.

        This is what makes reading without the lock safe::

            Thread 1                                  Thread 2
            retain(x), lets the lock go
            reads the copy                            makes x live, or deletes it
                                                      delete_copy(x): x has a reader, so its copy is doomed
            leaves the stack: the last reader
            deletes what is doomed

        Names are used once, so that a copy that is made meanwhile is another one.
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
        """Delete the copy of an entry in its lower tier, once the last reader is done. Under the lock."""
        if entry.foreign is not None:
            entry.foreign.delete()
        elif entry.readers:
            entry.doomed.append((entry.tier, entry.name))
        else:
            self.lower.discard(entry.tier, entry.name)

    # ---- accounts --------------------------------------------------------------------

    def account(self, grown: Tier | None = None) -> None:
        """Tell of a change of the ledger; ``grown`` names the tier that may be fuller than ever before."""
        if grown is not None:
            self.metrics.peak("memory.{tier}.peak", self.ledger.used(grown), str(grown))
        self.changed()

    def record_move(self, source: Tier, target: Tier, nbytes: int, seconds: float) -> None:
        """Count a move that is complete."""
        self.metrics.add("memory.spill.bytes.{from}.{to}", nbytes, str(source), str(target))
        self.metrics.add("memory.spill.seconds", seconds)
        if (recording := self.metrics.recording) is not None:
            step = "spill" if list(Tier).index(target) > list(Tier).index(source) else "unspill"
            began = perf_counter() - seconds
            recording.timed(step, began, seconds, source=str(source), target=str(target), bytes=nbytes)

    def close(self) -> None:
        """Delete everything, files included, when the moves under way have ended. Blocks."""
        with self.lock:
            self.stopped_moving.wait_for(
                lambda: not any(e.moving for e in self.by_key.values()), CLOSE_TIMEOUT_S
            )
            self.by_key.clear()
            self.live.clear()
        self.lower.close()


def label_of(key: Key, kind: str) -> Label:
    """Return what an object is to the ledger."""
    return Label(kind, key_split(key)) if kind == PARTITIONS else Label(kind)
