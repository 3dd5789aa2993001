"""Stop the runtime while it switches on or off, in tests of what happens meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dask.dataframe as dd
import pandas as pd
import pytest
from distributed import Client

import dask_gpurt
from dask_gpurt.exchange.exchange import Exchange
from dask_gpurt.worker.plugin import GpurtWorkerPlugin

ROWS = 200
#: Bytes that exceed a tier of 1 MiB.
LARGE = 8 * 2**20
FRAME = pd.DataFrame({"key": [row % 17 for row in range(ROWS)], "row": range(ROWS)})


def another(scheduler: Any) -> Any:
    return Client(scheduler.address, asynchronous=True, set_as_default=False)


class Gate:
    """Block a coroutine of the runtime on workers until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open = asyncio.Event(), asyncio.Event()

    def put(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> Gate:
        goes_on = getattr(owner, name)

        async def stops(this: Any, *args: Any) -> Any:
            self.reached.set()
            await self.open.wait()
            return await goes_on(this, *args)

        monkeypatch.setattr(owner, name, stops)
        return self

    @contextmanager
    def open_in_the_end(self) -> Iterator[None]:
        """Open the gate after the body, also on failure: a blocked thread would keep the process alive."""
        try:
            yield
        finally:
            self.open.set()


def setup_stops(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate().put(monkeypatch, Exchange, "offload")


def setup_stops_early(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Stop before the worker has an exchange, which is created on a thread."""
    gate, loop = Gate(), asyncio.get_running_loop()
    build = GpurtWorkerPlugin._build

    def stops(self: Any, *args: Any) -> None:
        loop.call_soon_threadsafe(gate.reached.set)
        asyncio.run_coroutine_threadsafe(gate.open.wait(), loop).result()
        build(self, *args)

    monkeypatch.setattr(GpurtWorkerPlugin, "_build", stops)
    return gate


def teardown_stops(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate().put(monkeypatch, GpurtWorkerPlugin, "_give_data_back")


async def begun(coroutine: Any) -> asyncio.Task[Any]:
    """Return once a task waits for something, or has ended."""
    task = asyncio.ensure_future(coroutine)
    for _ in range(20):
        await asyncio.sleep(0.005)  # messages over comms take several iterations of the loop
    return task


async def assert_shuffles(client: Any, *, ours: bool, method: str | None = None) -> None:
    before = await runs(client)
    shuffled = dd.from_pandas(FRAME, npartitions=4).shuffle("key", shuffle_method=method)
    with client.as_current():
        found = await client.compute(shuffled)
    assert sorted(found["row"]) == list(range(ROWS))
    assert ((await runs(client)) > before) == ours


async def runs(client: Any) -> float:
    found = await dask_gpurt.report(client)
    return sum(w.get("counters", {}).get("shuffle.runs", 0) for w in found["workers"].values())


def assert_on(scheduler: Any, *workers: Any) -> None:
    assert scheduler.plugins["gpurt"] is scheduler.extensions["gpurt"]
    assert scheduler.extensions["gpurt"].workers.ready == set(scheduler.workers)
    assert all("gpurt" in worker.plugins for worker in workers)
