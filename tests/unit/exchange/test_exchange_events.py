"""Put an exchange through single events that would have caused a wrong row or a hang."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import dask
import dask.dataframe
import numpy as np
import pandas as pd
import pytest
from distributed import Client, LocalCluster
from distributed.comm import CommClosedError
from distributed.core import Status, error_message
from distributed.exceptions import Reschedule

import dask_gpurt
from dask_gpurt.exchange import Attempt, PeerLost
from dask_gpurt.shuffle.messages import Seal
from tests.helpers.clusters import QUICK, instrument
from tests.helpers.exchanges import (
    A,
    B,
    C,
    Cluster,
    held_back,
    intercept,
    never_answering,
    on_exchanges,
    quiet,
)


@on_exchanges()
async def test_a_release_for_the_worker_before_at_an_address_frees_nothing(cluster: Cluster) -> None:
    old = cluster.b.exchange.me
    new = cluster.replace(cluster.b)
    await cluster.transfer_all()
    used = new.outbox.pool.used
    assert used
    for number in range(10):
        await cluster.a.exchange.requests._send_release(old, "host", [(number, 0)])
    assert new.outbox.pool.used == used
    assert new.counted("exchange.messages.stale") == 10


@on_exchanges()
async def test_an_offer_of_a_worker_to_itself_fails(cluster: Cluster) -> None:
    a = cluster.a
    take = a.exchange.take

    def short_of_memory(*args: Any) -> Any:
        a.exchange.take = take  # type: ignore[method-assign]
        raise MemoryError("once")

    a.exchange.take = short_of_memory  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="once"):
        await cluster.shuffle()


def test_workers_are_threads_of_one_process_and_bytes_take_the_comms() -> None:
    """An inproc comm passes the producer's memory by reference; the producer reuses it after the release."""
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({"key": rng.integers(0, 999, 60_000), "row": np.arange(60_000)})
    with (
        dask.config.set({**QUICK, "gpurt.exchange.paths": ["comms"], "gpurt.exchange.pool": "256 kiB"}),
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as local,
        Client(local) as client,
    ):
        instrument(client)
        dask_gpurt.enable(client)
        df = dask.dataframe.from_pandas(rows, npartitions=12)
        found = df.shuffle("key").compute().sort_values("row")
        dask_gpurt.disable(client)
    pd.testing.assert_frame_equal(found, rows)


@on_exchanges()
async def test_the_barrier_gets_inputs_of_different_runs(cluster: Cluster) -> None:
    """Another run begins: shards of the previous run are useless, and no barrier would find them missing."""
    results = await cluster.transfer_all()
    a = cluster.a
    cluster.scheduler.restart("a shuffle")
    await cluster.hear()
    results[0] = await cluster.transfer("a shuffle", 0, a)
    await cluster.barrier("a shuffle", results)
    assert cluster.scheduler.restarts == 2
    await cluster.hear()
    results = [await cluster.transfer("a shuffle", source, a) for source in range(cluster.INPUTS)]
    await cluster.barrier("a shuffle", results)
    await cluster.finish()


@on_exchanges()
async def test_the_last_offer_is_still_on_its_way_as_the_barrier_begins(cluster: Cluster) -> None:
    arrives = held_back(cluster, "shuffle_receive", to=B, containing=b"Commit")
    results = await cluster.transfer_all()
    barrier = asyncio.ensure_future(cluster.barrier("a shuffle", results))
    await quiet()
    assert not barrier.done(), "the other worker was asked, and misses what it has not been offered"
    arrives.set()
    await barrier
    assert cluster.a.counted("shuffle.inputs.missing") == 0
    await cluster.finish()


