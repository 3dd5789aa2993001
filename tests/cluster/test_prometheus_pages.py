"""Share one Prometheus page between the servers of a process, and leave nothing there when they close."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
from distributed import Client, Scheduler, Worker, wait
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from tornado.httpclient import AsyncHTTPClient

import dask_gpurt
from tests.helpers.in_process import on_cluster, on_plain_cluster

MIB = 2**20


async def page(server: Any) -> dict[str, dict[str, float]]:
    """Return the runtime's samples on a server's page, by name and worker."""
    found = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{server.http_server.port}/metrics")
    text = found.body.decode()
    described = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(set(described)) == len(described)  # Prometheus rejects duplicate descriptions
    shown: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "_gpurt_" in sample.name:
                shown.setdefault(sample.name, {})[sample.labels.get("worker", "")] = sample.value
    return shown


async def of_memory(server: Any) -> dict[tuple[str, str], float]:
    """Return the bytes on a worker's page by tier and kind, but for the rest of the process's memory."""
    found = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{server.http_server.port}/metrics")
    return {
        (sample.labels["tier"], sample.labels["kind"]): sample.value
        for family in text_string_to_metric_families(found.body.decode())
        for sample in family.samples
        if sample.name == "dask_worker_gpurt_memory_bytes" and sample.labels["kind"] != "unmanaged"
    }


def registered() -> list[str]:
    return [family.name for family in REGISTRY.collect() if "_gpurt_" in family.name]


@on_plain_cluster()
async def test_the_page_of_a_process_has_its_scheduler_and_tells_its_workers_apart(
    client: Any, scheduler: Any, a: Any, b: Any
) -> None:
    assert await page(scheduler) == {}
    await dask_gpurt.enable(client)
    a.plugins["gpurt"].metrics.add("shuffle.rows", 5)
    for server in (scheduler, a, b):
        shown = await page(server)
        assert shown["dask_scheduler_gpurt_workers_ready"] == {"": 2}
        assert shown["dask_scheduler_gpurt_shuffle_workers_silent_total"] == {"": 0}
        assert shown["dask_worker_gpurt_shuffle_rows_total"] == {a.address: 5, b.address: 0}
    await dask_gpurt.disable(client)
    assert await page(scheduler) == {}


@on_cluster(workers=1, **{"gpurt.memory.device": 4 * MIB, "distributed.worker.memory.pause": False})
async def test_the_page_of_a_worker_says_what_its_tiers_hold(client: Any, scheduler: Any, a: Any) -> None:
    kept = client.map(np.ones, [MIB] * 8, dtype="u1", pure=False)
    await wait(kept)
    while True:  # until reports have reached the scheduler
        usage = (await dask_gpurt.memory_usage(client)).to_pandas(names="metrics").set_index("tier")
        known = usage.drop(columns=["worker", "headroom", "unmanaged"]).stack().to_dict()
        if (shown := await of_memory(a)) == known:
            break
    assert shown["device", "capacity"] == 4 * MIB
    assert shown["disk", "partitions"] > 0
    del kept


def test_servers_that_close_while_it_is_on_are_shown_no_more() -> None:
    async def run() -> None:
        async with (
            Scheduler(dashboard_address=":0") as scheduler,
            Worker(scheduler.address) as worker,
            Client(scheduler.address, asynchronous=True) as client,
        ):
            await dask_gpurt.enable(client)
            assert {"dask_scheduler_gpurt_workers_ready", "dask_worker_gpurt_shuffle_rows"} <= set(
                registered()
            )
            await worker.close()
            assert "dask_worker_gpurt_shuffle_rows" not in registered()
            assert "dask_scheduler_gpurt_workers_ready" in registered()
            await client.close()
            await dask_gpurt.disable(client)  # which is closed: in this process alone

    before = registered()
    asyncio.run(run())
    assert registered() == before
