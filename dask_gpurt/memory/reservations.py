"""Reserve bytes of the live tiers before they are allocated.

Decisions and their figures: ``docs/decisions/memory.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dask.typing import Key

from dask_gpurt.memory.accounting import Roots, owned
from dask_gpurt.memory.entries import EntryTable
from dask_gpurt.memory.spilling import Spiller
from dask_gpurt.memory.tiers import SLACK_SHARE, SPILL_SLACK_BYTES, Tier


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
