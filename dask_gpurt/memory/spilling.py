"""Spill objects from a live tier, those with the latest next use first, and reserve memory there.

Decisions and their figures: ``docs/decisions/memory.md``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from dask.typing import Key

from dask_gpurt.device.base import Fence
from dask_gpurt.memory.accounting import Roots, owned
from dask_gpurt.memory.entries import Entry, EntryTable, Priority
from dask_gpurt.memory.ledger import SLACK_SHARE, SPILL_SLACK_BYTES, NoRoom, Tier
from dask_gpurt.memory.serialize import Frames, NotMovable, to_frames
from dask_gpurt.observe import Fallback


@dataclass(frozen=True)
class EvictionCandidate:
    """Describe an object that could be spilled.

    ``nbytes``: bytes that spilling it frees.
    ``needed``: the soonest scheduler priority among the tasks of this worker that need it (in Dask, smaller
    tuples run sooner); None if no task does.
    ``used``: time of its last use, on a monotonic clock.
    """

    key: Key
    nbytes: int
    needed: tuple[Any, ...] | None
    used: int


#: States of a task that no longer reads its inputs.
_DONE = frozenset({"memory", "released", "forgotten", "error", "cancelled"})


def next_use(task: Any) -> tuple[Any, ...] | None:
    """Return the soonest priority among the tasks of this worker that still need a result.

    ``task``: the ``TaskState`` of the result in the worker's state machine; None if there is none.
    """
    if task is None:
        return None
    # The event loop may change the set while this thread reads it; tuple() copies it atomically.
    waiting = [each.priority for each in tuple(task.dependents) if each.state not in _DONE and each.priority]
    return min(waiting, default=None)


def order(candidates: Iterable[EvictionCandidate]) -> list[EvictionCandidate]:
    """Sort candidates for eviction: no next use first, then the latest; ties by size, then by age."""
    ranked = sorted(candidates, key=lambda c: (-c.nbytes, c.used, repr(c.key)))
    unneeded = [c for c in ranked if c.needed is None]
    needed = sorted((c for c in ranked if c.needed is not None), key=lambda c: c.needed or (), reverse=True)
    return unneeded + needed


def choose(candidates: Iterable[EvictionCandidate], nbytes: int) -> list[EvictionCandidate]:
    """Return the first candidates in :func:`order` that free ``nbytes`` in total; all if that is too much."""
    chosen: list[EvictionCandidate] = []
    for candidate in order(c for c in candidates if c.nbytes):
        if nbytes <= 0:
            break
        chosen.append(candidate)
        nbytes -= candidate.nbytes
    return chosen


@dataclass(frozen=True)
class _Spill:
    """Track an object that is being copied to a lower tier.

    ``last_used``: the entry's value when the copy started: if it changes, the object was used, and the copy
    is dropped.
    ``frames``: the source of the copy, kept until the copy has ended. Serialisation may have allocated it:
    cudf compacts the columns of a slice. Such memory is freed in the order of the user's stream, and the copy
    runs on another one, so a kernel could write there while the copy reads.
    """

    entry: Entry
    last_used: int
    target: Tier
    name: str
    frames: Frames
    fence: Fence
    began: float


class Spiller:
    """Make room in the live tiers of a table. Thread-safe; its methods block.

    Each call starts all of its copies before it waits for the first, so that it waits for a busy device only
    once.

    ``priority_of``: returns the soonest scheduler priority among the tasks of this worker that need a key;
    None if there are none. Called from any thread.
    """

    def __init__(self, table: EntryTable, priority_of: Callable[[Key], Priority]):
        self._table = table
        self._priority_of = priority_of
        #: Only one thread at a time chooses victims, since two would choose the same objects.
        self._choosing = threading.RLock()

    def make_room(self, nbytes: int, tier: Tier = Tier.DEVICE) -> int:
        """Spill until ``nbytes`` more fit into a tier, if possible; return the bytes spilled."""
        if self._table.excess(nbytes, tier) <= 0:
            return 0
        with self._choosing:
            return self._spill(self._table.excess(nbytes, tier), tier)

    def spill(self, nbytes: int, tier: Tier = Tier.DEVICE) -> int:
        """Spill at least ``nbytes`` from a tier, if possible; return the bytes spilled."""
        with self._choosing:
            return self._spill(nbytes, tier)

    def _spill(self, nbytes: int, tier: Tier) -> int:
        live = self._table.live
        before, tried = live.total(tier), set[Key]()
        while (left := nbytes - (before - live.total(tier))) > 0:
            candidates = [c for c in self._candidates(tier) if c.key not in tried]
            # Objects that share memory free it only once all of them are spilled. Then no single object has a
            # gain, and `choose` returns none: spill the first one anyway, and look again.
            chosen = choose(candidates, left) or order(candidates)[:1]
            if not chosen:
                break
            tried |= {c.key for c in chosen}  # do not retry objects that cannot be spilled
            with ExitStack() as spills:
                for candidate in chosen:
                    if (spill := self._begin(candidate.key, tier)) is not None:
                        spills.callback(self._end, spill)
        return max(0, before - live.total(tier))

    def _candidates(self, tier: Tier) -> list[EvictionCandidate]:
        table = self._table
        with table.lock:
            free = [
                (entry, table.live.gain(key, tier))
                for key in table.live.keys(tier)
                if table.live.is_here(key, tier) and _is_free(entry := table.by_key[key])
            ]
        return [
            EvictionCandidate(
                entry.key, gain, entry.priority or self._priority_of(entry.key), entry.last_used
            )
            for entry, gain in free
        ]

    def _begin(self, key: Key, tier: Tier) -> _Spill | None:
        """Start to copy an object down: the first step of a move."""
        table = self._table
        with table.lock:
            entry = table.by_key.get(key)
            if entry is None or not entry.live or entry.holders or entry.moving:
                return None
            entry.moving, value, last_used = True, entry.value, entry.last_used
        name, began = table.new_name(), perf_counter()
        try:
            frames = to_frames(value)
            with table.lock:
                table.remeasure(entry)
            target, fence = table.lower.put(name, frames, entry.label, tier)
            table.account(target)
            return _Spill(entry, last_used, target, name, frames, fence, began)
        except NotMovable as error:
            entry.immovable = True
            table.metrics.fallback(Fallback.MEMORY_UNPICKLABLE, str(error))
        except (NoRoom, MemoryError) as error:
            table.metrics.fallback(Fallback.MEMORY_TIERS_FULL, str(error))
        except BaseException:
            table.stop_moving(entry)
            raise
        table.stop_moving(entry)
        return None

    def _end(self, spill: _Spill) -> None:
        """Replace the live object by its copy, unless the copy is stale: the second step of a move.

        During the copy the object is live, and other threads may use or delete it::

            Thread 1 (spills x)                       Thread 2
            _begin: x is moving, the copy starts
                                                      reads or holds x, which is live: it gets the object at
                                                      once, and ``last_used`` or ``holders`` change
            _end: x is in use. The copy is deleted,
            and x stays live

            _begin: x is moving, the copy starts
                                                      deletes x, or replaces its object: the entry leaves
                                                      the table. As it is live, Thread 2 finds no copy to
                                                      delete
            _end: the entry is no longer current.
            The copy is deleted

        Thread 2 never waits for Thread 1, and exactly one of them deletes the copy.
        """
        table, entry, value = self._table, spill.entry, None
        copied = gone = False
        try:
            spill.fence()
            copied = True
        finally:
            with table.lock:
                unused = not entry.holders and entry.last_used == spill.last_used
                if copied and unused and table.is_current(entry):
                    value = entry.value  # dropped without the lock, see TieredBuffer._remove
                    entry.live, entry.value, entry.tier, entry.name = False, None, spill.target, spill.name
                    table.live.discard(entry.key)
                    gone = True
                else:
                    table.lower.discard(spill.target, spill.name)
                table.stop_moving(entry)
                table.account()
            del value
        if gone:
            table.record_move(entry.home, spill.target, entry.nbytes, perf_counter() - spill.began)


def _is_free(entry: Entry) -> bool:
    return not (entry.holders or entry.moving or entry.immovable)


# ---- reservations ------------------------------------------------------------------------------------


class Reservations:
    """Reserve bytes of the live tiers under a key. Thread-safe.

    Storing an object under the key uses up the reservation. A later reservation of a key replaces the
    previous one.

    A tier may exceed its limit by at most one slack: ``SPILL_SLACK_BYTES``, or ``SLACK_SHARE`` of the tier
    if that is less. So a result of a few bytes never spills a partition.
    """

    def __init__(self, table: EntryTable, spiller: Spiller):
        self._table = table
        self._spiller = spiller
        #: Objects about to be stored, with their allocations, since measuring is slow.
        self._measured: dict[Key, tuple[Any, Roots]] = {}

    def try_reserve(self, key: Key, nbytes: int, tier: Tier) -> bool:
        """Reserve room if there is any; return whether there was. Does not block."""
        table, slack = self._table, self._slack(tier)
        with table.lock:
            if table.excess(nbytes, tier) > (slack if nbytes <= slack else 0):
                return False
            table.live.reserve(key, tier, nbytes)
            table.account()
            return True

    def spill_and_try(self, key: Key, nbytes: int, tier: Tier) -> bool:
        """Reserve room if spilling can make it; return whether it could. Blocks."""
        self._spiller.make_room(nbytes, tier)
        return self.try_reserve(key, nbytes, tier)

    def reserve(self, key: Key, nbytes: int, tier: Tier) -> None:
        """Reserve room unconditionally, and spill for it. Blocks.

        If nothing is left to spill, the tier exceeds its limit, so that the caller can make progress.
        """
        # Reserve first, then spill. Otherwise another thread could reserve the room in between:
        #   Thread 1: makes room for x            Thread 2: reserves it for y
        #   Thread 1: reserves it for x; the tier exceeds its limit although more could have been spilled
        with self._table.lock:
            self._table.live.reserve(key, tier, nbytes)
            self._table.account()
        self.spill_for_all(tier)

    def spill_for_all(self, tier: Tier) -> None:
        """Spill for all reservations in a tier, as far as possible. Blocks."""
        while self._spiller.make_room(0, tier):
            pass

    def replace(self, old: Key, new: Mapping[Key, tuple[int, Tier]]) -> bool:
        """Replace a reservation by others atomically; return whether they fit. Does not block.

        The bytes are reserved even if they do not fit. Bytes within the slack count as fitting: if the tier
        exceeds its limit, that is because of earlier data, such as an input about to be released.
        """
        table = self._table
        with table.lock:
            table.live.cancel(old)
            for key, (nbytes, tier) in new.items():
                table.live.reserve(key, tier, nbytes)
            table.account()
            return all(
                nbytes <= self._slack(tier) or table.excess(0, tier) <= 0 for nbytes, tier in new.values()
            )

    def cancel(self, key: Key) -> None:
        """Cancel the reservation of a key, if any."""
        self._measured.pop(key, None)
        with self._table.lock:
            if self._table.live.cancel(key):
                self._table.account()

    def cancel_all(self, keys: Iterable[Key]) -> None:
        """Cancel the reservations of some keys, as far as there are any."""
        for key in keys:
            if key in self._measured or self._table.live.is_reserved(key):
                self.cancel(key)

    def has_room(self, nbytes: int, tier: Tier) -> bool:
        """Return whether this many bytes more fit into a tier without spilling."""
        return self._table.excess(nbytes, tier) <= 0

    def most(self, tier: Tier) -> int:
        """Return the bytes that live objects of a tier may have now, with what others have beside them."""
        return max(0, self._table.limits.live(tier) - self._table.beside(tier))

    def leaves_half(self, nbytes: int, tier: Tier) -> bool:
        """Return whether this many bytes take at most half of a tier."""
        return 2 * nbytes <= self.most(tier)

    def bytes_added_by(self, key: Key, value: Any, tier: Tier) -> int:
        """Return the bytes that an object would add to a tier.

        The measurement is cached until the object is stored under its key, or the reservation is cancelled.
        """
        roots = self.measured(key, value)
        self._measured[key] = value, roots
        with self._table.lock:
            return self._table.live.lacking(tier, roots)

    def measured(self, key: Key, value: Any) -> Roots:
        """Return the allocations of an object about to be stored, from the cache if possible."""
        before, roots = self._measured.pop(key, (None, None))
        return owned(value) if roots is None or before is not value else roots

    def overshoot(self) -> int:
        """Return by how many bytes live objects exceed the device tier's limit; 0 within the slack."""
        table = self._table
        beyond = table.live.total(Tier.DEVICE) - self.most(Tier.DEVICE)
        return beyond if beyond > self._slack(Tier.DEVICE) else 0

    def _slack(self, tier: Tier) -> int:
        return int(min(SPILL_SLACK_BYTES, SLACK_SHARE * self._table.limits.live(tier)))
