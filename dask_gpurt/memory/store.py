"""A worker's data in tiers: the mapping from keys to objects, whichever tier they lie in.

What tasks read is live: on the device, or for host objects of a worker with a GPU in host
memory. Below lie objects taken apart, one mapping for each tier. Moves block, so they are
made on threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from dask.typing import Key

from dask_gpurt.memory.accounting import owned
from dask_gpurt.memory.disk import CorruptFile
from dask_gpurt.memory.entries import Entry, Need, label_of
from dask_gpurt.memory.ledger import PARTITIONS
from dask_gpurt.memory.readings import Readings
from dask_gpurt.memory.serialize import Frames
from dask_gpurt.memory.tiers import Tier

#: Copies of objects that are being sent, for the coroutine that sends them.
serving: ContextVar[dict[Key, Any] | None] = ContextVar("serving", default=None)


@dataclass(frozen=True)
class _Lift:
    """An object that is being copied up; it is complete when ``reading`` has been left."""

    key: Key
    entry: Entry
    value: Any
    reading: ExitStack
    began: float


class Ladder(Readings, MutableMapping[Key, Any]):
    """The mapping that takes the place of a worker's ``data``. Thread-safe.

    Only :meth:`__getitem__` of a key that is not live copies on the calling thread: hold
    keys first, with :meth:`hold` on a thread that may wait.
    """

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
        needed: Need = None,
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
        roots, label = owned(value), label_of(key, kind)
        with self._lock:
            if key in self._entries:
                del self[key]
            self._live.forget(key)
            entry = self._new(key, label, home or self._home(value), value, sum(roots.values()), needed)
            self._live.add(key, entry.home, label, roots)
            self._account(entry.home)

    def store_below(self, key: Key, frames: Frames, kind: str, *, home: Tier, needed: Need = None) -> Tier:
        """Keep what has been taken apart below its home, at once; returns where. Blocks.

        Raises
        ------
        NoRoom
            When all tiers are full.
        """
        name, label = self._new_name(), label_of(key, kind)
        tier, fence = self._below.put(name, frames, label, home, ordered=False)
        fence()
        with self._lock:
            entry = self._new(key, label, home, None, frames.nbytes, needed)
            entry.live, entry.tier, entry.name = False, tier, name
            self._account(tier)
        return tier

    def adopt(self, key: Key, nbytes: int, take: Callable[[], Any], let_go: Callable[[], None]) -> None:
        """Take a key over from another mapping, in which it lies on disk.

        Parameters
        ----------
        take, let_go
            Take it out of there, and let it go if it is still there.
        """
        with self._lock:
            entry = self._new(key, label_of(key, PARTITIONS), Tier.DEVICE, None, nbytes, None)
            entry.live, entry.tier, entry.before = False, Tier.DISK, (take, let_go)

    def __getitem__(self, key: Key) -> Any:
        served = serving.get()
        if served is not None and key in served:
            return served[key]
        while not (found := self._if_live(key)):
            self._metrics.add("memory.unspill.unheld")
            self.release(self.hold([key]))
        return found[0]

    def _if_live(self, key: Key) -> tuple[Any, ...]:
        """The object of a key, if it is live; KeyError without any."""
        with self._lock:
            entry = self._entries[key]
            entry.used = next(self._clock)
            return (entry.value,) if entry.live else ()

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
        return iter([key for key, entry in list(self._entries.items()) if entry.label.kind == PARTITIONS])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    # ---- held: live, and not to be spilled ---------------------------------------------

    def hold_live(self, keys: Iterable[Key]) -> list[Entry] | None:
        """As :meth:`hold`, if all keys are live already, else None; does not block."""
        with self._lock:
            entries = [self._entries[key] for key in keys if key in self._entries]
            if not all(entry.live for entry in entries):
                return None
            for entry in entries:
                entry.holders += 1
            return entries

    def hold(self, keys: Iterable[Key]) -> list[Entry]:
        """Make keys live and keep them so; unknown ones are ignored. Blocks.

        Returns
        -------
        list
            What :meth:`release` takes.
        """
        with self._lock:
            known = [(key, self._entries[key]) for key in keys if key in self._entries]
            for _, entry in known:
                entry.holders += 1
        held = [entry for _, entry in known]
        try:
            self._lift(known)
        except BaseException:
            self.release(held)
            raise
        return held

    def hold_where_live(self, keys: Iterable[Key]) -> tuple[dict[Key, Entry], list[Key]]:
        """Hold those of ``keys`` that are live, and name the others; does not block."""
        with self._lock:
            known = {key: self._entries[key] for key in keys if key in self._entries}
            held = {key: entry for key, entry in known.items() if entry.live}
            for entry in held.values():
                entry.holders += 1
            return held, [key for key in known if key not in held]

    def copies(self, keys: Iterable[Key]) -> dict[Key, Any]:
        """The objects, read from where they lie, which is where they stay. Blocks."""
        found: dict[Key, Any] = {}
        before: list[Key] = []
        with ExitStack() as stack:
            pinned = {}
            with self._lock:
                for key, entry in ((key, self._entries[key]) for key in keys if key in self._entries):
                    if entry.live:
                        found[key] = entry.value
                    elif entry.before is not None:
                        before.append(key)
                    else:
                        pinned[key] = self._pin(entry, stack)
            found |= {key: self._read(copy, stack) for key, copy in pinned.items()}
        # What the mapping before us holds it gives out once, so that is kept here.
        return found | {key: self[key] for key in before}

    def unreadable(self, keys: Iterable[Key]) -> list[Key]:
        """Those of ``keys`` that can not be read any more. Blocks."""
        lost = []
        for key in keys:
            try:
                self.copies([key])
            except CorruptFile:
                lost.append(key)
        return lost

    def bring(self, keys: Iterable[Key]) -> None:
        """Make keys live as far as there is room without spilling, also when they arrive. Blocks."""
        for key in keys:
            with self._lock:
                entry = self._entries.get(key)
            if entry is None or self._excess(entry.nbytes, entry.home) > 0:
                return
            try:
                if lift := self._begin_lift(key, entry):
                    self._end_lift(lift)
            except MemoryError:
                return  # whoever needs it makes room

    # ---- up --------------------------------------------------------------------------

    def _lift(self, wanted: list[tuple[Key, Entry]]) -> None:
        """Make objects live. All copies are begun before the first is waited for."""
        while wanted := self._not_live(wanted):
            for home in {entry.home for _, entry in wanted}:
                self.make_room(sum(entry.nbytes for _, entry in wanted if entry.home is home), home)
            lifts: list[_Lift] = []
            try:
                for key, entry in wanted:
                    if lift := self._begin_lift(key, entry):
                        lifts.append(lift)
            finally:  # also when one could not be read: others are complete
                for lift in lifts:
                    self._end_lift(lift)
            with self._lock:
                # Somebody else moves the rest. Nobody waits here while he moves something.
                while (rest := self._not_live(wanted)) and all(entry.moving for _, entry in rest):
                    self._lock.wait()

    def _not_live(self, wanted: list[tuple[Key, Entry]]) -> list[tuple[Key, Entry]]:
        with self._lock:
            return [(k, entry) for k, entry in wanted if not entry.live and self._entries.get(k) is entry]

    def _begin_lift(self, key: Key, entry: Entry) -> _Lift | None:
        with self._lock:
            if entry.live or entry.moving or self._entries.get(key) is not entry:
                return None
            entry.moving = True
            began, reading = perf_counter(), ExitStack()
            copy = self._pin(entry, reading)
        try:
            self.promise(key, entry.nbytes, entry.home)
            value = entry.before[0]() if entry.before else self._read(copy, reading)
        except BaseException:
            reading.close()
            self._give_up(key, entry)
            raise
        return _Lift(key, entry, value, reading, began)

    def _in_the_way(self, entry: Entry) -> bool:
        """Whether what comes up for later finds its room taken by what is needed now."""
        return not entry.holders and entry.before is None and self._excess(0, entry.home) > 0

    def _give_up(self, key: Key, entry: Entry) -> None:
        """An object stays where it is; its copy goes with the key, if that has gone meanwhile."""
        with self._lock:
            self._live.forget(key)
            if self._entries.get(key) is not entry:
                self._drop(entry)
            self._arrived(entry)
            self._account()

    def _end_lift(self, lift: _Lift) -> None:
        key, entry, came_from = lift.key, lift.entry, lift.entry.tier
        try:
            lift.reading.close()
            roots = owned(lift.value)
        except BaseException:
            self._give_up(key, entry)
            raise
        with self._lock:
            if self._in_the_way(entry):
                self._give_up(key, entry)
                return
            self._live.forget(key)
            self._drop(entry)
            entry.before = None
            if self._entries.get(key) is entry:
                entry.value, entry.live, entry.nbytes = lift.value, True, sum(roots.values())
                entry.home = entry.tier = self._home(lift.value)
                self._live.add(key, entry.home, entry.label, roots)
            self._arrived(entry)
            self._account(entry.home)
        self._moved(came_from, entry.home, entry.nbytes, perf_counter() - lift.began)
