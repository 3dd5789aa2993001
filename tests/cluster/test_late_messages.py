"""Switch off or close while messages are in flight: Dask logs no errors, and closes no worker of itself."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from distributed.protocol.serialize import ToPickle

import dask_gpurt
from dask_gpurt.client import session
from dask_gpurt.exchange import PeerLost
from dask_gpurt.protocol import (
    ACCEPTED_OP,
    ASK_STATUS_OP,
    END_TRACE_HANDLER,
    EVACUATE_HANDLER,
    MEMORY_HANDLER,
    NEW_OWNERS_OP,
    SEND_RESULTS_OP,
    TAKE_EVENTS_HANDLER,
)
from dask_gpurt.scheduler.switching import Workers
from dask_gpurt.worker.plugin import GpurtWorkerPlugin
from tests.helpers import commands
from tests.helpers.in_process import active, gen_client_cluster, on_plain_cluster
from tests.helpers.switching import Gate, another, begun

Quiet = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Quiet:
    """Assert that the body of a context logs no warning."""

    @contextmanager
    def without_warnings() -> Iterator[None]:
        caplog.clear()
        yield
        assert [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING] == []

    return without_warnings


def ours(handlers: Any) -> list[str]:
    return sorted(name for name in handlers if name.startswith(("gpurt_", "gpurt-")))


def never() -> None:
    """Let a call go on."""


class Left:
    """Await the last messages of workers, and call a function when the scheduler receives one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._heard: dict[str, asyncio.Event] = {}
        has_left = Workers.has_left

        def hears(this: Workers, worker: str, **message: Any) -> None:
            has_left(this, worker, **message)
            self.by(worker).set()

        monkeypatch.setattr(Workers, "has_left", hears)

    def by(self, worker: str) -> asyncio.Event:
        return self._heard.setdefault(worker, asyncio.Event())