@on_exchanges()
async def test_a_producer_hears_of_new_owners_from_the_barrier_first(cluster: Cluster) -> None:
    """It then has to deliver the offers to them before it answers."""
    arrives = asyncio.Event()

    async def hold_back(handle: Any, address: str, op: str, content: dict[str, Any]) -> Any:
        if address == B and op == "shuffle_receive" and b"Commit" in content["data"]:
            await arrives.wait()
        return await handle(address, op, content)

    results = await cluster.transfer_all()
    intercept(cluster, hold_back)
    cluster.scheduler.balance("a shuffle", range(cluster.OUTPUTS), B)
    producer: Any = cluster.a.run_of("a shuffle")
    seal = Seal({result.source: result.attempt for result in results})
    asked = asyncio.ensure_future(producer._receive(B, 1, seal))
    await quiet()
    assert not asked.done()
    arrives.set()
    assert await asked == []
    await cluster.hear()
    await cluster.barrier("a shuffle", results)
    await cluster.finish()


@on_exchanges()
async def test_the_connection_breaks_while_the_barrier_asks(cluster: Cluster) -> None:
    """Before the other worker hears the question, and before its answer arrives: it is asked again."""
    results = await cluster.transfer_all()
    seals = itertools.count(1)

    async def break_off(handle: Any, address: str, op: str, content: dict[str, Any]) -> Any:
        asked = op == "shuffle_receive" and next(seals)
        if asked == 1:
            raise CommClosedError("the connection was reset")
        answer = await handle(address, op, content)
        if asked == 2:
            raise CommClosedError("the connection was reset")
        return answer

    intercept(cluster, break_off)
    await cluster.barrier("a shuffle", results)
    assert next(seals) == 4
    await cluster.finish()


@on_exchanges()
async def test_a_run_begins_while_another_one_that_was_read_goes_on(cluster: Cluster) -> None:
    assert await cluster.shuffle("first") == cluster.expected()
    await quiet()
    used = {process: process.outbox.pool.used for process in cluster.workers}
    assert all(process.outbox.retained == used[process] > 0 for process in used)
    assert await cluster.shuffle("second") == cluster.expected()
    await quiet()
    assert all(process.outbox.pool.used <= used[process] for process in used), "no pool has grown"
    await cluster.end("first")
    await cluster.end("second")


@on_exchanges()
async def test_a_shard_of_a_failed_attempt_comes_after_the_next_attempt(cluster: Cluster) -> None:
    """It is rejected, and its block is freed; the pool would otherwise stay full until the run ends."""
    await cluster.transfer_all()
    a, b = cluster.workers
    run: Any = b.run_of("a shuffle")
    known = next(
        incoming.shard for incoming in run._receiver._unread if incoming.shard.producer == a.exchange.me
    )
    number = a.outbox.publish(("a shuffle", run.run_id), known.share, B, [a.outbox.allocate(8)])
    await run._receiver.receive([replace(known, id=number, attempt=Attempt(-1, 0))])
    await quiet()
    assert a.outbox.view(number, known.share) is None
    assert a.outbox.view(known.id, known.share) is not None


@pytest.mark.parametrize("owner", [A, B])
@on_exchanges()
async def test_a_shard_never_arrives(cluster: Cluster, owner: str) -> None:
    """The barrier, which runs on A, detects it, and the missing input is transferred again."""

    async def swallow(handle: Any, address: str, op: str, content: dict[str, Any]) -> Any:
        lost = op == "shuffle_receive" and address == owner and b"Commit" in content["data"]
        if lost and cluster.scheduler.recoveries == 0:
            return {"status": "OK", "missing": []}
        return await handle(address, op, content)

    intercept(cluster, swallow)
    results = await cluster.transfer_all()
    with pytest.raises(Reschedule, match="are transferred again"):
        await cluster.barrier("a shuffle", results)
    await quiet()
    assert (cluster.scheduler.recoveries, cluster.scheduler.restarts) == (1, 0)
    await cluster.hear()
    results = [await cluster.transfer("a shuffle", i, cluster.a) for i in range(3)]
    await cluster.barrier("a shuffle", results)
    assert await cluster.outputs() == cluster.expected()


