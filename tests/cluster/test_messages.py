"""Send messages between scheduler and workers at once, and run barriers on the event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import dask.dataframe as dd
import pandas as pd
from distributed import Event, Worker
from distributed.batched import BatchedSend
from distributed.diagnostics.plugin import SchedulerPlugin

import dask_gpurt
from dask_gpurt.dask_hooks.worker import PromptStreams
from tests.helpers.in_process import on_cluster, on_plain_cluster, until


def intervals(scheduler: Any, *workers: Any) -> list[float]:
    streams = [scheduler.stream_comms[worker.address] for worker in workers]
    return [stream.interval for stream in (*streams, *(worker.batched_stream for worker in workers))]


@on_plain_cluster()
async def test_no_stream_waits_while_it_is_on(client: Any, scheduler: Any, a: Any, b: Any) -> None:
    before = intervals(scheduler, a, b)
    assert all(before)
    await dask_gpurt.enable(client)
    assert not any(intervals(scheduler, a, b))
    async with Worker(scheduler.address) as late:
        await until(lambda: not any(intervals(scheduler, a, b, late)))
        dasks = before[-1]
        await dask_gpurt.disable(client)
        assert intervals(scheduler, a, b) == before
        assert late.batched_stream.interval == dasks


@on_cluster(workers=1)
async def test_a_worker_with_tasks_at_hand_gathers_messages(client: Any, scheduler: Any, worker: Any) -> None:
    stream, (address,) = worker.batched_stream, scheduler.workers
    first, second = (
        client.submit(wait_for, name, key=name, workers=[address]) for name in ("first", "second")
    )
    await until(lambda: len(worker.state.tasks) == 2)
    assert stream.interval == 0  # the other task had not arrived when this one began
    third = client.submit(wait_for, "third", key="third", workers=[address])
    await until(lambda: len(worker.state.tasks) == 3)
    await Event("first", client=client).set()
    await first
    await until(lambda: stream.interval > 0)
    for task in (second, third):
        await Event(task.key, client=client).set()
    await client.gather([second, third])
    assert stream.interval == 0


def wait_for(name: str) -> None:
    Event(name).wait()


def test_an_interval_that_another_has_set_stays() -> None:
    async def run() -> None:
        ours, others = BatchedSend("3ms"), BatchedSend("4ms")
        streams = PromptStreams()
        streams.add(ours)
        streams.add(others)
        streams.add(ours)  # once more, as when a worker is announced twice
        assert ours.interval == others.interval == 0
        streams.gather(ours, True)
        assert ours.interval == 0.003
        streams.gather(ours, False)
        assert ours.interval == 0
        others.interval = 0.001
        streams.gather(others, False)
        streams.restore()
        assert (ours.interval, others.interval) == (0.003, 0.001)

    asyncio.run(run())


# ---- barriers -------------------------------------------------------------------------------------


class Threads(SchedulerPlugin):  # type: ignore[misc]
    """Note the threads that have run barriers."""

    def __init__(self) -> None:
        self.of_barriers: list[int] = []

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if str(key).startswith("shuffle-barrier") and finish == "memory":
            self.of_barriers.append(kwargs["thread"])


@on_cluster(workers=2)
async def test_a_barrier_runs_on_the_event_loop(client: Any, scheduler: Any, *workers: Any) -> None:
    scheduler.add_plugin(noted := Threads(), name="threads")
    frame = dd.from_pandas(pd.DataFrame({"key": range(60)}), npartitions=4)
    joined = frame.merge(frame, on="key", shuffle_method="gpurt", broadcast=False)
    with client.as_current():
        assert len(await client.compute(joined)) == 60
        assert len(await client.compute(frame.shuffle("key", shuffle_method="gpurt"))) == 60
    assert noted.of_barriers == [threading.get_ident()] * 2  # both sides are the same shuffle
