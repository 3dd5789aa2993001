"""What lies live in the tiers that tasks read, and the room that is promised there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from dask_gpurt.memory.sizes import Owned, Roots
from dask_gpurt.memory.tiers import Limits, Tier


class Live:
    """The account of live objects, shared memory once. Not thread-safe.

    Parameters
    ----------
    limits
        Bytes of each tier.
    """

    def __init__(self, limits: Limits):
        self._limits = {Tier.DEVICE: limits.device, Tier.HOST: limits.host}
        self._owned = {tier: Owned() for tier in self._limits}
        self._kinds: Counter[tuple[Tier, str]] = Counter()
        self._of: dict[Hashable, tuple[Tier, str]] = {}
        self._promises: dict[Hashable, tuple[Tier, int]] = {}
        self._promised: Counter[Tier] = Counter()

    def add(self, key: Hashable, tier: Tier, kind: str, roots: Roots) -> None:
        """A key is live now."""
        owned = self._owned[tier]
        before = owned.total
        owned.add(key, roots)
        self._of[key] = tier, kind
        self._kinds[tier, kind] += owned.total - before

    def discard(self, key: Hashable) -> None:
        """A key is live no more."""
        tier, kind = self._of.pop(key)
        owned = self._owned[tier]
        before = owned.total
        owned.discard(key)
        self._kinds[tier, kind] += owned.total - before

    def total(self, tier: Tier) -> int:
        """Bytes of live objects in a tier."""
        return self._owned[tier].total if tier in self._owned else 0

    def of_kind(self, tier: Tier, kind: str) -> int:
        """Those of one kind; memory that two kinds share counts as what came first."""
        return self._kinds[tier, kind]

    def gain(self, key: Hashable, tier: Tier) -> int:
        """Bytes that would be free if this key went alone."""
        return self._owned[tier].gain(key)

    def promise(self, key: Hashable, tier: Tier, nbytes: int) -> None:
        """Keep room for a key; a later promise to it replaces the one before."""
        self.forget(key)
        self._promises[key] = tier, nbytes
        self._promised[tier] += nbytes

    def forget(self, key: Hashable) -> bool:
        """End a promise; whether there was one."""
        tier, nbytes = self._promises.pop(key, (Tier.DEVICE, 0))
        self._promised[tier] -= nbytes
        return nbytes > 0

    def promised(self, tier: Tier) -> int:
        """Bytes promised in a tier."""
        return self._promised[tier]

    def excess(self, tier: Tier, nbytes: int, others: int = 0) -> int:
        """Bytes that are too many in a tier once ``nbytes`` more are live, next to ``others``."""
        return self.total(tier) + self.promised(tier) + others + nbytes - self._limits[tier]

    def clear(self) -> None:
        """Nothing is live any more."""
        for owned in self._owned.values():
            owned.clear()
        for counted in (self._kinds, self._of, self._promises, self._promised):
            counted.clear()
