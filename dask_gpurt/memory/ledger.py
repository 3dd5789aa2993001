"""Define the tiers of a worker, and count the bytes in each, for a worker and for the cluster. Pure."""

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

LedgerMessage = dict[str, Any]


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
        #: Whether there is anything to report since the last :meth:`snapshot`.
        self._changed = True
        self._lock = threading.Lock()

    def set(self, tier: Tier, kind: str, nbytes: int) -> None:
        """Set the bytes of a kind in a tier."""
        with self._lock:
            if self.cell(tier, kind) != nbytes:
                self._cells[tier, kind] = nbytes
                self._changed = True

    def set_capacity(self, tier: Tier, nbytes: int) -> None:
        """Set the capacity of a tier."""
        with self._lock:
            if self.capacity[tier] != nbytes:
                self.capacity[tier] = nbytes
                self._changed = True

    def add(self, tier: Tier, label: Label, nbytes: int) -> None:
        """Add bytes in a tier; negative to subtract."""
        if not nbytes:
            return
        with self._lock:
            self._cells[tier, label.kind] += nbytes
            self._changed = True
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

    def changes(self) -> LedgerMessage | None:
        """Return a :meth:`snapshot`; None if nothing has changed since the last one."""
        return self.snapshot() if self._changed else None

    def snapshot(self) -> LedgerMessage:
        """Return a message with everything."""
        with self._lock:
            self._changed = False
            return {
                "shared_memory": self.shared_memory,
                "capacity": {str(tier): nbytes for tier, nbytes in self.capacity.items()},
                "cells": [
                    [str(tier), kind, nbytes] for (tier, kind), nbytes in self._cells.items() if nbytes
                ],
                "prefixes": [
                    [str(tier), name, nbytes]
                    for name, sizes in self._prefixes.items()
                    for tier, nbytes in sizes.items()
                    if nbytes
                ],
            }


class ClusterMemory:
    """Hold the ledgers of all workers, as reported to the scheduler."""

    def __init__(self) -> None:
        self._capacity: dict[str, dict[str, int]] = {}
        self._shared_memory: dict[str, int | None] = {}
        self._on_gpu: set[str] = set()
        self._cells: dict[str, dict[tuple[str, str], int]] = {}
        self._prefixes: dict[str, dict[tuple[str, str], int]] = {}

    def apply(self, worker: str, message: LedgerMessage) -> None:
        """Apply a message of a worker, in place of its previous one: its stream keeps their order."""
        self.forget(worker)
        self._capacity[worker] = message["capacity"]
        self._shared_memory[worker] = message["shared_memory"]
        if self._shared_memory[worker] is None:
            self._on_gpu.add(worker)
        self._cells[worker] = {(tier, kind): nbytes for tier, kind, nbytes in message["cells"]}
        self._prefixes[worker] = {(tier, name): nbytes for tier, name, nbytes in message["prefixes"]}

    def forget(self, worker: str) -> None:
        """Forget a worker that has left."""
        everything: tuple[dict[str, Any], ...] = (self._capacity, self._cells, self._prefixes)
        for known in (*everything, self._shared_memory):
            known.pop(worker, None)
        self._on_gpu.discard(worker)

    def shared_memory(self) -> dict[str, int]:
        """Return the capacity of the exchange pool by worker, for workers without a GPU."""
        return {worker: nbytes for worker, nbytes in self._shared_memory.items() if nbytes is not None}

    def room(self, worker: str) -> int | None:
        """Return the free bytes in all tiers of a worker; None if it has not reported."""
        if (capacity := self._capacity.get(worker)) is None:
            return None
        live, *lower = [self._row(worker, str(tier), capacity[tier])["headroom"] for tier in Tier]
        return int(live + sum(left for left in lower if left > 0))  # the live one may be overdrawn

    @property
    def has_gpus(self) -> bool:
        """Return whether any worker has a GPU."""
        return bool(self._on_gpu)

    def has_cached(self, worker: str, local: bool = False) -> bool:
        """Return whether a worker has cached any files, which are local ones on GPUs only."""
        tiers = [tier for tier in Tier if self._cells.get(worker, {}).get((str(tier), CACHED))]
        if local:
            return worker in self._on_gpu and not {Tier.DEVICE, Tier.PINNED}.isdisjoint(tiers)
        return bool(tiers)

    def workers(self) -> list[str]:
        """Return the workers that have reported, sorted."""
        return sorted(self._capacity)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each worker and tier: capacity, headroom, and the bytes of each kind."""
        return [
            self._row(worker, str(tier), self._capacity[worker][str(tier)])
            for worker in self.workers()
            for tier in Tier
        ]

    def _row(self, worker: str, tier: str, capacity: int) -> dict[str, Any]:
        kinds = {kind: self._cells[worker].get((tier, kind), 0) for kind in KINDS}
        headroom = capacity - kinds[PARTITIONS] - kinds[SHARDS] - kinds[RESERVATIONS]
        return {"worker": worker, "tier": tier, "capacity": capacity, "headroom": headroom, **kinds}

    def rows_by_prefix(self) -> list[dict[str, Any]]:
        """Return a row for each worker, tier and task prefix with bytes.

        For shards and reservations the kind is the prefix too.
        """
        return [
            {"worker": worker, "tier": str(tier), "kind": kind, "prefix": prefix, "bytes": nbytes}
            for worker in self.workers()
            for tier in Tier
            for kind, prefix, nbytes in self._named(worker, str(tier))
        ]

    def _named(self, worker: str, tier: str) -> list[tuple[str, str, int]]:
        found = sorted((name, n) for (at, name), n in self._prefixes[worker].items() if at == tier)
        others = [(kind, self._cells[worker].get((tier, kind), 0)) for kind in (SHARDS, RESERVATIONS)]
        return [(PARTITIONS, name, n) for name, n in found] + [(kind, kind, n) for kind, n in others if n]
