"""Bench a cluster: it is restored afterwards, and only the queries are measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

import dask_gpurt
from dask_gpurt.tools.bench import BenchResult, measure
from dask_gpurt.tools.bench.measure import BusyError
from dask_gpurt.tools.bench.results import PARTS, Run
from dask_gpurt.tools.bench.tables import QUERIES
from tests.helpers.waiting import until

#: Q1, a groupby with few result rows, and Q13, a join with groupbys.
TWO = (QUERIES[0], QUERIES[2])
SMALL: dict[str, Any] = {"scale": 0.002, "partitions": 4, "rounds": 1}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as local,
        Client(local, set_as_default=False) as client,
    ):
        yield client


def plugins(client: Client) -> list[set[str]]:
    found = [client.run_on_scheduler(lambda dask_scheduler: set(dask_scheduler.plugins))]
    return [*found, *client.run(lambda dask_worker: set(dask_worker.plugins)).values()]


@pytest.mark.nightly
def test_a_cluster_is_measured_and_left_as_it_was(client: Client, tmp_path: Path) -> None:
    before, told = plugins(client), list[tuple[Run, int]]()
    found = measure(
        client,
        **SMALL,
        queries=TWO,
        folder=str(tmp_path),
        on_run=lambda run, total: told.append((run, total)),
    )
    assert isinstance(found, BenchResult)
    assert plugins(client) == before
    assert not dask_gpurt.report(client).enabled
    assert found.contenders == ("gpurt", "p2p")
    assert [run for run, _ in told] == list(found.runs)
    assert {total for _, total in told} == {len(found.runs)} == {2 * 2 * len(TWO)}
    for run in found.runs:
        assert sum(getattr(run.spent, part) for part in PARTS) == pytest.approx(run.seconds, abs=1e-6)
        assert run.spent.read_bytes > 0
    assert sum(run.spent.moved_bytes for run in found.runs if run.contender == "gpurt") > 0
    assert (found.machine.workers, found.machine.threads, found.machine.hosts) == (2, 2, 1)
    assert found.ratio is not None


@pytest.mark.nightly
def test_where_the_runtime_is_on_it_stays_on_and_a_busy_cluster_is_left_alone(client: Client) -> None:
    other = Client(client.cluster, set_as_default=False)
    dask_gpurt.enable(other)
    try:
        kept = client.submit(lambda: 1, key="kept")
        assert kept.result() == 1
        with pytest.raises(BusyError, match="has 1 tasks of other programs"):
            measure(client, **SMALL)
        kept.release()
        until(lambda: client.run_on_scheduler(lambda dask_scheduler: not dask_scheduler.tasks))
        found = measure(client, **SMALL, queries=QUERIES[1:2])
        assert dask_gpurt.report(client).enabled
        assert (found.contenders, found.ratio) == (("gpurt",), None)
        assert not found.from_files
    finally:
        dask_gpurt.disable(other)
        other.close()
