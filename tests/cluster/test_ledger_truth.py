"""Compare the ledger with the bytes in pools, files and objects while data arrive, move and leave."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.utils import key_split
from distributed import Client, Future, wait

import dask_gpurt
from dask_gpurt.device.libraries import lives_on_device
from dask_gpurt.memory.accounting import Roots, owned
from dask_gpurt.memory.ledger import PARTITIONS, SHARDS
from dask_gpurt.memory.tiers import Tier
from tests.helpers.clusters import Library, cluster
from tests.helpers.waiting import until

MIB = 2**20
SMALL = {"memory__tiers": True, "memory__device": 8 * MIB, "memory__pinned": 8 * MIB, "memory__host": 2 * MIB}
LOWER = (Tier.PINNED, Tier.HOST, Tier.DISK)
#: Size of the largest spilled object, and number of threads that store one object at a time.
LARGEST, MOVERS = 4 * MIB, 8
#: Seconds between two checks of a witness.
LOOK = 0.002


@dataclass
class Truth:
    """Count a worker's bytes by tier. By prefix they are a range, since prefixes may share memory."""

    used: Counter[str] = field(default_factory=Counter)
    least: Counter[tuple[str, str]] = field(default_factory=Counter)
    most: Counter[tuple[str, str]] = field(default_factory=Counter)
    promised: Counter[str] = field(default_factory=Counter)
    #: Whether nothing is in flight.
    resting: bool = True
    #: Bytes being read on the device, which cudf may have copied for that.
    copied: int = 0


# ---- on a worker -----------------------------------------------------------------------------


def truth(dask_worker: Any) -> Truth:
    """Measure from all sources other than the ledger."""
    tiers, found = dask_worker.plugins["gpurt"].tiers, Truth()
    tiered_buffer = tiers.tiered_buffer
    with tiered_buffer._table.lock:
        entries = dict(tiered_buffer._table.by_key)
        found.resting = not any(e.moving or e.holders or e.readers for e in entries.values())
        found.copied = sum(
            sum(owned(e.value).values())
            for e in entries.values()
            if e.live and (e.holders or e.moving) and lives_on_device(e.value)
        )
        for tier in (Tier.DEVICE, Tier.HOST):
            add_live(found, tier, {key: e for key, e in entries.items() if e.live and e.tier is tier})
        for tier, mapping in tiered_buffer._table.lower._tiers.items():
            found.used[tier] += taken(tier, mapping)
            for key, entry in entries.items():
                if entry.tier is tier and not entry.live:
                    nbytes = size_below(tier, mapping, entry.name)
                    found.least[tier, prefix_of(key, entry)] += nbytes
                    found.most[tier, prefix_of(key, entry)] += nbytes
        for tier, nbytes in tiered_buffer._table.live._reservations.values():
            found.promised[tier] += nbytes
    return found


def add_live(found: Truth, tier: Tier, entries: dict[Any, Any]) -> None:
    roots: Roots = {}
    owners: dict[int, set[str]] = {}
    for key, entry in entries.items():
        for address, nbytes in owned(entry.value).items():
            roots.setdefault(address, nbytes)
            owners.setdefault(address, set()).add(prefix_of(key, entry))
    found.used[tier] += sum(roots.values())
    for address, prefixes in owners.items():
        for prefix in prefixes:
            found.most[tier, prefix] += roots[address]
            found.least[tier, prefix] += roots[address] if len(prefixes) == 1 else 0


def prefix_of(key: Any, entry: Any) -> str:
    return key_split(key) if entry.label.kind == PARTITIONS else SHARDS


def taken(tier: Tier, mapping: Any) -> int:
    """Return the bytes in use according to the pool, the arrays and the file system."""
    if tier is Tier.PINNED:
        with mapping._pool._lock:
            return sum(sum(slab.arena._blocks.values()) for slab in mapping._pool._slabs)
    if tier is Tier.HOST:
        return sum(array.nbytes for _, arrays in list(mapping._entries.values()) for array in arrays)
    sizes = []
    for file in os.scandir(mapping.path):
        with suppress(FileNotFoundError):
            sizes.append(file.stat().st_size)
    return sum(sizes)


