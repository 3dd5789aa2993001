"""Move objects out of a live tier, those first that are needed last."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter

from dask.typing import Key

from dask_gpurt.device.base import Fence
from dask_gpurt.memory.entries import Entry, EntryTable, Priority
from dask_gpurt.memory.policy import EvictionCandidate, choose, order
from dask_gpurt.memory.serialize import NotMovable, take_apart
from dask_gpurt.memory.tiers import NoRoom, Tier
from dask_gpurt.observe import Fallback


@dataclass(frozen=True)
class _Spill:
    """Note an object that is being copied down.

    Attributes
    ----------
    last_used
        As it was when the copy began; the copy is of no use once the object has been read again.
    """

    entry: Entry
    last_used: int
    target: Tier
    name: str
    fence: Fence
    began: float


class Spiller:
    """Make room in the live tiers of a table. Thread-safe; its methods block.

    The copies of one call are all begun before the first is waited for, so that a device that is busy is
    waited for once.

    Parameters
    ----------
    priority_of
        Returns the soonest scheduler priority among the tasks of this worker that need a key, None
        without any. Called on any thread.
    """

    def __init__(self, table: EntryTable, priority_of: Callable[[Key], Priority]):
        self._table = table
        self._priority_of = priority_of
        #: One thread at a time chooses what to spill: two would choose the same objects.
        self._choosing = threading.RLock()

    def make_room(self, nbytes: int, tier: Tier = Tier.DEVICE) -> int:
        """Spill until ``nbytes`` more fit into a tier, as far as that goes; return the bytes spilled."""
        if self._table.excess(nbytes, tier) <= 0:
            return 0
        with self._choosing:
            return self._spill(self._table.excess(nbytes, tier), tier)

    def spill(self, nbytes: int, tier: Tier = Tier.DEVICE) -> int:
        """Spill at least ``nbytes`` out of a tier, as far as that goes; return the bytes spilled."""
        with self._choosing:
            return self._spill(nbytes, tier)

    def _spill(self, nbytes: int, tier: Tier) -> int:
        live = self._table.live
        before, tried = live.total(tier), set[Key]()
        while (left := nbytes - (before - live.total(tier))) > 0:
            candidates = [c for c in self._candidates(tier) if c.key not in tried]
            # Objects that share memory free nothing one at a time, but do so together: spill one by one.
            chosen = choose(candidates, left) or order(candidates)[:1]
            if not chosen:
                break
            tried |= {c.key for c in chosen}  # those that go down are not candidates any more
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
        """Begin to copy an object down: the first step of a move."""
        table = self._table
        with table.lock:
            entry = table.by_key.get(key)
            if entry is None or not entry.live or entry.holders or entry.moving:
                return None
            entry.moving, value, last_used = True, entry.value, entry.last_used
        name, began = table.new_name(), perf_counter()
        try:
            frames = take_apart(value)
            with table.lock:
                table.remeasure(entry)
            target, fence = table.lower.put(name, frames, entry.label, tier)
            table.account(target)
            return _Spill(entry, last_used, target, name, fence, began)
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
        """Let the live object go, unless the copy is out of date: the second step of a move.

        While the copy was made the object was live, and other threads did with it what they liked::

            Thread 1 (spills x)                       Thread 2
            _begin: x is moving, the copy begins
                                                      reads x, or holds it: x is live, so it gets the object
                                                      at once, and ``last_used`` or ``holders`` change
            _end: x is in use. The copy is deleted,
            and x stays live

            _begin: x is moving, the copy begins
                                                      deletes x, or gives the key another object: the entry
                                                      leaves the table, and as it is live there is no copy
                                                      for Thread 2 to delete
            _end: the entry is not current any more.
            The copy is deleted

        Thread 2 never waits for Thread 1, and a copy is deleted by exactly one of them.
        """
        table, entry = self._table, spill.entry
        copied = gone = False
        try:
            spill.fence()
            copied = True
        finally:
            with table.lock:
                unused = not entry.holders and entry.last_used == spill.last_used
                if copied and unused and table.is_current(entry):
                    entry.live, entry.value, entry.tier, entry.name = False, None, spill.target, spill.name
                    table.live.discard(entry.key)
                    gone = True
                else:
                    table.lower.discard(spill.target, spill.name)
                table.stop_moving(entry)
                table.account()
        if gone:
            table.record_move(entry.home, spill.target, entry.nbytes, perf_counter() - spill.began)


def _is_free(entry: Entry) -> bool:
    return not (entry.holders or entry.moving or entry.immovable)
