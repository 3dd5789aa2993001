"""Simulate the memory of a worker: the tier of each key, and the duration of moves between tiers."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dask.typing import Key

from benchmarks.simulate.links import Speed
from dask_gpurt.memory.ledger import Tier
from dask_gpurt.memory.spilling import EvictionCandidate, choose


class TierLink(StrEnum):
    """Name the links between the tiers of one worker."""

    PINNED = "pinned"
    PAGEABLE = "pageable"
    DISK = "disk"


#: Their speeds on a host with four H200.
TIER_SPEEDS: Mapping[TierLink, Speed] = {
    # Measured: host to device; the other way is 55.
    TierLink.PINNED: Speed(53e9, 20e-6),
    # Measured: device to host; the other way is 17.
    TierLink.PAGEABLE: Speed(15.5e9, 20e-6),
    # Measured: written directly to a local disk; reading is 2.4.
    TierLink.DISK: Speed(1.4e9, 200e-6),
}


@dataclass(frozen=True)
class Capacity:
    """Hold the capacity of each tier of a worker, in bytes; the disk is unlimited.

    Parameters
    ----------
    device, pinned, host
        Capacities. With ``device=0`` the worker computes in the host tier.
    """

    device: int
    pinned: int
    host: int

    @property
    def live(self) -> int:
        """Return the capacity of the tier that tasks compute in."""
        return self.device or self.host

    @property
    def total(self) -> int:
        """Return the total capacity of all tiers except the disk."""
        return self.device + self.pinned + self.host

    def __getitem__(self, tier: Tier) -> float:
        return {Tier.DEVICE: self.device, Tier.PINNED: self.pinned, Tier.HOST: self.host}.get(
            tier, float("inf")
        )


class Tiers(MutableMapping[Key, Any]):
    """Map the keys of a worker to their bytes, each in one tier.

    New keys go to the live tier. When a tier exceeds its capacity, its least recently used keys are evicted
    to the next tier, as by zict's buffers on Dask's workers. Keys held by running tasks are not evicted; if
    they do not fit, the worker is over its memory.
    """

    def __init__(self, capacity: Capacity, speed: Callable[[TierLink], Speed]):
        self.capacity = capacity
        self._speed = speed
        self._order = [tier for tier in Tier if capacity[tier] > 0]
        self._keys: dict[Tier, OrderedDict[Key, int]] = {tier: OrderedDict() for tier in self._order}
        self._used = dict.fromkeys(self._order, 0)
        self._tier: dict[Key, Tier] = {}
        self._holders: Counter[Key] = Counter()
        self._reserved = 0
        self.live = self._order[0]
        self.spilled = 0
        self.peak = 0

    # ---- a mapping -------------------------------------------------------------------

    def __getitem__(self, key: Key) -> int:
        return self._keys[self._tier[key]][key]

    def __setitem__(self, key: Key, nbytes: int) -> None:
        if key in self._tier:
            del self[key]
        self._put(key, nbytes, self.live)
        self._make_room()

    def __delitem__(self, key: Key) -> None:
        tier = self._tier.pop(key)
        self._used[tier] -= self._keys[tier].pop(key)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._tier)

    def __len__(self) -> int:
        return len(self._tier)

    def __contains__(self, key: object) -> bool:
        return key in self._tier

    # ---- tasks and transfers -------------------------------------------------

    def tier(self, key: Key) -> Tier | None:
        """Return the tier of a key; None if the key is not on this worker."""
        return self._tier.get(key)

    @property
    def live_bytes(self) -> int:
        """Return the bytes in the live tier, including reserved bytes."""
        return self._used[self.live] + self._reserved

    @property
    def spilled_bytes(self) -> int:
        """Return the bytes in the tiers below the live tier."""
        return sum(self._used.values()) - self._used[self.live]

    @property
    def free(self) -> int:
        """Return the free bytes of the live tier; negative if it exceeds its capacity."""
        return self.capacity.live - self.live_bytes

    def free_below(self) -> dict[Tier, float]:
        """Return the free bytes of each tier below the live tier, from fast to slow."""
        return {tier: self.capacity[tier] - self._used[tier] for tier in self._order[1:]}

    @property
    def over(self) -> bool:
        """Return whether the live tier ever exceeded its capacity."""
        return self.peak > self.capacity.live

    def hold(self, keys: Collection[Key], reserve: int) -> float:
        """Move keys to the live tier and pin them there, and reserve additional bytes.

        Returns the duration in seconds.
        """
        self._holders.update(list(keys))  # a list, since Counter.update would add the values of a mapping
        self._reserved += reserve
        seconds = sum([self._bring_up(key) for key in keys if key in self._tier])
        return seconds + self._make_room()

    def fits(self, keys: Collection[Key], reserve: int) -> bool:
        """Return whether :meth:`hold` would keep the live tier within capacity, after spilling all else."""
        available = self.capacity.live - self._reserved - reserve
        coming = sum(self[key] for key in keys if self._tier.get(key) not in (self.live, None))
        if self._used[self.live] + coming <= available:
            return True
        staying = {key for key in (*self._holders, *keys) if self._tier.get(key) is self.live}
        return sum(self[key] for key in staying) + coming <= available

    def lend(self, keys: Collection[Key]) -> tuple[list[Key], float]:
        """Read keys from the tiers that they are in, and pin those in the live tier until they are released.

        Returns the pinned keys, and the seconds to read all other keys.
        """
        held = [key for key in keys if self.tier(key) is self.live]
        self.hold(held, 0)
        below = [key for key in keys if self.tier(key) not in (self.live, None)]
        return held, sum(self._seconds(self._tier[key], self.live, self[key]) for key in below)

    def release(self, keys: Collection[Key], reserve: int) -> None:
        """Release the keys and reserved bytes of :meth:`hold`."""
        self._reserved -= reserve
        for key in keys:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]

    # ---- moves -----------------------------------------------------------------------

    def _put(self, key: Key, nbytes: int, tier: Tier) -> None:
        self._tier[key] = tier
        self._keys[tier][key] = nbytes
        self._used[tier] += nbytes

    def _bring_up(self, key: Key) -> float:
        tier = self._tier[key]
        if tier is self.live:
            self._keys[tier].move_to_end(key)
            return 0.0
        return self._move(key, self.live)

    def _move(self, key: Key, target: Tier) -> float:
        source, nbytes = self._tier[key], self[key]
        del self[key]
        self._put(key, nbytes, target)
        return self._seconds(source, target, nbytes)

    def _seconds(self, source: Tier, target: Tier, nbytes: int) -> float:
        return self._speed(_between(source, target)).seconds(nbytes)

    def _make_room(self) -> float:
        """Spill keys from each tier that exceeds its capacity; return the duration in seconds."""
        seconds = 0.0
        for tier, below in zip(self._order, self._order[1:], strict=False):
            excess = self._used[tier] - self.capacity[tier]
            if tier is self.live:
                excess += self._reserved
            if excess <= 0:
                continue
            for key in self._victims(tier, excess):
                seconds += self._spill(key, below)
        self.peak = max(self.peak, self.live_bytes)
        return seconds

    def _spill(self, key: Key, target: Tier) -> float:
        self.spilled += self[key]
        return self._move(key, target)

    def _victims(self, tier: Tier, nbytes: float) -> list[Key]:
        """Return the least recently used keys of a tier that free this many bytes, without held keys."""
        found: list[Key] = []
        for key, size in self._keys[tier].items():
            if nbytes <= 0:
                break
            if key not in self._holders:
                found.append(key)
                nbytes -= size
        return found


class RuntimeTiers(Tiers):
    """Spill like the runtime: evict the keys with the latest next use first.

    A key is evicted to the first lower tier with room for it, and stays there until it is read; see
    :mod:`dask_gpurt.memory.spilling`.

    ``next_use``: returns the earliest scheduler priority of the tasks that need a key; None if there is no
    such task.
    """

    def __init__(
        self,
        capacity: Capacity,
        speed: Callable[[TierLink], Speed],
        next_use: Callable[[Key], tuple[Any, ...] | None],
    ):
        super().__init__(capacity, speed)
        self._next_use = next_use

    def _make_room(self) -> float:
        seconds = 0.0
        for key in self._victims(self.live, -self.free):
            nbytes = self[key]
            target = next(tier for tier, free in self.free_below().items() if nbytes <= free)
            seconds += self._spill(key, target)
        self.peak = max(self.peak, self.live_bytes)
        return seconds

    def _victims(self, tier: Tier, nbytes: float) -> list[Key]:
        if nbytes <= 0:
            return []
        free = [
            EvictionCandidate(key, size, self._next_use(key), used)
            for used, (key, size) in enumerate(self._keys[tier].items())
            if key not in self._holders
        ]
        return [candidate.key for candidate in choose(free, int(nbytes))]


def _between(one: Tier, other: Tier) -> TierLink:
    """Return the link between two tiers of a worker."""
    tiers = {one, other}
    if Tier.DISK in tiers:
        return TierLink.DISK
    return TierLink.PINNED if Tier.PINNED in tiers else TierLink.PAGEABLE
