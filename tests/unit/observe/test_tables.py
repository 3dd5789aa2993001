"""Print tables with units and all columns, and return frames to programs."""

from __future__ import annotations

import pandas as pd
import pytest

import dask_gpurt
from dask_gpurt.memory.ledger import KINDS
from dask_gpurt.observe.metrics import shown_metric
from dask_gpurt.observe.tables import MemoryUsage

COLUMNS = ("worker", "tier", "capacity", "headroom", *KINDS)
MIB = 2**20


def row(worker: str, tier: str, capacity: int, **kinds: int) -> dict[str, object]:
    used = sum(kinds.get(kind, 0) for kind in ("partitions", "shards", "reservations"))
    return {
        "worker": worker,
        "tier": tier,
        "capacity": capacity,
        "headroom": capacity - used,
        **{kind: kinds.get(kind, 0) for kind in KINDS},
    }


ON_HOST = (
    row("a", "device", 100 * MIB, partitions=30 * MIB, published=MIB),
    row("a", "pinned", 0),
    row("a", "host", 0, unmanaged=7 * MIB),
    row("a", "disk", 2**40),
)
ON_GPU = tuple(
    row("g", tier, nbytes * MIB) for tier, nbytes in (("device", 9), ("pinned", 0), ("host", 0), ("disk", 5))
)


def test_without_a_gpu_tiers_are_called_by_what_they_are() -> None:
    usage = MemoryUsage((*ON_HOST, *ON_GPU), COLUMNS, {"a": 64 * MIB})
    frame = usage.to_pandas().set_index(["worker", "tier"])
    assert list(frame.loc["a"].index) == ["memory", "shared memory", "disk"]
    assert frame.loc[("a", "memory"), "unmanaged"] == 7 * MIB
    assert frame.loc[("a", "memory"), "published"] == 0
    pool = frame.loc[("a", "shared memory")]
    assert (pool["capacity"], pool["published"], pool["headroom"]) == (64 * MIB, MIB, 63 * MIB)
    assert list(frame.loc["g"].index) == ["device", "pinned", "host", "disk"]
    before = usage.to_pandas(names="metrics")
    assert list(before["tier"]) == ["device", "pinned", "host", "disk"] * 2
    assert frame["partitions"].sum() == before["partitions"].sum()
    assert frame["unmanaged"].sum() == before["unmanaged"].sum()
    with pytest.raises(ValueError, match="expected 'shown' or 'metrics'"):
        usage.to_pandas(names="mine")


def test_it_prints_all_columns_with_units() -> None:
    with pd.option_context("display.width", 40, "display.max_columns", 3):
        printed = repr(MemoryUsage(ON_HOST, COLUMNS, {"a": 64 * MIB}))
    head = printed.splitlines()[1].split()
    assert head == [column for column in COLUMNS if column != "cudf"]
    assert "30.00 MiB" in printed
    assert "..." not in printed
    assert printed.startswith("<MemoryUsage of 1 worker\n")
    assert repr(MemoryUsage((), COLUMNS)) == "<MemoryUsage: no rows>"
    assert repr(MemoryUsage((), COLUMNS, enabled=False)) == "<MemoryUsage: the runtime is off>"


def test_a_column_for_cudf_is_printed_where_there_is_a_gpu() -> None:
    usage = MemoryUsage((*ON_HOST, *ON_GPU), COLUMNS, {"a": 64 * MIB})
    assert "cudf" in repr(usage)
    # A frame has the same columns everywhere, for programs.
    assert list(MemoryUsage(ON_HOST, COLUMNS, {"a": 64 * MIB}).to_pandas()) == list(COLUMNS)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("memory.device.peak", "memory.device.peak (memory)"),
        ("memory.disk.peak", "memory.disk.peak"),
        ("memory.spill.bytes.device.disk", "memory.spill.bytes.device.disk (memory to disk)"),
        ("memory.spill.bytes.exchange.disk", "memory.spill.bytes.exchange.disk"),
        ("exchange.bytes.comms", "exchange.bytes.comms"),
        ("shuffle.rows", "shuffle.rows"),
        ("of.another.version.device", "of.another.version.device"),
    ],
)
def test_a_metric_names_its_tiers_as_the_tables_do(name: str, shown: str) -> None:
    assert shown_metric(name) == shown


def test_completion_shows_the_functions() -> None:
    assert {"enable", "disable", "report", "memory_usage", "explain"} <= set(dir(dask_gpurt))
    for name in ("enable", "report", "memory_usage", "explain"):
        assert "Returns" in getattr(dask_gpurt, name).__doc__