def size_below(tier: Tier, mapping: Any, name: str) -> int:
    if tier is Tier.DISK:
        return os.stat(mapping._files[name].path).st_size
    _, pieces = mapping._entries[name]
    block = mapping._pool._block if tier is Tier.PINNED else 1
    return sum(-(-piece.nbytes // block) * block for piece in pieces)


def own_account(dask_worker: Any) -> Truth:
    """Return the account of a worker's ledger in the same form."""
    ledger, found = dask_worker.plugins["gpurt"].tiers.ledger, Truth()
    for tier in Tier:
        found.used[tier] = ledger.used(tier)
        found.promised[tier] = ledger.cell(tier, "reservations")
        for prefix, nbytes in ledger.prefixes(tier).items():
            found.most[tier, prefix] = nbytes
        found.most[tier, SHARDS] += ledger.cell(tier, SHARDS)
    return found


class Witness(threading.Thread):
    """Compare a worker's account with the truth repeatedly, while it works."""

    def __init__(self, worker: Any):
        super().__init__(daemon=True)
        self.worker = worker
        self.looks = 0
        self.wrong: list[str] = []
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(LOOK):
            with self.worker.plugins["gpurt"].tiers.tiered_buffer._table.lock:
                # Bytes in a lower tier are added once stored: the ledger lags by at most one object per
                # thread.
                said, real = own_account(self.worker), truth(self.worker)
            self.looks += 1
            late = {tier: real.used[tier] - said.used[tier] for tier in Tier}
            if not 0 <= late[Tier.DEVICE] <= real.copied or any(
                not 0 <= late[tier] <= MOVERS * LARGEST for tier in LOWER
            ):
                self.wrong.append(f"late by {late}")
            if +said.promised != +real.promised:
                self.wrong.append(f"{said.promised} promised, truly {real.promised}")
            if not real.copied:
                self.wrong += different(said.most, real, [Tier.DEVICE])


def witness(dask_worker: Any) -> None:
    dask_worker.witness = Witness(dask_worker)
    dask_worker.witness.start()


def heard(dask_worker: Any) -> tuple[int, list[str]]:
    dask_worker.witness.ended.set()
    dask_worker.witness.join()
    return dask_worker.witness.looks, dask_worker.witness.wrong[:5]


def different(said: Counter[tuple[str, str]], real: Truth, tiers: Any = tuple(Tier)) -> list[str]:
    """Return the prefixes whose account is outside their range."""
    return [
        f"{place}: {said[place]} bytes, truly {real.least[place]} to {real.most[place]}"
        for place in {*said, *real.most}
        if place[0] in tiers and not real.least[place] <= said[place] <= real.most[place]
    ]


# ---- on the client ---------------------------------------------------------------------------


@contextmanager
def witnessed(client: Client) -> Iterator[None]:
    client.run(witness)
    try:
        yield
    finally:
        seen = client.run(heard)
    assert all(looks and not wrong for looks, wrong in seen.values()), seen


def scheduler_says(client: Client) -> dict[str, Truth]:
    found: dict[str, Truth] = {}
    for row in dask_gpurt.memory_usage(client).to_pandas(names="metrics").itertuples():
        of = found.setdefault(row.worker, Truth())
        of.used[row.tier] = row.partitions + row.shards
        of.promised[row.tier] = row.reservations
        assert row.headroom == row.capacity - row.partitions - row.shards - row.reservations
    for row in dask_gpurt.memory_usage(client, by="prefix").to_pandas(names="metrics").itertuples():
        assert row.bytes > 0
        if row.kind != "reservations":
            # The worker may have reported its first bytes between the two calls.
            found.setdefault(row.worker, Truth()).most[row.tier, row.prefix] += row.bytes
    return found


def mistakes(said: dict[str, Truth], real: dict[str, Truth]) -> list[str]:
    found = [f"{worker} is not at rest" for worker, of in real.items() if not of.resting or +of.promised]
    for worker, of in real.items():
        mine = said.get(worker, Truth())
        if (+mine.used, +mine.promised) != (+of.used, +of.promised):
            found.append(f"{worker}: {mine.used}, {mine.promised}, truly {of.used}, {of.promised}")
        found += [f"{worker}: {what}" for what in different(mine.most, of)]
        found += [f"{worker}: prefixes miss" for tier in Tier if total(mine, tier) != of.used[tier]]
    return found


def total(of: Truth, tier: Tier) -> int:
    return sum(nbytes for (at, _), nbytes in of.most.items() if at == tier)


def rest(client: Client, *, empty: bool = False) -> dict[str, Truth]:
    """Wait until moves and reports have ended: then the scheduler's ledger has to be exact."""
    real: dict[str, Truth] = {}

    def wrong() -> list[str]:
        nonlocal real
        real = client.run(truth)
        found = mistakes(scheduler_says(client), real)
        return found + [f"{worker} has {of.used}" for worker, of in real.items() if empty and +of.used]

    until(lambda: not wrong(), lambda: "\n".join(wrong()))
    return real


# ---- work ------------------------------------------------------------------------------------


def make(library: Library, rows: int, seed: int) -> Any:
    numbers = np.random.default_rng(seed).integers(0, 1000, rows)
    return library.frame(pd.DataFrame({"key": numbers, "value": numbers * 2, "seed": seed}))


def view(frame: Any) -> Any:
    """Return all rows but the first, as a view of the same memory."""
    return frame.iloc[1:]


def checked(frame: Any) -> bool:
    return bool((frame["key"] * 2 == frame["value"]).all())


@dataclass
class Walk:
    """Take random steps; the workers hold only the futures kept here."""

    client: Client
    library: Library
    random: random.Random
    kept: list[Any] = field(default_factory=list)
    steps: int = 0

    def step(self) -> None:
        self.steps += 1
        actions = [self.make, self.make, self.view, self.shuffle, self.drop, self.gather]
        self.random.choice(actions)()

    def frames(self) -> list[Future]:
        return [kept for kept in self.kept if isinstance(kept, Future)]

    def make(self) -> None:
        prefix = self.random.choice(["load", "join", "read-table"])
        for part in range(self.random.randint(4, 12)):
            rows, seed = self.random.randint(1, 90_000), self.random.randint(0, 99)
            key = (f"{prefix}-{self.steps:08x}", part)
            self.kept.append(self.client.submit(make, self.library, rows, seed, key=key))

    def view(self) -> None:
        for of in self.random.sample(self.frames(), min(2, len(self.frames()))):
            self.kept.append(self.client.submit(view, of, pure=False))

    def shuffle(self) -> None:
        parts = [dask.delayed(make)(self.library, 40_000, self.steps + part) for part in range(4)]
        collection = dd.from_delayed(parts, meta=make(self.library, 1, 0), verify_meta=False)
        self.kept.append(collection.shuffle("key").persist())

    def drop(self) -> None:
        self.random.shuffle(self.kept)
        del self.kept[: self.random.randint(1, 6)]

    def gather(self) -> None:
        for of in self.random.sample(self.frames(), min(2, len(self.frames()))):
            assert checked(of.result())


@pytest.mark.slow
def test_a_random_workload(library: Library) -> None:
    """At every rest the scheduler's ledger is exact; in between, each worker's own ledger is."""
    seen: Counter[str] = Counter()
    with cluster(library.name, **SMALL) as client:
        walk = Walk(client, library, random.Random(0))
        for _ in range(4):
            with witnessed(client):
                for _ in range(6):
                    walk.step()
                wait(walk.kept)
            for of in rest(client).values():
                seen += of.used
        assert all(client.gather(client.map(checked, walk.frames(), pure=False)))
        walk.kept.clear()
        rest(client, empty=True)
    assert {Tier.DEVICE, Tier.PINNED, Tier.HOST, Tier.DISK} == set(+seen)


def test_prefixes_of_what_the_tiers_hold(library: Library) -> None:
    with cluster(library.name, workers=1, **SMALL) as client:
        held = client.map(make, [library] * 8, [90_000] * 8, range(8), key="load")
        seen = client.submit(view, held[0], key="view")
        wait([*held, seen])
        rest(client)
        rows = dask_gpurt.memory_usage(client, by="prefix").to_pandas(names="metrics")
        assert list(rows) == ["worker", "tier", "kind", "prefix", "bytes"]
        assert set(rows.prefix) >= {"load"}
        assert set(rows.kind) == {PARTITIONS}
        assert (
            rows.bytes.sum()
            == dask_gpurt.memory_usage(client).to_pandas(names="metrics").partitions.sum()
            >= 8 * 90_000 * 24
        )
        assert list(dask_gpurt.memory_usage(client, by="tier").to_pandas(names="metrics")) == list(
            dask_gpurt.memory_usage(client).to_pandas(names="metrics")
        )
        with pytest.raises(ValueError, match="by='task': expected one of 'tier', 'prefix'"):
            dask_gpurt.memory_usage(client, by="task")
        dask_gpurt.disable(client)
        assert list(dask_gpurt.memory_usage(client, by="prefix").to_pandas(names="metrics")) == list(rows)
        assert dask_gpurt.memory_usage(client, by="prefix").to_pandas(names="metrics").empty


def test_switched_off_and_on_again(library: Library) -> None:
    """Reports from before the restart no longer count, not even those of the last heartbeat."""
    with cluster(library.name, workers=1, **SMALL) as client:
        for seed in range(3):
            held = client.submit(make, library, 90_000, seed)
            wait(held)
            rest(client)
        dask_gpurt.disable(client)
        dask_gpurt.enable(client)
        rest(client)
        del held
        rest(client, empty=True)


def test_without_tiers_there_are_rows_of_what_shuffles_hold(library: Library) -> None:
    with cluster(library.name, workers=1, memory__tiers=False) as client:
        held = client.submit(make, library, 90_000, 1)
        wait(held)
        while (
            rows := dask_gpurt.memory_usage(client).to_pandas(names="metrics")
        ).empty:  # until a heartbeat has brought them
            pass
        assert list(rows.tier) == [str(tier) for tier in Tier]
        assert not rows.partitions.any()
        assert dask_gpurt.memory_usage(client, by="prefix").to_pandas(names="metrics").empty
