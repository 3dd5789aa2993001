"""Every object of a worker: which tier it lies in, who uses it, and what all of them take."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dask.typing import Key
from dask.utils import key_split

from dask_gpurt.device import Device
from dask_gpurt.device.base import Buffer, Fence
from dask_gpurt.memory.accounting import Live, owned
from dask_gpurt.memory.ledger import PARTITIONS, Label, Ledger
from dask_gpurt.memory.lower_tiers import Below
from dask_gpurt.memory.serialize import Scattered, joined, lives_on_device, on_device, put_together
from dask_gpurt.memory.tiers import Limits, Tier
from dask_gpurt.observe import Metrics

#: Where a need stands among the priorities of tasks; a smaller one comes sooner.
Need = tuple[Any, ...] | None


#: Seconds for which the end of moves is waited for when everything is let go.
PATIENCE = 30.0


class Spilled(NamedTuple):
    """What Dask asks a mapping for: bytes that are not in host memory, and bytes on disk."""

    memory: int
    disk: int


@dataclass(eq=False)
class Entry:
    """One key. ``tier`` is where the object lies; ``value`` holds it while it is live there."""

    key: Key
    label: Label
    home: Tier
    tier: Tier
    value: Any
    nbytes: int
    used: int
    #: When it is needed, for what no task of Dask's waits for.
    needed: Need = None
    live: bool = True
    #: What it is called below.
    name: str = ""
    holders: int = 0
    moving: bool = False
    #: Who reads a copy below the live tiers, and the copies that go with the last of them.
    readers: int = 0
    doomed: list[tuple[Tier, str]] = field(default_factory=list)
    #: Whether it can not be moved.
    fixed: bool = False
    #: While it lies in the mapping that was there before us: takes it out, and lets it go.
    before: tuple[Callable[[], Any], Callable[[], None]] | None = field(default=None, repr=False)


#: A copy below that stays as long as it is read: of what, in which tier, under which name.
Copy = tuple[Entry, Tier, str]


class Entries:
    """Objects by key, the tiers below them, and the account. Thread-safe.

    Parameters
    ----------
    limits
        Bytes of each tier.
    below
        The mappings of the lower tiers, in order.
    home
        The tier in which an object is live.
    device
        What the device tier is the memory of.
    changed
        Called after each change of the ledger; must not block.
    """

    def __init__(
        self,
        limits: Limits,
        below: Mapping[Tier, Any],
        *,
        home: Callable[[Any], Tier],
        device: Device,
        ledger: Ledger,
        metrics: Metrics,
        changed: Callable[[], None],
    ):
        self.limits = limits
        self.ledger = ledger
        self._below = Below(below, device, ledger, self._host_room)
        self._home = home
        self._device = device
        self._metrics = metrics
        self._changed = changed
        self._entries: dict[Key, Entry] = {}
        self._live = Live(limits, ledger)
        self._names = itertools.count()
        self._clock = itertools.count()
        #: Notified when an entry has stopped moving.
        self._lock = threading.Condition(threading.RLock())

    def _host_room(self, nbytes: int) -> bool:
        # Live host objects and spilled ones share the host tier of a worker with a GPU.
        return self._device.on_host or self._excess(nbytes, Tier.HOST) <= 0

    def _excess(self, nbytes: int, tier: Tier) -> int:
        """Bytes that are too many in a tier once ``nbytes`` more are live there."""
        with self._lock:
            return self._live.excess(tier, nbytes, self._below.total(tier))

    # ---- one entry -------------------------------------------------------------------

    def _new(self, key: Key, label: Label, home: Tier, value: Any, nbytes: int, needed: Need) -> Entry:
        entry = Entry(key, label, home, home, value, nbytes, next(self._clock), needed)
        self._entries[key] = entry
        return entry

    def _new_name(self) -> str:
        # Never one twice, since an earlier copy of an object may still be read.
        return str(next(self._names))

    def _drop(self, entry: Entry) -> None:
        """Let the copy below the live tiers go, once nobody reads it. Under the lock."""
        if entry.before is not None:
            _, let_go = entry.before
            let_go()
        elif entry.readers:
            entry.doomed.append((entry.tier, entry.name))
        else:
            self._below.discard(entry.tier, entry.name)

    def _arrived(self, entry: Entry) -> None:
        with self._lock:
            entry.moving = False
            self._lock.notify_all()

    def _revise(self, entry: Entry) -> None:
        """Look again what an object owns, now that it has been read. Under the lock.

        cudf copies memory that objects share for the one whose address is asked for, and to serialise it
        asks for that.
        """
        if entry.live and lives_on_device(entry.value) and self._entries.get(entry.key) is entry:
            self._live.revise(entry.key, owned(entry.value))
            self._account(entry.tier)

    # ---- reading what is below -------------------------------------------------------

    def _pin(self, entry: Entry, stack: ExitStack) -> Copy:
        """Let the copy of an entry below stay until ``stack`` is left. Under the lock."""
        entry.readers += 1
        stack.callback(self._unpin, entry)
        return entry, entry.tier, entry.name

    def _unpin(self, entry: Entry) -> None:
        with self._lock:
            entry.readers -= 1
            while entry.doomed and not entry.readers:
                self._below.discard(*entry.doomed.pop())
                self._account()

    def _read(self, copy: Copy, stack: ExitStack) -> Any:
        """The object again; it is complete when ``stack`` has been left."""
        _, tier, name = copy
        gathering = self._gathering(copy)
        stack.callback(gathering.wait)
        return put_together(self._below.get(tier, name, to_device=not self._on_host(copy)), gathering)

    def _on_host(self, copy: Copy) -> bool:
        """Whether what lies in host memory can be read as it is."""
        entry, _, _ = copy
        return self._device.on_host or entry.home is Tier.HOST

    def _gathering(self, copy: Copy) -> Gathering:
        return Gathering(None if self._on_host(copy) else self._device)

    # ---- accounts --------------------------------------------------------------------

    def live_bytes(self, tier: Tier) -> int:
        """Bytes of live objects in a tier, views and shared memory once."""
        return self._live.total(tier)

    def came(self, tier: Tier) -> int:
        """Bytes that have become live in a tier so far, whether they still are or not."""
        return self._live.came[tier]

    @property
    def left(self) -> int:
        """How many objects have ceased to be live so far, spilled or gone."""
        return self._live.left

    def tier(self, key: Key) -> Tier:
        """Where an object lies."""
        return self._entries[key].tier

    def lower(self, keys: Iterable[Key]) -> list[Key]:
        """Those of ``keys`` that are not live."""
        with self._lock:
            return [key for key in keys if key in self._entries and not self._entries[key].live]

    def largest(self, count: int) -> list[tuple[Key, int]]:
        """The live keys that take most."""
        with self._lock:
            live = [(key, entry.nbytes) for key, entry in self._entries.items() if entry.live]
        return sorted(live, key=lambda item: -item[1])[:count]

    @property
    def spilled_total(self) -> Spilled:
        """For Dask's metrics: what does not lie in host memory, and what lies on disk."""
        with self._lock:
            entries = [entry for entry in self._entries.values() if entry.label.kind == PARTITIONS]
        off_host = [e.nbytes for e in entries if e.tier is Tier.DISK]
        if not self._device.on_host:
            off_host += [e.nbytes for e in entries if e.live and e.tier is Tier.DEVICE]
        return Spilled(sum(off_host), self._below.total(Tier.DISK))

    def _moved(self, source: Tier, target: Tier, nbytes: int, seconds: float) -> None:
        self._metrics.add(f"memory.spill.bytes.{source}.{target}", nbytes)
        self._metrics.add("memory.spill.seconds", seconds)

    def _account(self, grown: Tier | None = None) -> None:
        """The ledger has changed; there may be more in a tier than ever before."""
        if grown is not None:
            self._metrics.peak(f"memory.{grown}.peak", self.ledger.used(grown))
        self._changed()

    def close(self) -> None:
        """Let everything go, files included, once nothing moves any more. Blocks."""
        with self._lock:
            self._lock.wait_for(lambda: not any(e.moving for e in self._entries.values()), PATIENCE)
            self._entries.clear()
            self._live.clear()
        self._below.close()


def label_of(key: Key, kind: str) -> Label:
    """What an object is to the ledger."""
    return Label(kind, key_split(key)) if kind == PARTITIONS else Label(kind)


class Gathering:
    """Buffers on their way up: to the device, or into new host memory without one."""

    def __init__(self, device: Device | None):
        self._device = device
        self._fence: Fence | None = None

    def __call__(self, pieces: Scattered) -> Buffer:
        if on_device(pieces):
            return pieces[0]
        if self._device is None:
            return joined(pieces)
        buffer, self._fence = self._device.gather(pieces)
        return buffer

    def wait(self) -> None:
        # One thread's copies are made in order, so the last fence is behind all of them.
        if self._fence is not None:
            self._fence()
