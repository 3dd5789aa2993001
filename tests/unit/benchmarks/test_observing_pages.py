"""Check that the benchmark of pages requests all resources for the given number of workers."""

from __future__ import annotations

from types import SimpleNamespace

from benchmarks.observe.pages import PREFIXES, populate
from dask_gpurt.memory.ledger import ClusterMemory
from dask_gpurt.monitor.dashboard.shuffles import MAX_SHUFFLES


def test_workers_are_told_of_with_tiers_of_their_own() -> None:
    runtime = SimpleNamespace(cluster_memory=ClusterMemory())
    history = populate(runtime, 256).rows(0.0)
    assert [one["rows"] for one in history] == [sum(range(256))] * MAX_SHUFFLES
    assert len(runtime.cluster_memory.workers()) == 256
    assert len(runtime.cluster_memory.rows_by_prefix()) == 256 * 2 * PREFIXES
    populate(runtime, 300)
    assert len(runtime.cluster_memory.workers()) == 300
