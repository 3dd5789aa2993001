"""Promise bytes of the live tiers before they are taken."""

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

    An object that is stored under the key takes the reservation. A later reservation replaces the one before.

    A tier may go above its limit by at most one slack: ``SPILL_SLACK_BYTES``, or ``SLACK_SHARE`` of the tier
    if that is less. So a result of a few bytes never has a partition spilled.
    """

    def __init__(self, table: EntryTable, spiller: Spiller):
        self._table = table
        self._spiller = spiller
        #: Objects that are about to be stored, with what they own: to look at them costs some time.
        self._measured: dict[Key, tuple[Any, Roots]] = {}

    def try_reserve(self, key: Key, nbytes: int, tier: Tier) -> bool:
        """Reserve room if there is some; return whether. Does not block."""
        table, slack = self._table, self._slack(tier)
        with table.lock:
            if table.excess(nbytes, tier) > (slack if nbytes <= slack else 0):
                return False
            table.live.reserve(key, tier, nbytes)
            table.account()
            return True

    def spill_and_try(self, key: Key, nbytes: int, tier: Tier) -> bool:
        """Reserve room if it can be made by spilling; return whether. Blocks."""
        self._spiller.make_room(nbytes, tier)
        return self.try_reserve(key, nbytes, tier)

    def reserve(self, key: Key, nbytes: int, tier: Tier) -> None:
        """Reserve room, and spill for it. Blocks.

        Where nothing is left to spill the tier goes above its limit: that is better than never.
        """
        # First, or another thread might take the room that is made:
        #   Thread 1: makes room for x            Thread 2: reserves it for y
        #   Thread 1: reserves it for x, and the tier is above its limit though more could have been spilled
        with self._table.lock:
            self._table.live.reserve(key, tier, nbytes)
            self._table.account()
        self.spill_for_all(tier)

    def spill_for_all(self, tier: Tier) -> None:
        """Spill for everything that is reserved in a tier, as far as that goes. Blocks."""
        while self._spiller.make_room(0, tier):
            pass

    def replace(self, old: Key, new: Mapping[Key, tuple[int, Tier]]) -> bool:
        """Cancel a reservation and make others in its place, in one step; return whether they fit.

        This does not block, and reserves the bytes also where they do not fit. Bytes within the slack always
        fit: a tier is above its limit then for data that were there before, such as an input that is about to
        go.
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
        """Cancel a reservation, if there is one."""
        self._measured.pop(key, None)
        with self._table.lock:
            if self._table.live.cancel(key):
                self._table.account()

    def cancel_all(self, keys: Iterable[Key]) -> None:
        """Cancel the reservations that there still are among some keys."""
        for key in keys:
            if key in self._measured or self._table.live.is_reserved(key):
                self.cancel(key)

    def has_room(self, nbytes: int, tier: Tier) -> bool:
        """Return whether this many bytes more fit into a tier as it is."""
        return self._table.excess(nbytes, tier) <= 0

    def leaves_half(self, nbytes: int, tier: Tier) -> bool:
        """Return whether this many bytes would leave half of a tier to other things."""
        return 2 * nbytes <= self._table.limits.live(tier)

    def bytes_added_by(self, key: Key, value: Any, tier: Tier) -> int:
        """Return the bytes that an object would add to a tier.

        The result of measuring is kept until the object is stored under its key, or the reservation of the
        key is cancelled.
        """
        roots = self.measured(key, value)
        self._measured[key] = value, roots
        with self._table.lock:
            return self._table.live.lacking(tier, roots)

    def measured(self, key: Key, value: Any) -> Roots:
        """Return what an object owns that is to be stored under a key; look at it unless that was done."""
        before, roots = self._measured.pop(key, (None, None))
        return owned(value) if roots is None or before is not value else roots

    def overshoot(self) -> int:
        """Return by how many bytes live objects exceed the device tier; 0 within the slack."""
        table = self._table
        beyond = table.live.total(Tier.DEVICE) - table.limits.device
        return beyond if beyond > self._slack(Tier.DEVICE) else 0

    def _slack(self, tier: Tier) -> int:
        return int(min(SPILL_SLACK_BYTES, SLACK_SHARE * self._table.limits.live(tier)))