@on_exchanges()
async def test_peers_call_a_worker_whose_exchange_closes_before_its_connections(
    cluster: Cluster,
) -> None:
    """The callers learn that it is leaving, and the worker logs no error."""
    await cluster.transfer_all()
    a, b = cluster.workers
    handlers = {name for name in b.handlers if name.startswith("gpurt_")}
    b.status = Status.closing
    b.close()
    assert handlers <= b.handlers.keys()  # otherwise Dask logs an error for each call
    for name in handlers - {"gpurt_make_room"}:
        with pytest.raises(PeerLost, match="is closing"):
            await a.exchange.calls.call(B, name, check=lambda: None, anything=1)
    assert not await a.exchange.calls.call(B, "gpurt_make_room", check=lambda: None)
    run: Any = a.run_of("a shuffle")
    await a.exchange.requests.withdraw(("a shuffle", run.run_id))  # calls it to release its offered shards
    assert B not in a.outbox.readers()


def fail() -> Any:
    raise RuntimeError("ConnectionPool is closed")


@pytest.mark.parametrize("answer", [fail, lambda: error_message(RuntimeError("the tiers are closed"))])
@on_exchanges()
async def test_whatever_a_worker_that_closes_answers_or_fails_with_fails_no_run(
    cluster: Cluster, answer: Callable[[], Any]
) -> None:
    """It cannot query the scheduler about an offer any more, or its tiers are closed while it handles it."""
    closing = cluster.b

    async def answers(handle: Any, address: str, op: str, content: dict[str, Any]) -> Any:
        if address == B and op == "shuffle_receive":
            return answer()
        return await handle(address, op, content)

    intercept(cluster, answers)
    closing.status = Status.closing
    cluster.begin()
    await cluster.transfer("a shuffle", 0, cluster.a)
    run: Any = cluster.a.run_of("a shuffle")
    run.raise_if_closed()
    assert set(cluster.scheduler.active["a shuffle"].owners.values()) == {A}


@on_exchanges()
async def test_an_owner_has_left_and_the_scheduler_does_not_move_its_outputs_yet(cluster: Cluster) -> None:
    """The sender pauses before it reports the owner again."""
    await cluster.transfer_all()
    run: Any = cluster.a.run_of("a shuffle")
    reports: list[str] = []

    async def wait_for_others(unreachable: str, **_: Any) -> None:
        reports.append(unreachable)

    cluster.scheduler.gpurt_recover = wait_for_others  # type: ignore[method-assign, assignment]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dask_gpurt.shuffle.run.FIRST_PAUSE_S", 3600.0)
        reporting = asyncio.ensure_future(run._unreachable(B, PeerLost("it has left")))
        await quiet()
        assert reports == [B]
        assert not reporting.done()
        reporting.cancel()


@on_exchanges()
async def test_a_loss_that_can_not_be_noted_fails_the_run(cluster: Cluster) -> None:
    """Nothing else would end the tasks that wait for the shard."""
    await cluster.transfer_all()
    run: Any = cluster.b.run_of("a shuffle")
    shard = next(iter(run._receiver._unread)).shard

    def fails(shard: Any) -> Any:
        raise MemoryError("no memory to note it")

    run._receiver.lose = fails
    run._shard_failed(shard, PeerLost("it is gone"))
    await quiet()
    with pytest.raises(MemoryError, match="to note it"):
        run.raise_if_closed()


# ---- waits that end: workers fail, fall silent, leave or have no room while others wait for them -----


@on_exchanges()
async def test_a_pull_for_a_producer_that_waits_for_room_fails(cluster: Cluster) -> None:
    results = await cluster.transfer_all()
    await cluster.barrier("a shuffle", results)
    a, b = cluster.workers
    b.landed.full = True
    b.exchange.drain(list(a.exchange.me))
    await quiet()
    run: Any = b.run_of("a shuffle")
    with pytest.raises(RuntimeError, match="no tier has room"):
        run.raise_if_closed()


