"""Start and stop a trace on servers that join and leave, and with clients that are gone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from distributed import Worker

import dask_gpurt
from dask_gpurt.client.traces import Collector
from dask_gpurt.monitor.trace import ProcessTrace
from dask_gpurt.observe.recording import Event, Recording
from dask_gpurt.worker import tracing
from tests.helpers.in_process import on_cluster, until


def is_recording(server: Any) -> bool:
    runtime = server.plugins.get("gpurt")
    return runtime is not None and runtime.is_on and runtime.metrics.recording is not None


@on_cluster()
async def test_where_the_client_is_gone_the_recording_ends_by_itself(
    client: Any, scheduler: Any, *crew: Any
) -> None:
    lease, tracing.LEASE_S = tracing.LEASE_S, 0.1
    try:
        await client.scheduler.gpurt_trace_begin(token="gone")
        servers = [scheduler.extensions["gpurt"], *(worker.plugins["gpurt"] for worker in crew)]
        await until(lambda: all(server.metrics.recording is None for server in servers))
        await client.scheduler.gpurt_trace_begin(token="another")
        await client.scheduler.gpurt_traces_end(token="another")
    finally:
        tracing.LEASE_S = lease


@on_cluster()
async def test_a_ring_that_is_full_loses_the_oldest_and_says_so(
    client: Any, scheduler: Any, *crew: Any
) -> None:
    await client.scheduler.gpurt_trace_begin(token="small")
    metrics = crew[0].plugins["gpurt"].metrics
    metrics.recording = Recording(capacity=2)
    futures = [client.submit(int, n, workers=[crew[0].address]) for n in range(5)]
    await client.gather(futures)
    reply = (await client.scheduler.gpurt_traces_take(token="small", limit=100))[crew[0].address]
    recorded = [Event(*event).task for event in json.loads(reply["events"])]
    assert len(recorded) == len(set(recorded)) == 2
    assert set(recorded) < {future.key for future in futures}
    assert reply["lost"] == 3
    await client.scheduler.gpurt_traces_end(token="small")


@on_cluster()
async def test_a_worker_that_joins_is_recorded_and_one_that_leaves_is_named(
    client: Any, scheduler: Any, *crew: Any
) -> None:
    collector = Collector(client)
    await collector.begin()
    async with Worker(scheduler.address, nthreads=1) as joined:
        await until(lambda: is_recording(joined))
        await client.submit(int, 1, workers=[joined.address])
        await until(lambda: bool(collector.trace.processes.get(joined.address, ProcessTrace()).events))
        address = joined.address
    trace = await collector.end()
    assert trace.processes[address].events
    assert trace.unanswered == {address: "the worker has left"}


@on_cluster()
async def test_an_asynchronous_client_takes_a_trace(client: Any, scheduler: Any, *crew: Any) -> None:
    recorded = dask_gpurt.trace("/dev/null", client)
    async with recorded:
        assert await client.submit(int, "7") == 7
    assert "int" in {row.step for row in recorded.found.summary()}


@on_cluster()
async def test_a_trace_without_a_folder_does_not_begin(client: Any, scheduler: Any, *crew: Any) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        async with dask_gpurt.trace("/nonexistent/trace.json", client):
            raise AssertionError("it has begun")
    with pytest.raises(IsADirectoryError, match="/dev is a folder: give the name of a file"):
        async with dask_gpurt.trace("/dev", client):
            raise AssertionError("it has begun")


@on_cluster()
async def test_a_trace_where_the_runtime_is_off_is_refused(client: Any, scheduler: Any, *crew: Any) -> None:
    await dask_gpurt.disable(client)
    with pytest.raises(RuntimeError, match="records nothing"):
        async with dask_gpurt.trace("/dev/null", client):
            raise AssertionError("it has begun")
