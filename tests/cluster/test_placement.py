"""Have Dask reckon with slow links on a cluster, and leave it alone where there are none."""

from __future__ import annotations

from typing import Any

import dask.dataframe as dd
import pandas as pd
from distributed.core import Status

import dask_gpurt
from benchmarks.common.faults import SLOW, differing_links
from tests.helpers.in_process import on_plain_cluster, until


def replaced(scheduler: Any) -> set[str]:
    """Return the choices of a scheduler that are not Dask's own."""
    names = (
        "decide_worker_non_rootish",
        "decide_worker_rootish_queuing_enabled",
        "decide_worker",
        "is_rootish",
    )
    others = ("check_idle_saturated", "get_comm_cost", "valid_workers", "worker_objective")
    return {name for name in (*names, *others) if name in vars(scheduler)} | (
        vars(scheduler.extensions["stealing"]).keys() & {"_get_thief", "balance", "steal_time_ratio"}
    )


async def computes(client: Any) -> None:
    frame = pd.DataFrame({"key": range(1000), "value": range(1000)})
    left, right = (dd.from_pandas(frame, npartitions=8) for _ in range(2))
    assert len(await client.compute(left.merge(right, on="key"))) == 1000


@on_plain_cluster(**{"gpurt.placement.enabled": True})
async def test_where_nothing_is_kept_and_links_are_alike_dask_chooses(
    client: Any, scheduler: Any, a: Any, b: Any
) -> None:
    await dask_gpurt.enable(client)
    runtime = scheduler.extensions["gpurt"]
    await computes(client)
    for worker in (a, b):
        before = scheduler.bandwidth
        worker.bandwidth = 3e8
        await worker.heartbeat()
        assert scheduler.bandwidth == before / 2 + 1.5e8  # as Dask averages it
    assert runtime.settings.placement.enabled
    assert not runtime.slow_links.is_on
    assert replaced(scheduler) == set()
    await dask_gpurt.disable(client)


@on_plain_cluster(**{"gpurt.placement.enabled": True})
async def test_dask_reckons_with_slow_links_while_the_runtime_is_on(
    client: Any, scheduler: Any, a: Any, b: Any
) -> None:
    handler = scheduler.handlers["heartbeat_worker"]
    with differing_links():
        await dask_gpurt.enable(client)
        runtime = scheduler.extensions["gpurt"]
        await until(lambda: runtime.slow_links.is_on)
        assert scheduler.bandwidth == SLOW
        a.bandwidth = 3e8
        await a.heartbeat()
        assert scheduler.bandwidth == SLOW
        assert replaced(scheduler) == {"decide_worker_rootish_queuing_enabled"}
        await computes(client)
        await b.close()
        assert b.status == Status.closed
        await computes(client)
        assert not runtime.metrics.snapshot()["fallbacks"]
        await dask_gpurt.disable(client)
    assert replaced(scheduler) == set()
    assert scheduler.handlers["heartbeat_worker"] == handler


@on_plain_cluster()
async def test_it_is_off_by_default(client: Any, scheduler: Any, a: Any, b: Any) -> None:
    with differing_links():
        await dask_gpurt.enable(client)
        await computes(client)
        assert scheduler.extensions["gpurt"].slow_links is None
        assert replaced(scheduler) == set()
        await dask_gpurt.disable(client)
