"""Report a run's figures to Dask's page of shuffles."""

from __future__ import annotations

from dask_gpurt.observe.progress import RunProgress

POOLS = ({"capacity": 1000, "used": 50, "retained": 20}, {"capacity": 10, "used": 5, "retained": 0})


def test_a_run_has_shards_in_pools() -> None:
    progress = RunProgress()
    for nbytes in (100, 300):
        progress.offered(nbytes)
    progress.received(70)
    comm = progress.for_dask(POOLS)["comm"]
    assert (comm["total"], comm["written"], comm["read"], comm["avg_size"]) == (400, 400, 70, 200)
    assert (comm["memory"], comm["memory_limit"]) == (50 - 20 + 5, 1000 + 10), "retained blocks are free"


def test_the_page_gets_the_fields_that_it_reads() -> None:
    report = RunProgress().for_dask(POOLS)
    fields = {"memory", "memory_limit", "total", "buckets", "written", "read", "avg_size", "avg_duration"}
    assert report.keys() == {"comm", "disk", "start"}
    assert report["comm"].keys() == report["disk"].keys() == fields
