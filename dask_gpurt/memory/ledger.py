"""What lies where: one account for each worker, and the picture of all of them. Pure."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from dask_gpurt.memory.tiers import Tier

#: What bytes in a tier are: keys' data, shards that were pulled, room promised. Next to the tier's
#: capacity: shards in the exchange pool, and all else in the process or on the device.
PARTITIONS, SHARDS = "partitions", "shards"
KINDS = (PARTITIONS, SHARDS, "reservations", "published", "unmanaged")

Message = dict[str, Any]


class Ledger:
    """The account of one worker: bytes by tier and kind. Thread-safe.

    Parameters
    ----------
    capacity
        Bytes of each tier.
    """

    def __init__(self, capacity: Mapping[Tier, int]):
        self.capacity = dict(capacity)
        self._cells: dict[tuple[Tier, str], int] = {}
        self._changed: set[tuple[Tier, str]] = set()
        self._seq = 0
        self._lock = threading.Lock()

    def set(self, tier: Tier, kind: str, nbytes: int) -> None:
        """Write a cell."""
        cell = tier, kind
        with self._lock:
            if self._cells.get(cell, 0) != nbytes:
                self._cells[cell] = nbytes
                self._changed.add(cell)

    def cell(self, tier: Tier, kind: str) -> int:
        """Read a cell."""
        return self._cells.get((tier, kind), 0)

    def used(self, tier: Tier) -> int:
        """Bytes of data and shards in a tier."""
        return self.cell(tier, "partitions") + self.cell(tier, "shards")

    def headroom(self, tier: Tier) -> int:
        """Capacity less what is used and promised."""
        return self.capacity[tier] - self.used(tier) - self.cell(tier, "reservations")

    def changes(self) -> Message | None:
        """The cells that have changed since the last call, None without any.

        Values are absolute, so that a message that is lost or comes twice does no harm.
        """
        with self._lock:
            if not self._changed:
                return None
            changed, self._changed = self._changed, set()
            return self._message(changed)

    def snapshot(self) -> Message:
        """All cells."""
        with self._lock:
            return self._message(set(self._cells))

    def _message(self, cells: Iterable[tuple[Tier, str]]) -> Message:
        self._seq += 1
        return {
            "seq": self._seq,
            "capacity": {str(tier): nbytes for tier, nbytes in self.capacity.items()},
            "cells": [[str(tier), kind, self._cells[tier, kind]] for tier, kind in sorted(cells)],
        }


class Picture:
    """The accounts of all workers, as they have reported them."""

    def __init__(self) -> None:
        self._seq: dict[str, int] = {}
        self._capacity: dict[str, dict[str, int]] = {}
        self._cells: dict[str, dict[tuple[str, str], int]] = {}

    def apply(self, worker: str, message: Message) -> None:
        """Take a message; one that is older than what is known counts for nothing."""
        if message["seq"] <= self._seq.get(worker, 0):
            return
        self._seq[worker] = message["seq"]
        self._capacity[worker] = message["capacity"]
        cells = self._cells.setdefault(worker, {})
        for tier, kind, nbytes in message["cells"]:
            cells[tier, kind] = nbytes

    def forget(self, worker: str) -> None:
        """A worker has left."""
        for known in (self._seq, self._capacity, self._cells):
            known.pop(worker, None)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each worker and tier: capacity, headroom, and the bytes of each kind."""
        return [
            self._row(worker, str(tier), capacity[str(tier)])
            for worker, capacity in sorted(self._capacity.items())
            for tier in Tier
        ]

    def _row(self, worker: str, tier: str, capacity: int) -> dict[str, Any]:
        kinds = {kind: self._cells[worker].get((tier, kind), 0) for kind in KINDS}
        used = kinds["partitions"] + kinds["shards"]
        headroom = capacity - used - kinds["reservations"]
        return {"worker": worker, "tier": tier, "capacity": capacity, "headroom": headroom, **kinds}
