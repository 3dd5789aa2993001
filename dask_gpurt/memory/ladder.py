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
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from dask.typing import Key
from dask.utils import key_split

from dask_gpurt.device import Device
from dask_gpurt.memory.frames import Frames, NotMovable, put_together, take_apart
from dask_gpurt.memory.ledger import Ledger
from dask_gpurt.memory.policy import Candidate, choose
from dask_gpurt.memory.sizes import Owned, owned
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

    name: str
    home: Tier
    tier: Tier
    value: Any
    nbytes: int
    prefix: str
    used: int
    live: bool = True
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
        self._below = below
        self._home = home
        self._device = device
        self._metrics = metrics
        self._needed = needed
        self._changed = changed
        self._entries: dict[Key, _Entry] = {}
        self._live = {Tier.DEVICE: Owned(), Tier.HOST: Owned()}
        self._promised: dict[Key, tuple[Tier, int]] = {}
        self._names = itertools.count()
        self._clock = itertools.count()
        self._lock = threading.Condition(threading.RLock())
        #: One at a time makes room: two would choose the same objects.
        self._spilling = threading.Lock()

    # ---- the mapping -----------------------------------------------------------------

    def __setitem__(self, key: Key, value: Any) -> None:
        roots = owned(value)
        with self._lock:
            if key in self._entries:
                del self[key]
            self._promised.pop(key, None)
            entry = self._new(key, self._home(value), value, sum(roots.values()))
            self._live[entry.home].add(key, roots)
            self._account()

    def adopt(self, key: Key, nbytes: int, read: Callable[[], Any]) -> None:
        """Take a key over from another mapping, in which it lies on disk; ``read`` takes it out."""
        with self._lock:
            entry = self._new(key, Tier.DEVICE, None, nbytes)
            entry.live, entry.tier, entry.before = False, Tier.DISK, read

    def _new(self, key: Key, home: Tier, value: Any, nbytes: int) -> _Entry:
        entry = _Entry("", home, home, value, nbytes, key_split(key), next(self._clock))
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
                self._live[entry.home].discard(key)
            elif not entry.moving:
                self._drop(entry)
            entry.value = None
            self._account()

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Key]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

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

    def hold_where_live(self, keys: Iterable[Key]) -> tuple[list[_Entry], list[Key]]:
        """Hold those of ``keys`` that are live, and name the others; does not block."""
        with self._lock:
            known = [(key, self._entries[key]) for key in keys if key in self._entries]
            held = [entry for _, entry in known if entry.live]
            for entry in held:
                entry.holders += 1
            return held, [key for key, entry in known if not entry.live]

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
            self._promised.pop(key, None)
            self._drop(entry)
            if self._entries.get(key) is entry:
                entry.before, entry.value, entry.live = None, value, True
                entry.home = entry.tier = self._home(value)
                self._live[entry.home].add(key, roots)
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
            frames = self._below[tier][name] if tier is not Tier.DISK else None
            entry.readers += 1
        try:
            return put_together(frames or self._below[tier][name], self._device.gather)
        finally:
            with self._lock:
                entry.readers -= 1
                while entry.doomed and not entry.readers:
                    tier, name = entry.doomed.pop()
                    del self._below[tier][name]

    def _drop(self, entry: _Entry) -> None:
        """Let the copy below the live tiers go, once nobody reads it. Under the lock."""
        if entry.before is None:
            if entry.readers:
                entry.doomed.append((entry.tier, entry.name))
            else:
                del self._below[entry.tier][entry.name]

    def _arrived(self, entry: _Entry) -> None:
        with self._lock:
            entry.moving = False
            self._lock.notify_all()

    # ---- room ------------------------------------------------------------------------

    def live_bytes(self, tier: Tier) -> int:
        """Bytes of live objects in a tier, views and shared memory once."""
        return self._live[tier].total

    def over(self) -> int:
        """Bytes by which live objects exceed their tiers, at most."""
        return max(self.live_bytes(Tier.DEVICE) - self.limits.device, 0)

    def _excess(self, nbytes: int, tier: Tier) -> int:
        """Bytes that are too many in a tier once ``nbytes`` more are live there."""
        limit = self.limits.device if tier is Tier.DEVICE else self.limits.host
        with self._lock:
            promised = sum(size for home, size in self._promised.values() if home is tier)
            return self.live_bytes(tier) + promised + nbytes - limit

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
            self._promised[key] = tier, nbytes
            self._account()
            return True

    def promise(self, key: Key, nbytes: int, tier: Tier) -> None:
        """Promise room to a key that will be stored; spills for it. Blocks."""
        self.make_room(nbytes, tier)
        with self._lock:
            self._promised[key] = tier, nbytes
            self._account()

    def forget_promise(self, key: Key) -> None:
        """A key will not be stored after all."""
        with self._lock:
            if self._promised.pop(key, None) is not None:
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
                (key, entry.used)
                for key, entry in self._entries.items()
                if entry.live and entry.home is tier and not entry.holders and not entry.moving
            ]
        gain = self._live[tier].gain
        return [Candidate(key, gain(key), self._needed(key), used) for key, used in free]

    def _spill_one(self, key: Key, tier: Tier) -> bool:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or not entry.live or entry.holders or entry.moving:
                return False
            entry.moving, value = True, entry.value
        name = str(next(self._names))  # of its own, since an earlier copy may still be read
        began = perf_counter()
        try:
            target = self._put_below(name, value, tier)
        except NotMovable as error:
            self._metrics.fallback("an object stays live", str(error))
            target = None
        except BaseException:
            self._arrived(entry)
            raise
        if target is not None and not self._leave(key, entry, target, name):
            del self._below[target][name]
            target = None
        self._arrived(entry)
        if target is not None:
            self._moved(tier, target, entry.nbytes, began)
        return target is not None

    def _put_below(self, name: str, value: Any, tier: Tier) -> Tier | None:
        frames = take_apart(value)
        why, order = [], list(Tier)
        for target, mapping in self._below.items():
            if order.index(target) <= order.index(tier) or (
                target is Tier.HOST and not self._host_has_room(frames.nbytes)
            ):
                continue
            try:
                self._store(mapping, name, frames)
                return target
            except NoRoom as error:
                why.append(str(error))
        self._metrics.fallback(
            "objects stay live above their tier's limit", "; ".join(why) or "no lower tier"
        )
        return None

    def _store(self, mapping: Any, name: str, frames: Frames) -> None:
        if self._device.on_host or all(isinstance(piece, np.ndarray) for b in frames.buffers for piece in b):
            mapping[name] = frames
            return
        sources = [buffer[0] for buffer in frames.buffers]
        sizes = [source.nbytes for source in sources]
        if hasattr(mapping, "adopt"):  # straight into its memory
            into = mapping.adopt(name, frames.header, sizes)
            try:
                self._device.scatter(sources, into.buffers)
            except BaseException:
                del mapping[name]
                raise
        else:
            into = Frames(frames.header, tuple([np.empty(size, np.uint8)] for size in sizes))
            self._device.scatter(sources, into.buffers)
            mapping[name] = into

    def _host_has_room(self, nbytes: int) -> bool:
        # Live host objects and spilled ones share the host tier of a worker with a GPU.
        spilled = getattr(self._below.get(Tier.HOST), "used", 0)
        return self.live_bytes(Tier.HOST) + spilled + nbytes <= self.limits.host

    def _leave(self, key: Key, entry: _Entry, target: Tier, name: str) -> bool:
        """Second phase: let go of the live object, unless it is gone or somebody reads it."""
        with self._lock:
            if self._entries.get(key) is not entry or entry.holders:
                return False
            entry.live, entry.value, entry.tier, entry.name = False, None, target, name
            self._live[entry.home].discard(key)
            self._account()
            return True

    # ---- accounts --------------------------------------------------------------------

    def _moved(self, source: Tier, target: Tier, nbytes: int, began: float) -> None:
        self._metrics.add(f"memory.spill.bytes.{source}.{target}", nbytes)
        self._metrics.add("memory.spill.seconds", perf_counter() - began)

    def _account(self) -> None:
        live, host = self.live_bytes(Tier.DEVICE), self.live_bytes(Tier.HOST)
        self.ledger.set(Tier.DEVICE, "partitions", live)
        self._metrics.peak("memory.device.peak", live)
        for tier in self._live:
            promised = sum(size for home, size in self._promised.values() if home is tier)
            self.ledger.set(tier, "reservations", promised)
        for tier, mapping in self._below.items():
            used = getattr(mapping, "used", 0)
            self.ledger.set(tier, "partitions", used + (host if tier is Tier.HOST else 0))
            self._metrics.peak(f"memory.{tier}.peak", used)
        self._changed()

    @property
    def spilled_total(self) -> Spilled:
        """For Dask's metrics: what does not lie in host memory, and what lies on disk."""
        with self._lock:
            entries = list(self._entries.values())
        off_host = [e.nbytes for e in entries if e.tier is Tier.DISK]
        if not self._device.on_host:
            off_host += [e.nbytes for e in entries if e.live and e.tier is Tier.DEVICE]
        on_disk = getattr(self._below.get(Tier.DISK), "used", 0)
        return Spilled(sum(off_host), on_disk)

    def close(self) -> None:
        """Let everything go, files included. Blocks."""
        with self._lock:
            self._entries.clear()
            for live in self._live.values():
                live.clear()
        for mapping in self._below.values():
            mapping.clear()
            if hasattr(mapping, "close"):
                mapping.close()
