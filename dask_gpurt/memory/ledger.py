"""Define the tiers of a worker, and count the bytes in each, for a worker and for the cluster. Pure.

Decisions and their figures: ``docs/decisions/scheduler.md``.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

#: Bytes by which a live tier may exceed its limit before objects are spilled: one block of the pinned tier,
#: but at most this share of the tier.
SPILL_SLACK_BYTES, SLACK_SHARE = 2**20, 1 / 64


class Tier(StrEnum):
    """Enumerate the memory tiers, from fast to slow."""

    DEVICE = "device"
    PINNED = "pinned"
    HOST = "host"
    DISK = "disk"


class NoRoom(Exception):
    """A tier cannot take an object.

    ``tier``, ``nbytes``: the tier, and the bytes that were to be stored.
    ``reason``: the reason, if it is not just that the tier is full.
    """

    def __init__(self, tier: Tier, nbytes: int, reason: str = ""):
        super().__init__(tier, nbytes, reason)  # all arguments, so that it can be pickled
        self.tier = tier
        self.nbytes = nbytes
        self.reason = reason

    def __str__(self) -> str:
        return f"no room for {self.nbytes} bytes in the {self.tier} tier" + (
            self.reason and f": {self.reason}"
        )


@dataclass(frozen=True)
class Limits:
    """Limit the bytes of each tier; None for a disk tier limited only by the file system."""

    device: int
    pinned: int
    host: int
    disk: int | None

    def live(self, tier: Tier) -> int:
        """Return the limit of a live tier."""
        return self.device if tier is Tier.DEVICE else self.host


# ---- ledgers -----------------------------------------------------------------------------------------

#: Kinds of bytes that count against a tier's capacity: data of keys, pulled shards, reservations. The other
#: kinds do not: what is cached of files, published shards in the exchange pool, bytes that a library has
#: spilled itself, and all other memory of the process or on the device.
PARTITIONS, SHARDS, RESERVATIONS = "partitions", "shards", "reservations"
#: Ranges or columns of files that tasks have read; whoever needs the memory gets it.
CACHED = "cached"
#: Named after the only library that does so.
SPILLED_BY_LIBRARY = "cudf"
KINDS = (PARTITIONS, SHARDS, RESERVATIONS, CACHED, "published", SPILLED_BY_LIBRARY, "unmanaged")
#: The most task prefixes that a worker reports separately, and the name for the sum of the others.
MAX_PREFIXES, OTHERS = 50, "(others)"

#: The plain values of a ledger, which travel with heartbeats.
LedgerMessage = Mapping[str, Any]


class Label(NamedTuple):
    """Label bytes with their kind and, for partitions, with the prefix of their task."""

    kind: str
    prefix: str = ""


class Ledger:
    """Count the bytes of one worker by tier and kind, and of partitions also by task prefix. Thread-safe."""

    def __init__(self, capacity: Mapping[Tier, int]):
        self.capacity = dict(capacity)
        #: On a worker without a GPU, the capacity of the exchange pool in bytes, which is in shared memory
        #: and not part of a tier; otherwise None.
        self.shared_memory: int | None = None
        self._cells: defaultdict[tuple[Tier, str], int] = defaultdict(int)
        #: Bytes by prefix and tier. A prefix without an entry of its own counts as one of the others until
        #: its bytes are 0.
        self._prefixes: dict[str, dict[Tier, int]] = {}
        self._others: defaultdict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    def set(self, tier: Tier, kind: str, nbytes: int) -> None:
        """Set the bytes of a kind in a tier."""
        with self._lock:
            self._cells[tier, kind] = nbytes

    def set_capacity(self, tier: Tier, nbytes: int) -> None:
        """Set the capacity of a tier."""
        self.capacity[tier] = nbytes

    def add(self, tier: Tier, label: Label, nbytes: int) -> None:
        """Add bytes in a tier; negative to subtract."""
        if not nbytes:
            return
        with self._lock:
            self._cells[tier, label.kind] += nbytes
            if label.prefix:
                self._add_to_prefix(tier, label.prefix, nbytes)

    def _add_to_prefix(self, tier: Tier, prefix: str, nbytes: int) -> None:
        if prefix in self._others or (prefix not in self._prefixes and self._no_name_left()):
            self._others[prefix] += nbytes
            if not self._others[prefix]:
                del self._others[prefix]
            prefix = OTHERS
        sizes = self._prefixes.setdefault(prefix, {})
        sizes[tier] = sizes.get(tier, 0) + nbytes
        if not any(sizes.values()):
            del self._prefixes[prefix]

    def _no_name_left(self) -> bool:
        return len(self._prefixes) - (OTHERS in self._prefixes) >= MAX_PREFIXES

    def cell(self, tier: Tier, kind: str) -> int:
        """Return the bytes of a kind in a tier."""
        return self._cells.get((tier, kind), 0)

    def prefixes(self, tier: Tier) -> dict[str, int]:
        """Return the bytes of partitions in a tier, by task prefix."""
        with self._lock:
            return {name: sizes[tier] for name, sizes in self._prefixes.items() if sizes.get(tier)}

    def used(self, tier: Tier) -> int:
        """Return the bytes of data and shards in a tier."""
        return self.cell(tier, PARTITIONS) + self.cell(tier, SHARDS)

    def headroom(self, tier: Tier) -> int:
        """Return the capacity minus used and reserved bytes."""
        return self.capacity[tier] - self.used(tier) - self.cell(tier, RESERVATIONS)

    def snapshot(self) -> LedgerMessage:
        """Return everything as plain values."""
        with self._lock:
            return {
                "shared_memory": self.shared_memory,
                "capacity": {str(tier): nbytes for tier, nbytes in self.capacity.items()},
                "cells": {str(tier): self._in(tier) for tier in Tier},
                "prefixes": {
                    str(tier): {
                        name: sizes[tier] for name, sizes in self._prefixes.items() if sizes.get(tier)
                    }
                    for tier in Tier
                },
            }

    def _in(self, tier: Tier) -> dict[str, int]:
        return {kind: nbytes for (of, kind), nbytes in self._cells.items() if of is tier and nbytes}


# ---- of all workers, by the plain values of their ledgers --------------------------------------------


def rows(known: Mapping[str, LedgerMessage]) -> list[dict[str, Any]]:
    """Return a row for each worker and tier: capacity, headroom, and the bytes of each kind."""
    return [_row(worker, ledger, tier) for worker, ledger in sorted(known.items()) for tier in Tier]


def _row(worker: str, ledger: LedgerMessage, tier: Tier) -> dict[str, Any]:
    capacity, cells = ledger["capacity"][tier], ledger["cells"].get(tier, {})
    kinds = {kind: cells.get(kind, 0) for kind in KINDS}
    headroom = capacity - kinds[PARTITIONS] - kinds[SHARDS] - kinds[RESERVATIONS]
    return {"worker": worker, "tier": str(tier), "capacity": capacity, "headroom": headroom, **kinds}


def room(ledger: LedgerMessage) -> int:
    """Return the free bytes in all tiers of a worker."""
    live, *lower = [_row("", ledger, tier)["headroom"] for tier in Tier]
    return int(live + sum(left for left in lower if left > 0))  # the live one may be overdrawn


def shared_memory(known: Mapping[str, LedgerMessage]) -> dict[str, int]:
    """Return the capacity of the exchange pool by worker, for workers without a GPU."""
    capacities = ((worker, ledger["shared_memory"]) for worker, ledger in known.items())
    return {worker: nbytes for worker, nbytes in capacities if nbytes is not None}


def rows_by_prefix(known: Mapping[str, LedgerMessage]) -> list[dict[str, Any]]:
    """Return a row for each worker, tier and task prefix with bytes.

    For shards and reservations the kind is the prefix too.
    """
    return [
        {"worker": worker, "tier": str(tier), "kind": kind, "prefix": prefix, "bytes": nbytes}
        for worker, ledger in sorted(known.items())
        for tier in Tier
        for kind, prefix, nbytes in _named(ledger, tier)
    ]


def _named(ledger: LedgerMessage, tier: Tier) -> list[tuple[str, str, int]]:
    cells, prefixes = ledger["cells"].get(tier, {}), ledger["prefixes"].get(tier, {})
    others = [(kind, kind, cells[kind]) for kind in (SHARDS, RESERVATIONS) if cells.get(kind)]
    return [(PARTITIONS, name, nbytes) for name, nbytes in sorted(prefixes.items())] + others