def stops_on(worker: Any, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Stop one worker while it switches off; all of its handlers are still there."""
    gate, give_back = Gate(), GpurtWorkerPlugin._give_data_back

    async def stops(this: Any) -> None:
        if this.worker is worker:
            gate.reached.set()
            await gate.open.wait()
        await give_back(this)

    monkeypatch.setattr(GpurtWorkerPlugin, "_give_data_back", stops)
    return gate


@on_plain_cluster()
async def test_peers_and_the_scheduler_call_a_worker_that_is_off(
    client: Any, scheduler: Any, a: Any, b: Any, monkeypatch: pytest.MonkeyPatch, quiet: Quiet
) -> None:
    left, gate = Left(monkeypatch), stops_on(b, monkeypatch)
    await dask_gpurt.enable(client)
    names, peer = ours(a.handlers), b.plugins["gpurt"].exchange.calls
    with quiet():
        off = await begun(dask_gpurt.disable(client))
        with gate.open_in_the_end():
            await asyncio.gather(gate.reached.wait(), left.by(a.address).wait())
            with quiet():
                for name in names:
                    assert await peer.call(a.address, name, check=never) is None
            stream = scheduler.stream_comms[a.address]
            stream.send({"op": NEW_OWNERS_OP, "id": "x", "run_id": 1, "owners": None})
            stream.send({"op": ACCEPTED_OP, "key": "x"})
            stream.send({"op": ASK_STATUS_OP})
            stream.send({"op": SEND_RESULTS_OP, "results": ToPickle({"sent": 1})})
            # The stream keeps the order of messages: it is still open, and all have been received.
            assert await client.submit(len, "xy", workers=[a.address]) == 2
            assert a.data["sent"] == 1, "the scheduler counts this replica"
        await off
    assert not ours(active(a.handlers)) + ours(active(a.stream_handlers))
    assert set(scheduler.workers) == {a.address, b.address}


@on_plain_cluster()
async def test_workers_call_the_scheduler_once_all_are_off(
    client: Any, scheduler: Any, a: Any, b: Any, quiet: Quiet
) -> None:
    """As a worker does that was silent when the runtime was switched off."""
    await dask_gpurt.enable(client)
    calls, operations = ours(scheduler.handlers), ours(scheduler.stream_handlers)
    await dask_gpurt.disable(client)
    with quiet():
        for name in calls:
            assert await getattr(b.scheduler, name)() is None
        for name in operations:
            b.batched_stream.send({"op": name, "token": "of before"})
        assert await client.submit(len, "xy", workers=[b.address]) == 2, "its stream is still open"
    assert not ours(active(scheduler.handlers)) + ours(active(scheduler.stream_handlers))
    assert set(scheduler.workers) == {a.address, b.address}


@on_plain_cluster()
async def test_a_second_client_that_switches_off_returns_as_late_as_the_first(
    client: Any, scheduler: Any, a: Any, b: Any, monkeypatch: pytest.MonkeyPatch, quiet: Quiet
) -> None:
    gate = stops_on(b, monkeypatch)
    await dask_gpurt.enable(client)
    async with another(scheduler) as other:
        with quiet(), gate.open_in_the_end():
            off = await begun(dask_gpurt.disable(client))
            await gate.reached.wait()
            also_off = await begun(dask_gpurt.disable(other))
            assert not also_off.done()
            gate.open.set()
            await asyncio.gather(off, also_off)


@on_plain_cluster()
async def test_the_scheduler_still_asks_workers_when_all_are_off(
    client: Any, scheduler: Any, a: Any, b: Any, monkeypatch: pytest.MonkeyPatch, quiet: Quiet
) -> None:
    """Switching off does not wait for a report of a worker that does not answer."""
    left, gate = Left(monkeypatch), Gate()
    await dask_gpurt.enable(client)
    report = a.handlers["gpurt_report"]

    async def waits(**message: Any) -> Any:
        gate.reached.set()
        await gate.open.wait()
        return await report(**message)

    a.handlers["gpurt_report"] = waits
    reporting = asyncio.ensure_future(dask_gpurt.report(client))
    await gate.reached.wait()
    a.handlers["gpurt_report"] = report
    off = asyncio.ensure_future(dask_gpurt.disable(client))
    with gate.open_in_the_end(), quiet():
        await asyncio.gather(left.by(a.address).wait(), left.by(b.address).wait())
        await off
    assert (await reporting).workers.keys() == {a.address, b.address}


@on_plain_cluster()
async def test_another_client_has_switched_it_off_already(
    client: Any, scheduler: Any, a: Any, b: Any, monkeypatch: pytest.MonkeyPatch, quiet: Quiet
) -> None:
    """It was on when this client asked."""

    async def was_on(client: Any) -> bool:
        return True

    await dask_gpurt.enable(client)
    await dask_gpurt.disable(client)
    with quiet(), monkeypatch.context() as patch:
        patch.setattr(session, "is_on_cluster", was_on)
        await dask_gpurt.disable(client)
        assert not (await dask_gpurt.report(client)).enabled
        assert not (await dask_gpurt.memory_usage(client)).enabled


# ---- workers that close ---------------------------------------------------------------------------

TRACES = (TAKE_EVENTS_HANDLER, END_TRACE_HANDLER)
WORKERS: list[Any] = [("127.0.0.1", 1)] * 2
NEVER_CLOSED = """
import numpy as np, pandas as pd
import dask.dataframe as dd
from dask.distributed import Client, LocalCluster
import dask_gpurt

if __name__ == "__main__":
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    client = Client(LocalCluster(**options))
    dask_gpurt.enable(client)
    frame = dd.from_pandas(pd.DataFrame({"k": np.arange(1_000) % 10}), npartitions=4)
    kept = frame.shuffle("k").persist()
    print(len(kept))
"""


def calls(worker: Any) -> list[str]:
    """Return the runtime's handlers on a worker."""
    return sorted(name for name in worker.handlers if name.startswith("gpurt_"))


def test_a_worker_that_closes_is_called_until_its_connections_are_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers: dict[str, Any] = {}

    @gen_client_cluster(nthreads=WORKERS)
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        await dask_gpurt.enable(client)
        names, teardown = calls(a), a.preloads.teardown
        peer = b.plugins["gpurt"].exchange.calls

        async def call_all() -> None:  # the plugins are closed by now
            assert not a.plugins
            for name in names:
                try:
                    answers[name] = await peer.call(a.address, name, check=lambda: None)
                except PeerLost as error:
                    answers[name] = error
            scheduler.stream_comms[a.address].send(
                {"op": NEW_OWNERS_OP, "id": "x", "run_id": 1, "owners": None}
            )
            await scheduler.rpc(a.address).gpurt_report(connect=False)
            await teardown()

        a.preloads.teardown = call_all
        caplog.clear()
        await a.close()
        assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        await dask_gpurt.disable(client)

    run()
    ignored = ("gpurt_report", MEMORY_HANDLER, "gpurt_make_room", EVACUATE_HANDLER, *TRACES)
    nothing = {name: answers.pop(name) for name in ignored}
    assert not any(nothing.values())
    assert len(answers) == 5
    assert all(isinstance(answer, PeerLost) for answer in answers.values()), answers


@pytest.mark.slow
def test_a_program_never_closes_its_cluster(tmp_path: Path) -> None:
    """Python has ended the threads of executors when Dask closes the cluster, at exit."""
    script = tmp_path / "job.py"
    script.write_text(NEVER_CLOSED)
    done = commands.run(sys.executable, script)
    assert done.stdout.split() == ["1000"]
    assert "Traceback" not in done.stderr, done.stderr
