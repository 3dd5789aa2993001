"""Compare the scheduler's picture of memory with the bytes in pools, files and objects of its workers.

The machine in `tests/unit/memory/test_tiered_buffer_machine.py` compares a worker's own ledger at each step.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client, wait

import dask_gpurt
from dask_gpurt.memory.accounting import Roots, owned
from dask_gpurt.memory.ledger import PARTITIONS, Tier
from tests.helpers.clusters import (
    Library,
    assert_same_partitions,
    cluster,
    counters,
    partitions,
    told_too_early,
)
from tests.helpers.instruments import HandoverChecker
from tests.helpers.waiting import until

MIB = 2**20
SMALL = {"memory__tiers": True, "memory__device": 8 * MIB, "memory__pinned": 8 * MIB, "memory__host": 2 * MIB}
ROWS = 90_000


# ---- on a worker -----------------------------------------------------------------------------


def truth(dask_worker: Any) -> Counter[str] | None:
    """Measure the bytes by tier from all sources other than the ledger; None while something is in flight."""
    tiered_buffer, found = dask_worker.plugins["gpurt"].tiers.tiered_buffer, Counter[str]()
    with tiered_buffer._table.lock:
        entries = list(tiered_buffer._table.by_key.values())
        if (
            any(e.moving or e.holders or e.readers for e in entries)
            or tiered_buffer._table.live._reservations
        ):
            return None
        for tier in (Tier.DEVICE, Tier.HOST):
            roots: Roots = {}
            for entry in entries:
                if entry.live and entry.tier is tier:
                    roots |= owned(entry.value)
            found[tier] += sum(roots.values())
        for tier, mapping in tiered_buffer._table.lower._tiers.items():
            found[tier] += taken(tier, mapping)
    return +found


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


# ---- on the client ---------------------------------------------------------------------------


def usage(client: Client, by: str = "tier") -> pd.DataFrame:
    return dask_gpurt.memory_usage(client, by=by).to_pandas(names="metrics")


def scheduler_says(client: Client) -> dict[str, Counter[str]]:
    found = {worker: Counter[str]() for worker in client.nthreads()}
    for row in usage(client).itertuples():
        found[row.worker][row.tier] += row.partitions + row.shards
        assert row.headroom == row.capacity - row.partitions - row.shards - row.reservations
    return {worker: +used for worker, used in found.items()}


def rest(client: Client, *, empty: bool = False) -> Counter[str]:
    """Wait until moves and reports have ended: then the scheduler's picture has to be exact."""
    real: dict[str, Any] = {}

    def is_right() -> bool:
        nonlocal real
        real, said = client.run(truth), scheduler_says(client)
        by_prefix = usage(client, "prefix")
        prefixes = by_prefix[by_prefix.kind != "reservations"].groupby("worker")["bytes"].sum().to_dict()
        in_all = {worker: used.total() for worker, used in said.items() if used}
        return real == said and prefixes == in_all and not (empty and any(real.values()))

    until(is_right, lambda: f"{scheduler_says(client)}, truly {real}, by prefix {usage(client, 'prefix')}")
    return sum(real.values(), Counter[str]())


def make(library: Library, rows: int, seed: int) -> Any:
    numbers = np.random.default_rng(seed).integers(0, 1000, rows)
    return library.frame(pd.DataFrame({"key": numbers, "value": numbers * 2, "seed": seed}))


def view(frame: Any) -> Any:
    """Return all rows but the first, as a view of the same memory."""
    return frame.iloc[1:]


def test_what_is_made_viewed_shuffled_and_dropped(library: Library) -> None:
    """In all tiers: each time that the workers rest, the scheduler's picture is exact."""
    with cluster(library.name, **SMALL) as client:
        rows = [ROWS // (1 + part % 3) for part in range(32)]  # the host tier has no room for whole ones
        held = client.map(make, [library] * 32, rows, range(32), key="load")
        held += client.map(view, held[::4], key="view")
        wait(held)
        seen = rest(client)
        assert seen.keys() == {*Tier}
        parts = [dask.delayed(make)(library, ROWS // 2, part) for part in range(4)]
        collection = dd.from_delayed(parts, meta=make(library, 1, 0), verify_meta=False)
        shuffled = collection.shuffle("key").persist()
        wait(shuffled)
        rest(client)
        assert all(bool((part["key"] * 2 == part["value"]).all()) for part in client.gather(held[-3:]))
        del held[::2]
        rest(client)
        del held, shuffled, collection
        rest(client, empty=True)


def test_prefixes_of_what_the_tiers_hold(library: Library) -> None:
    with cluster(library.name, workers=1, **SMALL) as client:
        held = client.map(make, [library] * 8, [ROWS] * 8, range(8), key="load")
        wait(held)
        rest(client)
        rows = usage(client, "prefix")
        assert list(rows) == ["worker", "tier", "kind", "prefix", "bytes"]
        assert set(rows.prefix) == {"load"}
        assert set(rows.kind) == {PARTITIONS}
        assert rows.bytes.sum() == usage(client).partitions.sum() >= 8 * ROWS * 24
        with pytest.raises(ValueError, match="by='task': expected one of 'tier', 'prefix'"):
            dask_gpurt.memory_usage(client, by="task")
        dask_gpurt.disable(client)
        assert list(usage(client, "prefix")) == list(rows)
        assert usage(client, "prefix").empty


def test_without_tiers_there_are_rows_of_what_shuffles_hold(library: Library) -> None:
    with cluster(library.name, workers=1, memory__tiers=False) as client:
        held = client.submit(make, library, ROWS, 1)
        wait(held)
        while (rows := usage(client)).empty:  # until a heartbeat has brought them
            pass
        assert list(rows.tier) == [str(tier) for tier in Tier]
        assert not rows.partitions.any()
        assert usage(client, "prefix").empty


# ---- memory that changes hands too early ----------------------------------------------------------

# ---- clusters ------------------------------------------------------------------------


def frames() -> list[pd.DataFrame]:
    random = np.random.default_rng(0)
    return [
        pd.DataFrame(
            {"key": random.integers(0, 999, 20_000), "text": random.integers(0, 9, 20_000).astype(str)}
        )
        for _ in range(8)
    ]


@pytest.mark.slow
def test_nothing_is_too_early_in_shuffles_that_spill(library: Library) -> None:
    small = {"memory__device": 2**20, "memory__pinned": 2**20, "exchange__pool": 2**20}
    with cluster(library.name, handovers=True, **small) as client:
        collection = library.collection(frames())
        ours = partitions(collection.shuffle("key"))
        with dask.config.set({"dataframe.shuffle.method": "tasks", "gpurt.takeover": False}):
            theirs = partitions(collection.shuffle("key"))
        assert_same_partitions(ours, theirs, in_order=False)
        assert told_too_early(client) == []
        assert counters(client)["overlap.handovers"] > 0


def forget_to_settle() -> None:
    """Make producers publish blocks that may not have been written yet."""
    from tests.helpers import instruments

    watch_table = instruments.watch_table

    def forgetful(table: Any, checker: HandoverChecker) -> Any:
        settle = table.settle
        watch_table(table, checker).settle = settle
        return table

    instruments.watch_table = forgetful


@pytest.mark.slow
def test_the_doctor_tells_what_is_too_early(library: Library) -> None:
    with cluster(library.name, handovers=True) as client:
        client.run(forget_to_settle)
        partitions(library.collection(frames()).shuffle("key"))
        assert len(told_too_early(client)) == 2
        for found in told_too_early(client):
            assert "before packing has been waited for" in str(found)
        dask_gpurt.disable(client)  # the counts are meant to be non-zero, so skip the check at the end
