"""End waits of the exchange: workers fail, fall silent, leave or have no room while others wait for them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from distributed.exceptions import Reschedule

from dask_gpurt.exchange import PeerLost
from tests.helpers.exchanges import (
    A,
    B,
    C,
    Cluster,
    intercept,
    never_answering,
    on_exchanges,
    quiet,
)


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
