"""What lies live in the tiers that tasks read, and the room that is promised there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

from dask_gpurt.memory.ledger import RESERVATIONS, Label, Ledger
from dask_gpurt.memory.sizes import Owned, Roots
from dask_gpurt.memory.tiers import Limits, Tier

_PROMISED = Label(RESERVATIONS)


class Live:
    """The account of live objects, shared memory once. Not thread-safe.

    Parameters
    ----------
    limits
        Bytes of each tier.
    ledger
        Told of each change. Shared memory counts as what the first key is that is still there.
    """

    def __init__(self, limits: Limits, ledger: Ledger):
        self._limits = {Tier.DEVICE: limits.device, Tier.HOST: limits.host}
        self._owned = {tier: Owned() for tier in self._limits}
        self._ledger = ledger
        self._of: dict[Hashable, tuple[Tier, Label]] = {}
        self._promises: dict[Hashable, tuple[Tier, int]] = {}
        self._promised: Counter[Tier] = Counter()
        #: Bytes that have become live so far, and how many objects have ceased to be.
        self.came: Counter[Tier] = Counter()
        self.left = 0

    def add(self, key: Hashable, tier: Tier, label: Label, roots: Roots) -> None:
        """A key is live now."""
        self._of[key] = tier, label
        added = self._owned[tier].add(key, roots)
        self.came[tier] += added
        self._ledger.add(tier, label, added)

    def discard(self, key: Hashable) -> None:
        """A key is live no more."""
        self._discount(key)
        self.left += 1

    def _discount(self, key: Hashable) -> None:
        tier, label = self._of.pop(key)
        for heir, nbytes in self._owned[tier].discard(key).items():
            self._ledger.add(tier, label, -nbytes)
            if heir is not None:
                self._ledger.add(tier, self._of[heir][1], nbytes)

    def revise(self, key: Hashable, roots: Roots) -> None:
        """What a live key owns, which may have changed."""
        tier, label = self._of[key]
        if roots != self._owned[tier].roots(key):
            self._discount(key)
            self.add(key, tier, label, roots)

    def keys(self, tier: Tier) -> list[Any]:
        """The keys that are live in a tier, the oldest first."""
        return [key for key, (where, _) in self._of.items() if where is tier]

    def total(self, tier: Tier) -> int:
        """Bytes of live objects in a tier."""
        return self._owned[tier].total if tier in self._owned else 0

    def lacking(self, tier: Tier, roots: Roots) -> int:
        """Bytes that a new object would add to a tier: none for views of what is live there."""
        return self._owned[tier].lacking(roots)

    def gain(self, key: Hashable, tier: Tier) -> int:
        """Bytes that would be free if this key went alone."""
        return self._owned[tier].gain(key)

    def is_here(self, key: Hashable, tier: Tier) -> bool:
        """Whether a key has bytes in a tier, and not only somewhere else for now."""
        return self._owned[tier].is_here(key)

    def set_elsewhere(self, tier: Tier, roots: Iterable[int]) -> None:
        """Which allocations of a tier lie somewhere else now, though what owns them is live."""
        for key, nbytes in self._owned[tier].set_elsewhere(roots).items():
            self._ledger.add(tier, self._of[key][1], nbytes)

    def promise(self, key: Hashable, tier: Tier, nbytes: int) -> None:
        """Keep room for a key; a later promise to it replaces the one before."""
        self.forget(key)
        self._promises[key] = tier, nbytes
        self._promise_more(tier, nbytes)

    def promised(self, key: Hashable, tier: Tier) -> int:
        """Bytes that a key has been promised in a tier."""
        where, nbytes = self._promises.get(key, (tier, 0))
        return nbytes if where is tier else 0

    def forget(self, key: Hashable) -> bool:
        """End a promise; whether there was one."""
        tier, nbytes = self._promises.pop(key, (Tier.DEVICE, 0))
        self._promise_more(tier, -nbytes)
        return nbytes > 0

    def _promise_more(self, tier: Tier, nbytes: int) -> None:
        self._promised[tier] += nbytes
        self._ledger.add(tier, _PROMISED, nbytes)

    def excess(self, tier: Tier, nbytes: int, others: int = 0) -> int:
        """Bytes that are too many in a tier once ``nbytes`` more are live, next to ``others``."""
        return self.total(tier) + self._promised[tier] + others + nbytes - self._limits[tier]

    def clear(self) -> None:
        """Nothing is live any more."""
        for owned in self._owned.values():
            owned.clear()
        for counted in (self._of, self._promises, self._promised):
            counted.clear()
