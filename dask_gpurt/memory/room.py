"""Room in the live tiers: promised before it is taken, and made by spilling.

A spill copies first and lets go of the object afterwards, unless somebody has begun to read
it meanwhile. The copies of one spill are all begun before the first is waited for, so that a
device that is busy is waited for once.
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
from dask_gpurt.memory.accounting import owned
from dask_gpurt.memory.entries import Entries, Entry, Need
from dask_gpurt.memory.policy import Candidate, choose, order
from dask_gpurt.memory.serialize import NotMovable, take_apart
from dask_gpurt.memory.tiers import TRIFLE, TRIFLING, NoRoom, Tier


@dataclass(frozen=True)
class _Move:
    """An object that is being copied down."""

    key: Key
    entry: Entry
    #: Of the entry when the copy began: it is stale once somebody has read the object again.
    used: int
    target: Tier
    name: str
    fence: Fence
    began: float


class Room(Entries):
    """Entries whose live tiers have limits. Thread-safe.

    Parameters
    ----------
    needed
        The soonest scheduler priority among the tasks of this worker that need a key, None
        without any. Called on any thread.
    """

    def __init__(self, *args: Any, needed: Callable[[Key], Need], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._needed = needed
        #: One at a time makes room: two would choose the same objects.
        self._spilling = threading.RLock()

    # ---- promised --------------------------------------------------------------------

    def promise_at_once(self, key: Key, nbytes: int, tier: Tier) -> bool:
        """Promise room to a key that will be stored, if there is some; does not block.

        A trifle may go above the limit, as long as all that is above it is one.
        """
        with self._lock:
            if self._excess(nbytes, tier) > self._beyond(nbytes, tier):
                return False
            self._live.promise(key, tier, nbytes)
            self._account()
            return True

    def pass_on(self, old: Key, promises: Mapping[Key, tuple[int, Tier]]) -> bool:
        """Promise bytes of a tier to keys in the place of what another was promised; whether they fit.

        Nobody takes the room in between. Does not block; what does not fit is promised all the same.
        A trifle always fits: what is above the limit then has been there before, such as an input
        that is about to go.
        """
        with self._lock:
            self._live.forget(old)
            for key, (nbytes, tier) in promises.items():
                self._live.promise(key, tier, nbytes)
            self._account()
            wanted = promises.values()
            return all(nbytes <= self._trifle(tier) or self._excess(0, tier) <= 0 for nbytes, tier in wanted)

    def _beyond(self, nbytes: int, tier: Tier) -> int:
        """By how much an object of so many bytes may go above the limit of a tier."""
        trifle = self._trifle(tier)
        return trifle if nbytes <= trifle else 0

    def _trifle(self, tier: Tier) -> int:
        limit = self.limits.device if tier is Tier.DEVICE else self.limits.host
        return int(min(TRIFLE, TRIFLING * limit))

    def promise(self, key: Key, nbytes: int, tier: Tier) -> None:
        """Promise room to a key that will be stored, and spill for it. Blocks.

        Where nothing is left to spill the tier goes above its limit: that is better than never.
        """
        with self._lock:  # at once, so that nobody else takes the room that is made
            self._live.promise(key, tier, nbytes)
            self._account()
        self.keep_promises(tier)

    def keep_promises(self, tier: Tier) -> None:
        """Spill for what has been promised, as far as that goes. Blocks."""
        while self.make_room(0, tier):
            pass

    def try_promise(self, key: Key, nbytes: int, tier: Tier) -> bool:
        """Promise room to a key if it can be made; spills for it. Blocks."""
        self.make_room(nbytes, tier)
        return self.promise_at_once(key, nbytes, tier)

    def forget_promise(self, key: Key) -> None:
        """A key will not be stored after all."""
        with self._lock:
            if self._live.forget(key):
                self._account()

    def keeps_live(self, nbytes: int, tier: Tier) -> bool:
        """Whether so many bytes would leave half of a tier to other things."""
        limit = self.limits.device if tier is Tier.DEVICE else self.limits.host
        return 2 * nbytes <= limit

    def added_by(self, value: Any, tier: Tier) -> int:
        """Bytes that an object would add to a tier."""
        roots = owned(value)
        with self._lock:
            return self._live.lacking(tier, roots)

    def has_room(self, nbytes: int, tier: Tier) -> bool:
        """Whether so many bytes more fit into a tier as it is."""
        return self._excess(nbytes, tier) <= 0

    def over(self) -> int:
        """Bytes by which live objects exceed the device tier, 0 for a trifle."""
        beyond = self.live_bytes(Tier.DEVICE) - self.limits.device
        return beyond if beyond > self._trifle(Tier.DEVICE) else 0

    def set_elsewhere(self, roots: Iterable[int]) -> None:
        """Which allocations of live objects somebody else has moved off the device; all others are there."""
        with self._lock:
            self._live.set_elsewhere(Tier.DEVICE, roots)
            self._account(Tier.DEVICE)

    # ---- made ------------------------------------------------------------------------

    def make_room(self, nbytes: int, tier: Tier = Tier.DEVICE) -> int:
        """Spill until ``nbytes`` more fit into a tier, as far as that goes; the bytes spilled. Blocks."""
        if self._excess(nbytes, tier) <= 0:
            return 0
        with self._spilling:
            return self._spill(self._excess(nbytes, tier), tier)

    def spill(self, nbytes: int, tier: Tier = Tier.DEVICE) -> int:
        """Spill at least ``nbytes`` out of a tier, as far as that goes; the bytes spilled. Blocks."""
        with self._spilling:
            return self._spill(nbytes, tier)

    def _spill(self, nbytes: int, tier: Tier) -> int:
        before, stuck = self.live_bytes(tier), set[Key]()
        while (left := nbytes - (before - self.live_bytes(tier))) > 0:
            candidates = [c for c in self._candidates(tier) if c.key not in stuck]
            # What shares its memory frees nothing alone, but with the others: one by one.
            chosen = choose(candidates, left) or order(candidates)[:1]
            if not chosen:
                break
            stuck |= {c.key for c in chosen}  # those that go down are no candidates any more
            with ExitStack() as moves:
                for candidate in chosen:
                    if (move := self._begin(candidate.key, tier)) is not None:
                        moves.callback(self._end, move)
        return max(0, before - self.live_bytes(tier))

    def _candidates(self, tier: Tier) -> list[Candidate]:
        with self._lock:
            live = [(key, self._entries[key]) for key in self._live.keys(tier)]
            free = [
                (key, entry, self._live.gain(key, tier))
                for key, entry in live
                if self._live.is_here(key, tier) and not (entry.holders or entry.moving or entry.fixed)
            ]
        return [
            Candidate(key, gain, entry.needed or self._needed(key), entry.used) for key, entry, gain in free
        ]

    def _begin(self, key: Key, tier: Tier) -> _Move | None:
        """First phase: begin to copy an object down."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or not entry.live or entry.holders or entry.moving:
                return None
            entry.moving, value, used = True, entry.value, entry.used
        name, began = self._new_name(), perf_counter()
        try:
            frames = take_apart(value)
            with self._lock:
                self._revise(entry)
            target, fence = self._below.put(name, frames, entry.label, tier)
            self._account(target)
            return _Move(key, entry, used, target, name, fence, began)
        except NotMovable as error:
            entry.fixed = True
            self._metrics.fallback("an object stays live", str(error))
        except (NoRoom, MemoryError) as error:
            self._metrics.fallback("objects stay live above their tier's limit", str(error))
        except BaseException:
            self._arrived(entry)
            raise
        self._arrived(entry)
        return None

    def _end(self, move: _Move) -> None:
        """Second phase: let go of the live object, unless it is gone or was read meanwhile."""
        entry, copied, left = move.entry, False, False
        try:
            move.fence()
            copied = True
        finally:
            with self._lock:
                current = self._entries.get(move.key) is entry
                if copied and current and not entry.holders and entry.used == move.used:
                    entry.live, entry.value, entry.tier, entry.name = False, None, move.target, move.name
                    self._live.discard(move.key)
                    left = True
                else:
                    self._below.discard(move.target, move.name)
                self._arrived(entry)
                self._account()
        if left:
            self._moved(entry.home, move.target, entry.nbytes, perf_counter() - move.began)
