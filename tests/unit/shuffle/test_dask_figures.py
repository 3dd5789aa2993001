"""Report a run's figures to Dask's shuffle dashboard page."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dask_gpurt.observe.progress import RunProgress
from dask_gpurt.shuffle.dask_figures import DaskFigures

RUN = ("one", 7)


def test_a_run_that_has_begun_has_no_traffic() -> None:
    """The disk traffic before its start is not its own."""
    report = figures(RunProgress(), traffic=[(500.0, 300.0), (500.0, 300.0)]).heartbeat()
    assert report["comm"]["avg_size"] == report["comm"]["avg_duration"] == 0
    assert report["disk"]["written"] == report["disk"]["read"] == report["disk"]["total"] == 0


def test_a_run_has_shards_in_pools_and_the_worker_spills() -> None:
    progress = RunProgress()
    for nbytes in (100, 300):
        progress.offered(nbytes)
    progress.received(70)
    report = figures(progress, traffic=[(500.0, 300.0), (508.0, 301.0)]).heartbeat()
    comm, disk = report["comm"], report["disk"]
    assert (comm["total"], comm["written"], comm["read"], comm["avg_size"]) == (400, 400, 70, 200)
    assert (comm["memory"], comm["memory_limit"]) == (50 - 20 + 5, 1000 + 10), "retained blocks are free"
    assert comm["buckets"] == 2
    assert (disk["total"], disk["written"], disk["read"]) == (8, 8, 1)


def test_the_page_gets_the_fields_that_it_reads() -> None:
    report = figures(RunProgress(), traffic=[(0.0, 0.0)] * 2).heartbeat()
    fields = {"memory", "memory_limit", "total", "buckets", "written", "read", "avg_size", "avg_duration"}
    assert report.keys() == {"comm", "disk", "start"}
    assert report["comm"].keys() == report["disk"].keys() == fields


def figures(progress: RunProgress, traffic: list[tuple[float, float]]) -> DaskFigures:
    """Return the figures of a run, on a worker with this disk traffic at its start and later."""
    pools = SimpleNamespace(
        describe=lambda: {
            "host": {"capacity": 1000, "used": 50, "retained": 20},
            "gpu": {"capacity": 10, "used": 5, "retained": 0},
        },
        shares=lambda run: {RUN: {0: "tcp://a:1", 4: "tcp://b:1"}}[run],
    )
    at = iter(traffic)
    exchange: Any = SimpleNamespace(pools=pools, disk_traffic=lambda: next(at))
    return DaskFigures(RUN, exchange, progress)