@on_exchanges()
async def test_an_owner_has_no_room_left_while_a_producer_waits_for_room(cluster: Cluster) -> None:
    """The producer offers nothing while it waits: only a returned block wakes it up."""
    cluster.begin()
    a, b = cluster.workers
    await cluster.transfer("a shuffle", 0, a)
    assert B in a.outbox.readers()
    b.landed.full = True
    b.exchange.drain(list(a.exchange.me))
    await quiet()
    assert B not in a.outbox.readers()
    await cluster.transfer("a shuffle", 1, a)  # its offer is answered with the error
    with pytest.raises(RuntimeError, match="no tier has room"):
        await cluster.transfer("a shuffle", 2, a)
    assert a.exchange.metrics.snapshot()["counters"].get("exchange.calls.repeated", 0) == 0


@pytest.fixture
def watched_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch unanswered calls at short intervals."""
    monkeypatch.setattr("dask_gpurt.exchange.calls.WATCH_S", 0.01)


@pytest.mark.usefixtures("watched_closely")
@on_exchanges(C)
async def test_an_owner_falls_silent_as_the_barrier_begins(cluster: Cluster) -> None:
    """Its outputs and inputs go to others; what it still does is late, and does no harm."""
    results = await cluster.transfer_all()
    goes_on = silenced(cluster, B)
    with pytest.raises(Reschedule, match="does not reply"):
        await cluster.barrier("a shuffle", results)
    await hear(cluster, A, C)
    assert B not in cluster.scheduler.active["a shuffle"].owners.values()
    with pytest.raises(Reschedule, match=r"inputs \[1\] are transferred again"):
        await cluster.barrier("a shuffle", results)
    await hear(cluster, A, C)
    results[1] = await cluster.transfer("a shuffle", 1, cluster.a)
    await cluster.barrier("a shuffle", results)
    assert await cluster.outputs() == cluster.expected()
    assert cluster.scheduler.restarts == 0
    goes_on.set()
    await quiet()
    await cluster.hear()
    await cluster.end()


def silenced(cluster: Cluster, address: str) -> asyncio.Event:
    """Let a worker fall silent; returns the event that lets it process its messages late."""
    goes_on = asyncio.Event()
    cluster.scheduler.silent.add(address)

    async def stops(handle: Any, to: str, op: str, content: dict[str, Any]) -> Any:
        if to == address:
            await goes_on.wait()
        return await handle(to, op, content)

    intercept(cluster, stops)
    return goes_on


async def hear(cluster: Cluster, *addresses: str) -> None:
    """Deliver the scheduler's messages to some workers."""
    for address in addresses:
        process = cluster.network.processes[address]
        while cluster.network.streams[process]:
            await cluster.network.deliver_stream(process)
    await quiet()


@pytest.mark.usefixtures("watched_closely")
@on_exchanges(C)
async def test_an_owner_falls_silent_while_another_worker_offers_it_shards(cluster: Cluster) -> None:
    """Nothing waits for the offers before the barrier: a task that stops its event loop costs nothing."""
    goes_on = silenced(cluster, B)
    cluster.begin()
    results = [await cluster.transfer("a shuffle", i, cluster.c) for i in range(3)]
    looks, gone = list[str](), cluster.scheduler.gpurt_gone

    async def look(peers: list[str]) -> list[str]:
        looks.extend(peers)
        return await gone(peers)

    cluster.scheduler.gpurt_gone = look  # type: ignore[method-assign, assignment]
    while looks.count(B) < 10:
        await asyncio.sleep(0.01)
    assert cluster.scheduler.recoveries == 0
    with pytest.raises(Reschedule):
        await cluster.barrier("a shuffle", results)  # on A, which needs the offers of C to be delivered
    await hear(cluster, A, C)
    assert cluster.scheduler.recoveries == 1
    await cluster.barrier("a shuffle", results)
    assert await cluster.outputs() == cluster.expected()
    goes_on.set()
    await quiet()
    await cluster.hear()
    await cluster.end()


