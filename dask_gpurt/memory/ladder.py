"""A worker's data in tiers: the mapping from keys to objects, whichever tier they lie in.

What tasks read is live: on the device, or for host objects of a worker with a GPU in host
memory. Below lie objects taken apart, one mapping for each tier. Moves block, so they are
made on threads: copy first, then let go of the copy above, unless somebody has begun to
read it meanwhile.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

from dask.typing import Key
from dask.utils import key_split

from dask_gpurt.device import Device
from dask_gpurt.memory.below import Below
from dask_gpurt.memory.frames import Frames, NotMovable, joined, put_together, take_apart
from dask_gpurt.memory.ledger import PARTITIONS, SHARDS, Ledger
from dask_gpurt.memory.live import Live
from dask_gpurt.memory.policy import Candidate, choose
from dask_gpurt.memory.sizes import owned
from dask_gpurt.memory.tiers import Limits, NoRoom, Tier
from dask_gpurt.observe import Metrics

#: Copies of objects that are being sent, for the coroutine that sends them.
serving: ContextVar[dict[Key, Any] | None] = ContextVar("serving", default=None)


class Spilled(NamedTuple):
    """What Dask asks a mapping for: bytes that are not in host memory, and bytes on disk."""

    memory: int
    disk: int


@dataclass
class _Entry:
    """One key. ``tier`` is where the object lies; ``value`` holds it while it is live there."""

    kind: str
    home: Tier
    tier: Tier
    value: Any
    nbytes: int
    prefix: str
    used: int
    #: When it is needed, for what no task of Dask's waits for.
    needed: tuple[float, ...] | None = None
    live: bool = True
    #: What it is called below.
    name: str = ""
    holders: int = 0
    moving: bool = False
    #: Who reads a copy below the live tiers, and the copies that go with the last of them.
    readers: int = 0
    doomed: list[tuple[Tier, str]] = field(default_factory=list)
    #: Reads it out of the mapping that was there before us.
    before: Callable[[], Any] | None = field(default=None, repr=False)


class Ladder(MutableMapping[Key, Any]):
    """The mapping that takes the place of a worker's ``data``. Thread-safe.

    Only :meth:`__getitem__` of a key that is not live copies on the calling thread: hold
    keys first, with :meth:`hold` on a thread that may wait.

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
    needed
        The soonest scheduler priority among the tasks of this worker that need a key, None
        without any. Called on any thread.
    changed
        Called after each change of the ledger; must not block.
    """

    def __init__(
        self,
        limits: Limits,
        below: dict[Tier, MutableMapping[str, Frames]],
        *,
        home: Callable[[Any], Tier],
        device: Device,
        ledger: Ledger,
        metrics: Metrics,
        needed: Callable[[Key], tuple[Any, ...] | None],
        changed: Callable[[], None],
    ):
        self.limits = limits
        self.ledger = ledger
        self._below = Below(below, device, self._host_room)
        self._home = home
        self._device = device
        self._metrics = metrics
        self._needed = needed
        self._changed = changed
        self._entries: dict[Key, _Entry] = {}
        self._live = Live(limits)
        self._names = itertools.count()
        self._clock = itertools.count()
        self._lock = threading.Condition(threading.RLock())
        #: One at a time makes room: two would choose the same objects.
        self._spilling = threading.RLock()

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
        needed: tuple[float, ...] | None = None,
    ) -> None:
        """Keep a live object, which takes the room that its key has been promised.

        Parameters
        ----------
        kind
            Keys of other kinds than partitions do not show in the mapping.
        home
            Where it is live, if that is not for the object to say.
        needed
            Its place among the priorities of tasks, if no task's input it is.
        """
        roots = owned(value)
        with self._lock:
            if key in self._entries:
                del self[key]
            self._live.forget(key)
            entry = self._new(key, kind, home or self._home(value), value, sum(roots.values()), needed)
            self._live.add(key, entry.home, kind, roots)
            self._account()

    def store_below(
        self, key: Key, frames: Frames, kind: str, *, home: Tier, needed: tuple[float, ...] | None = None
    ) -> Tier:
        """Keep what has been taken apart below its home, at once; returns where. Blocks.

        Raises
        ------
        NoRoom
            When all tiers are full.
        """
        name = str(next(self._names))
        tier = self._below.put(name, frames, kind, home, ordered=False)
        with self._lock:
            entry = self._new(key, kind, home, None, frames.nbytes, needed)
            entry.live, entry.tier, entry.name = False, tier, name
            self._account()
        return tier

    def adopt(self, key: Key, nbytes: int, read: Callable[[], Any]) -> None:
        """Take a key over from another mapping, in which it lies on disk; ``read`` takes it out."""
        with self._lock:
            entry = self._new(key, PARTITIONS, Tier.DEVICE, None, nbytes, None)
            entry.live, entry.tier, entry.before = False, Tier.DISK, read

    def _new(
        self, key: Key, kind: str, home: Tier, value: Any, nbytes: int, needed: tuple[float, ...] | None
    ) -> _Entry:
        prefix = key_split(key) if kind == PARTITIONS else kind
        entry = _Entry(kind, home, home, value, nbytes, prefix, next(self._clock), needed)
        self._entries[key] = entry
        return entry

    def __getitem__(self, key: Key) -> Any:
        served = serving.get()
        if served is not None and key in served:
            return served[key]
        with self._lock:
            entry = self._entries[key]
            if entry.live:
                entry.used = next(self._clock)
                return entry.value
        self._metrics.add("memory.unspill.unheld")
        held = self.hold([key])
        try:
            return entry.value
        finally:
            self.release(held)

    def __delitem__(self, key: Key) -> None:
        with self._lock:
            entry = self._entries.pop(key)
            if entry.live:
                self._live.discard(key)
            elif not entry.moving:
                self._drop(entry)
            entry.value = None
            self._account()

    def discard(self, key: Key) -> None:
        """Let a key go, if there is one."""
        with self._lock:
            if key in self._entries:
                del self[key]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Key]:
        return iter([key for key, entry in list(self._entries.items()) if entry.kind == PARTITIONS])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def tier(self, key: Key) -> Tier:
        """Where an object lies."""
        return self._entries[key].tier

    # ---- held: live, and not to be spilled ---------------------------------------------

    def hold_live(self, keys: Iterable[Key]) -> list[_Entry] | None:
        """As :meth:`hold`, if all keys are live already, else None; does not block."""
        with self._lock:
            entries = [self._entries[key] for key in keys if key in self._entries]
            if not all(entry.live for entry in entries):
                return None
            for entry in entries:
                entry.holders += 1
            return entries

    def hold(self, keys: Iterable[Key]) -> list[_Entry]:
        """Make keys live and keep them so; unknown ones are ignored. Blocks.

        Returns
        -------
        list
            What :meth:`release` takes.
        """
        held: list[_Entry] = []
        try:
            for key in keys:
                with self._lock:
                    entry = self._entries.get(key)
                    if entry is None:
                        continue
                    entry.holders += 1
                    held.append(entry)
                self._lift(key, entry)
        except BaseException:
            self.release(held)
            raise
        return held

    def release(self, held: Iterable[_Entry]) -> None:
        """Let what was held be spilled again."""
        with self._lock:
            for entry in held:
                entry.holders -= 1
                entry.used = next(self._clock)

    def hold_where_live(self, keys: Iterable[Key]) -> tuple[dict[Key, _Entry], list[Key]]:
        """Hold those of ``keys`` that are live, and name the others; does not block."""
        with self._lock:
            known = {key: self._entries[key] for key in keys if key in self._entries}
            held = {key: entry for key, entry in known.items() if entry.live}
            for entry in held.values():
                entry.holders += 1
            return held, [key for key in known if key not in held]

    @contextmanager
    def reading(self, keys: Iterable[Key]) -> Iterator[dict[Key, Any]]:
        """The objects for as long as the body runs, copies of what is not live. Blocks.

        This is for what is read once: it stays in the tier where it lies, and there is room
        for the copies.
        """
        held, lower = self.hold_where_live(keys)
        try:
            with self._lock:
                live = {key: entry.value for key, entry in held.items()}
                below = [(key, self._entries[key]) for key in lower if key in self._entries]
            for home in {entry.home for _, entry in below}:
                nbytes = sum(entry.nbytes for _, entry in below if entry.home is home)
                self.promise(("reading", id(held), home), nbytes, home)
            yield {**live, **self.copies(lower)}
        finally:
            self.release(held.values())
            for home in (Tier.DEVICE, Tier.HOST):
                self.forget_promise(("reading", id(held), home))

    def lower(self, keys: Iterable[Key]) -> list[Key]:
        """Those of ``keys`` that are not live."""
        with self._lock:
            return [key for key in keys if key in self._entries and not self._entries[key].live]

    def copies(self, keys: Iterable[Key]) -> dict[Key, Any]:
        """The objects, read from where they lie, which is where they stay. Blocks."""
        found = {}
        for key in keys:
            with self._lock:
                entry = self._entries.get(key)
                if entry is None:
                    continue
                if entry.live:
                    found[key] = entry.value
                    continue
            # What the mapping before us holds it gives out once, so that is kept here.
            found[key] = self[key] if entry.before is not None else self._read(entry)
        return found

    def _lift(self, key: Key, entry: _Entry) -> None:
        with self._lock:
            while entry.moving:
                self._lock.wait()
            if entry.live or self._entries.get(key) is not entry:
                return
            entry.moving = True
        came_from, began = entry.tier, perf_counter()
        try:
            self.promise(key, entry.nbytes, entry.home)
            value = self._read(entry)
        except BaseException:
            self.forget_promise(key)
            self._arrived(entry)
            raise
        roots = owned(value)
        with self._lock:
            self._live.forget(key)
            self._drop(entry)
            if self._entries.get(key) is entry:
                entry.before, entry.value, entry.live = None, value, True
                entry.home = entry.tier = self._home(value)
                self._live.add(key, entry.home, entry.kind, roots)
            self._account()
        self._arrived(entry)
        self._moved(came_from, entry.home, entry.nbytes, began)

    def _read(self, entry: _Entry) -> Any:
        if entry.before is not None:
            return entry.before()
        with self._lock:
            if entry.live:
                return entry.value
            tier, name = entry.tier, entry.name
            entry.readers += 1
        try:
            gather = self._device.gather if entry.home is Tier.DEVICE else joined
            return put_together(self._below.get(tier, name), gather)
        finally:
            with self._lock:
                entry.readers -= 1
                while entry.doomed and not entry.readers:
                    self._below.discard(*entry.doomed.pop())

    def _drop(self, entry: _Entry) -> None:
        """Let the copy below the live tiers go, once nobody reads it. Under the lock."""
        if entry.before is None:
            if entry.readers:
                entry.doomed.append((entry.tier, entry.name))
            else:
                self._below.discard(entry.tier, entry.name)

    def _arrived(self, entry: _Entry) -> None:
        with self._lock:
            entry.moving = False
            self._lock.notify_all()

    # ---- room ------------------------------------------------------------------------

    def live_bytes(self, tier: Tier) -> int:
        """Bytes of live objects in a tier, views and shared memory once."""
        return self._live.total(tier)

    def over(self) -> int:
        """Bytes by which live objects exceed their tiers, at most."""
        return max(self.live_bytes(Tier.DEVICE) - self.limits.device, 0)

    def _excess(self, nbytes: int, tier: Tier) -> int:
        """Bytes that are too many in a tier once ``nbytes`` more are live there."""
        with self._lock:
            return self._live.excess(tier, nbytes, self._below.total(tier))

    def _host_room(self, nbytes: int) -> bool:
        # Live host objects and spilled ones share the host tier of a worker with a GPU.
        return self._device.on_host or self._excess(nbytes, Tier.HOST) <= 0

    def keeps_live(self, nbytes: int, tier: Tier) -> bool:
        """Whether so many bytes would leave half of a tier to other things."""
        limit = self.limits.device if tier is Tier.DEVICE else self.limits.host
        return 2 * nbytes <= limit

    def make_room(self, nbytes: int, tier: Tier = Tier.DEVICE) -> int:
        """Spill until ``nbytes`` more fit into a tier, as far as that goes; the bytes spilled. Blocks."""
        if self._excess(nbytes, tier) <= 0:
            return 0
        with self._spilling:
            return self._spill(self._excess(nbytes, tier), tier)

    def promise_at_once(self, key: Key, nbytes: int, tier: Tier) -> bool:
        """Promise room to a key that will be stored, if there is some; does not block."""
        with self._lock:
            if self._excess(nbytes, tier) > 0:
                return False
            self._live.promise(key, tier, nbytes)
            self._account()
            return True

    def promise(self, key: Key, nbytes: int, tier: Tier) -> None:
        """Promise room to a key that will be stored; spills for it. Blocks."""
        self.make_room(nbytes, tier)
        with self._lock:
            self._live.promise(key, tier, nbytes)
            self._account()

    def forget_promise(self, key: Key) -> None:
        """A key will not be stored after all."""
        with self._lock:
            if self._live.forget(key):
                self._account()

    def bring(self, keys: Iterable[Key]) -> None:
        """Make keys live as far as there is room without spilling. Blocks."""
        for key in keys:
            with self._lock:
                entry = self._entries.get(key)
            if entry is None or self._excess(entry.nbytes, entry.home) > 0:
                return
            self._lift(key, entry)

    def largest(self, count: int) -> list[tuple[Key, int]]:
        """The live keys that take most."""
        with self._lock:
            live = [(key, entry.nbytes) for key, entry in self._entries.items() if entry.live]
        return sorted(live, key=lambda item: -item[1])[:count]

    def spill(self, nbytes: int, tier: Tier = Tier.DEVICE) -> int:
        """Spill at least ``nbytes`` out of a tier, as far as that goes; the bytes spilled. Blocks."""
        with self._spilling:
            return self._spill(nbytes, tier)

    def _spill(self, nbytes: int, tier: Tier) -> int:
        freed = 0
        for candidate in choose(self._candidates(tier), nbytes):
            if freed >= nbytes:
                break
            freed += candidate.nbytes if self._spill_one(candidate.key, tier) else 0
        return freed

    def _candidates(self, tier: Tier) -> list[Candidate]:
        with self._lock:
            free = [
                (key, entry, self._live.gain(key, tier))
                for key, entry in self._entries.items()
                if entry.live and entry.home is tier and not entry.holders and not entry.moving
            ]
        return [
            Candidate(key, gain, entry.needed or self._needed(key), entry.used) for key, entry, gain in free
        ]

    def _spill_one(self, key: Key, tier: Tier) -> bool:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or not entry.live or entry.holders or entry.moving:
                return False
            entry.moving, value, used = True, entry.value, entry.used
        name = str(next(self._names))  # of its own, since an earlier copy may still be read
        began = perf_counter()
        try:
            target = self._put_below(name, entry.kind, value, tier)
            if target is not None and not self._leave(key, entry, target, name, used):
                self._below.discard(target, name)
                target = None
        finally:
            self._arrived(entry)
        if target is not None:
            self._moved(tier, target, entry.nbytes, began)
        return target is not None

    def _put_below(self, name: str, kind: str, value: Any, tier: Tier) -> Tier | None:
        try:
            return self._below.put(name, take_apart(value), kind, tier)
        except NotMovable as error:
            self._metrics.fallback("an object stays live", str(error))
        except NoRoom as error:
            self._metrics.fallback("objects stay live above their tier's limit", str(error))
        return None

    def _leave(self, key: Key, entry: _Entry, target: Tier, name: str, used: int) -> bool:
        """Second phase: let go of the live object, unless it is gone or was read meanwhile."""
        with self._lock:
            if self._entries.get(key) is not entry or entry.holders or entry.used != used:
                return False
            entry.live, entry.value, entry.tier, entry.name = False, None, target, name
            self._live.discard(key)
            self._account()
            return True

    # ---- accounts --------------------------------------------------------------------

    def _moved(self, source: Tier, target: Tier, nbytes: int, began: float) -> None:
        self._metrics.add(f"memory.spill.bytes.{source}.{target}", nbytes)
        self._metrics.add("memory.spill.seconds", perf_counter() - began)

    def _account(self) -> None:
        for tier in Tier:
            for kind in (PARTITIONS, SHARDS):
                nbytes = self._live.of_kind(tier, kind) + self._below.used(tier, kind)
                self.ledger.set(tier, kind, nbytes)
            self.ledger.set(tier, "reservations", self._live.promised(tier))
            self._metrics.peak(f"memory.{tier}.peak", self.ledger.used(tier))
        self._changed()

    @property
    def spilled_total(self) -> Spilled:
        """For Dask's metrics: what does not lie in host memory, and what lies on disk."""
        with self._lock:
            entries = [entry for entry in self._entries.values() if entry.kind == PARTITIONS]
        off_host = [e.nbytes for e in entries if e.tier is Tier.DISK]
        if not self._device.on_host:
            off_host += [e.nbytes for e in entries if e.live and e.tier is Tier.DEVICE]
        return Spilled(sum(off_host), self._below.total(Tier.DISK))

    def close(self) -> None:
        """Let everything go, files included. Blocks."""
        with self._lock:
            self._entries.clear()
            self._live.clear()
        self._below.close()