@pytest.mark.usefixtures("watched_closely")
@on_exchanges(C, paths=["comms"])
async def test_a_producer_falls_silent_while_its_shards_are_fetched(cluster: Cluster) -> None:
    """They are lost, and its inputs are transferred again; in mapped memory they would still be readable."""
    cluster.begin()
    called = never_answering(cluster, "gpurt_fetch", B)
    where = [cluster.network.processes[address] for address in (A, B, C)]
    results = [await cluster.transfer("a shuffle", i, process) for i, process in enumerate(where)]
    await called.wait()
    cluster.scheduler.silent.add(B)
    while not where[0].counted("shuffle.lost.shards"):
        await asyncio.sleep(0.01)
    with pytest.raises(Reschedule, match=r"inputs \[1\] are transferred again"):
        await cluster.barrier("a shuffle", results)
    await cluster.hear()
    assert B not in cluster.scheduler.active["a shuffle"].owners.values()
    results[1] = await cluster.transfer("a shuffle", 1, where[2])
    await cluster.barrier("a shuffle", results)
    assert await cluster.outputs() == cluster.expected()


@pytest.mark.usefixtures("watched_closely")
@on_exchanges()
async def test_an_owner_is_asked_for_room_while_it_does_not_reply(cluster: Cluster) -> None:
    """A producer asks twice a second: each request would take another connection."""
    a = cluster.a
    asked = list[str]()

    async def hang(handle: Any, to: str, op: str, content: dict[str, Any]) -> Any:
        if op == "gpurt_drain":
            asked.append(to)
            await asyncio.Event().wait()
        return await handle(to, op, content)

    intercept(cluster, hang)
    for _ in range(5):
        a.exchange.requests.ask_for_room({B})
        await quiet()
    assert asked == [B]


@on_exchanges()
async def test_a_worker_leaves_and_connections_to_it_are_tried_for_long(cluster: Cluster) -> None:
    """Otherwise blocks that were published for it would fill the pool meanwhile."""
    await cluster.transfer_all()
    a, b = cluster.workers
    called = never_answering(cluster, "gpurt_release", B)
    await a.exchange.offload(int)
    b.die()
    cluster.scheduler.leaves(B)
    await cluster.hear()
    while B in a.outbox.readers():
        await asyncio.sleep(0.01)
    del called


@on_exchanges()
async def test_a_worker_is_removed_while_it_is_called(cluster: Cluster) -> None:
    """The scheduler's message ends the call, and prevents further calls; polling is disabled here."""
    a, b = cluster.workers
    called = never_answering(cluster, "gpurt_ticket", B)

    async def call() -> None:
        with pytest.raises(PeerLost, match="has left"):
            await a.exchange.calls.call(B, "gpurt_ticket", check=lambda: None, kind="host", to=None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dask_gpurt.exchange.calls.WATCH_S", 3600.0)
        calling = asyncio.ensure_future(call())
        await called.wait()
        b.die()
        cluster.scheduler.leaves(B)
        await cluster.hear()
        await calling
        called.clear()
        await call()
    assert not called.is_set()


@on_exchanges(paths=["comms"])
async def test_a_worker_stands_still_while_a_shard_is_fetched_that_nothing_needs(
    cluster: Cluster,
) -> None:
    """Otherwise the bytes in flight would be counted for ever, and block other pulls."""
    a, b = cluster.workers
    called = never_answering(cluster, "gpurt_fetch", A)
    await cluster.transfer_all()
    await called.wait()
    assert b.exchange.puller.nbytes
    cluster.scheduler.end("a shuffle")
    await cluster.hear()
    while any(b.exchange._incoming.values()) or a.outbox.pool.used:
        await asyncio.sleep(0.01)
    assert b.exchange.puller.nbytes == 0
