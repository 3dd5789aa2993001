"""Watch everything that shuffles wait for: regressions for failures that had gone unnoticed."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dask_gpurt.device.host import HostDevice
from dask_gpurt.exchange import ExchangeClosed
from dask_gpurt.exchange.incoming import IncomingShard, Landing
from dask_gpurt.exchange.shard import Attempt, Peer, Section, Shard
from dask_gpurt.memory.ledger import RESERVATIONS, Limits, Tier
from dask_gpurt.observe import Metrics
from dask_gpurt.shuffle.messages import RunInterrupted
from tests.helpers.exchange_processes import Process
from tests.helpers.exchanges import (
    RESET,
    A,
    B,
    C,
    Cluster,
    failing,
    on_exchanges,
    quiet,
)
from tests.helpers.tiered_buffers import new_tiered_buffer


async def settled(*processes: Process) -> None:
    for _ in range(20):
        for process in processes:
            await process.exchange.offload(int)
        await quiet()


# ---- blocks of a producer, which another producer may wait for -----------------------------


@on_exchanges()
async def test_a_producer_fails_while_it_is_told_that_its_blocks_are_free(cluster: Cluster) -> None:
    calls = failing(cluster, "gpurt_release", A, MemoryError("no memory for the message"))
    assert await cluster.shuffle() == cluster.expected()
    a = cluster.a
    await settled(*cluster.workers)
    assert len(calls) > 1
    assert not a.outbox.readers()


@on_exchanges()
async def test_a_producer_is_out_of_reach_for_long_while_its_blocks_become_free(cluster: Cluster) -> None:
    """It has not left: the producer waits for them, and reaches it again."""
    failing(cluster, "gpurt_release", A, *[RESET] * 11)
    assert await cluster.shuffle() == cluster.expected()
    a = cluster.a
    while a.outbox.readers():
        await asyncio.sleep(0.01)


@on_exchanges()
async def test_an_owner_fails_while_it_lets_go_of_a_run(cluster: Cluster) -> None:
    """Shards that it may still read stay published until it has released them."""
    await cluster.transfer_all()
    calls = failing(cluster, "gpurt_forget", B, RuntimeError("can't start new thread"))
    cluster.scheduler.end("a shuffle")
    await cluster.hear()
    a = cluster.a
    while a.outbox.pool.used:
        await asyncio.sleep(0.01)
    assert len(calls) == 2


@on_exchanges()
async def test_one_of_many_shards_can_not_be_let_go_of(cluster: Cluster) -> None:
    await cluster.transfer_all()
    a, b = cluster.workers
    shards = list(b.exchange._incoming[a.exchange.me])
    assert len(shards) > 1

    def fence() -> None:
        raise RuntimeError("an illegal address")

    shards[0].read_until(fence)
    with pytest.raises(RuntimeError, match="illegal address"):
        b.exchange.discard(shards)
    assert all(incoming.let_go.done() for incoming in shards)
    await quiet()
    assert len(a.outbox.readers()) <= 2
    assert not b.exchange._incoming[a.exchange.me]


@on_exchanges()
async def test_a_shard_is_let_go_of_while_it_is_read_where_it_lies(cluster: Cluster) -> None:
    """Its reader may wait for another shard, which is pulled by the thread that releases this one."""
    await cluster.transfer_all()
    a, b = cluster.workers
    incoming = next(iter(b.exchange._incoming[a.exchange.me]))
    with incoming.staying(lambda: None) as landed:
        assert not landed
        thread = threading.Thread(target=b.exchange.discard, args=([incoming],), daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
        assert not incoming.let_go.done(), "its producer must not reuse the block yet"
    assert incoming.let_go.done()


@on_exchanges()
async def test_shards_are_let_go_of_while_they_are_read_after_they_have_landed(cluster: Cluster) -> None:
    """Their reader waits for another shard, whose landing needs one of the threads that release these."""
    await cluster.transfer_all()
    a, b = cluster.workers
    landed = next(iter(b.exchange._incoming[a.exchange.me]))
    moving = next(iter(b.exchange._incoming[b.exchange.me]))
    assert landed.start_moving()
    assert moving.start_moving()
    land(b, landed)
    b.exchange.executor.shutdown()
    b.exchange.executor = ThreadPoolExecutor(1)
    reads, is_over = threading.Event(), threading.Event()

    def check() -> None:
        reads.set()
        if is_over.is_set():
            raise TimeoutError("the other shard has not landed")

    def read() -> None:
        with landed.staying(lambda: None), moving.staying(check):
            assert landed.key in b.landed.kept, "a tier would reuse its memory"

    reader = asyncio.create_task(asyncio.to_thread(read))
    await asyncio.to_thread(reads.wait)
    b.exchange.discard_soon([landed])
    landing = asyncio.create_task(b.exchange.offload(land, b, moving))
    if landing in (await asyncio.wait([landing], timeout=10))[1]:
        is_over.set()
    await reader
    assert landed.key not in b.landed.kept
    assert landed.let_go.done()


def land(process: Process, incoming: IncomingShard) -> None:
    """Complete the pull of a shard."""
    incoming.land(lambda key: process.landed.put(key, incoming.shard, incoming.sources(), None, list))


@on_exchanges()
async def test_an_input_fails_while_it_is_packed(cluster: Cluster) -> None:
    """Its first blocks, which no owner knows of, are freed."""
    cluster.begin()
    a, b = cluster.workers
    allocate, blocks = a.outbox.allocate, list[Any]()

    def allocate_one(nbytes: int) -> Any:
        if blocks:
            raise MemoryError("no memory behind the pool")
        blocks.append(allocate(nbytes))
        return blocks[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(a.outbox, "allocate", allocate_one)
        with pytest.raises(MemoryError, match="behind the pool"):
            await cluster.transfer("a shuffle", 0, a)
    assert blocks
    assert a.outbox.pool.used == 0
    results = [
        await cluster.transfer("a shuffle", source, b if source else a) for source in range(cluster.INPUTS)
    ]
    await cluster.barrier("a shuffle", results)
    await cluster.finish()


@on_exchanges()
async def test_an_owner_has_no_memory_for_an_offer(cluster: Cluster) -> None:
    """The run fails where the offer came from, and so does every further offer: nobody reads its blocks."""
    cluster.begin()
    a, b = cluster.workers
    await cluster.transfer("a shuffle", 0, a)

    def take(*_: Any) -> None:
        raise MemoryError("no memory for a shard")

    b.exchange.take = take  # type: ignore[method-assign]
    await cluster.transfer("a shuffle", 1, a)
    with pytest.raises(MemoryError, match="no memory for a shard"):
        await cluster.transfer("a shuffle", 2, a)
    assert a.outbox.pool.used == 0, "tasks of other shuffles wait for this memory"


# ---- runs --------------------------------------------------------------------------------


@on_exchanges(C)
async def test_the_connection_to_the_scheduler_breaks_while_owners_are_asked_for(cluster: Cluster) -> None:
    await cluster.transfer_all()
    a, b, c = cluster.workers
    c.die()
    cluster.scheduler.leaves(C)
    while cluster.network.streams[b]:  # and a, which has not been notified, receives offers for c
        await cluster.network.deliver_stream(b)
    run: Any = a.run_of("a shuffle")
    answer, calls = cluster.scheduler.gpurt_owners, list[str]()

    async def breaks(**message: Any) -> Any:
        calls.append("owners")
        if len(calls) == 1:
            raise RESET
        return await answer(**message)

    cluster.scheduler.gpurt_owners = breaks  # type: ignore[method-assign]
    await quiet()
    while run._owners.epoch == 0:
        await asyncio.sleep(0.01)
    assert len(calls) == 2
    for process in (a, b):
        kept: Any = process.run_of("a shuffle")
        kept.raise_if_closed()


@on_exchanges()
async def test_the_scheduler_fails_while_it_is_told_of_a_lost_shard(cluster: Cluster) -> None:
    results = await cluster.transfer_all()
    await cluster.barrier("a shuffle", results)
    a, b = cluster.workers
    run: Any = b.run_of("a shuffle")

    async def fails(**_: Any) -> None:
        raise KeyError("the barrier is gone")

    cluster.scheduler.gpurt_recover = fails  # type: ignore[method-assign]
    await b.exchange.forget(list(a.exchange.me), list(run._key))
    await quiet()
    with pytest.raises(KeyError, match="the barrier is gone"):
        run.raise_if_closed()


@on_exchanges()
async def test_the_scheduler_fails_while_it_is_asked_to_begin_a_run_again(cluster: Cluster) -> None:
    """Its rescheduled tasks would find the same run for ever."""
    await cluster.transfer_all()
    run: Any = cluster.a.run_of("a shuffle")

    async def fails(**_: Any) -> None:
        raise RuntimeError("no worker is allowed")

    cluster.scheduler.shuffle_barrier = fails  # type: ignore[method-assign]
    run.fail(ExchangeClosed("the runtime is off there"))
    with pytest.raises(RunInterrupted):
        run.raise_if_closed()
    await quiet()
    with pytest.raises(RuntimeError, match="no worker is allowed"):
        run.raise_if_closed()


@on_exchanges(C)
async def test_memory_ends_while_a_run_gets_other_owners(cluster: Cluster) -> None:
    cluster.begin()
    a, c = cluster.a, cluster.c
    await cluster.transfer("a shuffle", 0, a)
    run: Any = a.run_of("a shuffle")

    def fails(*_: Any) -> None:
        raise MemoryError("no memory")

    run._sender.renew = fails
    c.die()
    cluster.scheduler.leaves(C)
    await cluster.hear()
    with pytest.raises(MemoryError, match="no memory"):
        run.raise_if_closed()


@on_exchanges()
async def test_the_runtime_is_switched_off_while_calls_wait_for_a_thread(cluster: Cluster) -> None:
    """A peer is told the same as if it had called later. Nobody takes it for a cancellation."""
    a, b = cluster.workers
    go_on, a.exchange.executor = threading.Event(), ThreadPoolExecutor(1)
    busy = asyncio.ensure_future(a.exchange.offload(go_on.wait, 20))
    try:
        waiting = asyncio.ensure_future(a.exchange.offload(int))
        ticket = b.exchange.calls.call(A, "gpurt_ticket", check=lambda: None, kind="host", to=None)
        asked = asyncio.ensure_future(ticket)
        await quiet()
        stopping = asyncio.ensure_future(asyncio.to_thread(a.exchange.stop))
        with pytest.raises(ExchangeClosed):
            await waiting
        assert await asked is None
    finally:
        go_on.set()
    assert await busy
    await stopping


@on_exchanges()
async def test_an_exchange_closes_its_calls_while_a_peer_has_not_answered(cluster: Cluster) -> None:
    a, b = cluster.workers
    asked = asyncio.Event()

    async def never_answers(**_: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    def check() -> None:
        if b.exchange.closed:
            raise RuntimeError("the run has ended")

    a.handlers["gpurt_ticket"] = never_answers
    calls = b.exchange.calls
    unchecked = asyncio.ensure_future(calls.call(A, "gpurt_ticket", check=lambda: None))
    checked = asyncio.ensure_future(calls.call(A, "gpurt_ticket", check=check))
    await asked.wait()
    b.exchange.closed = True
    await calls.close()
    with pytest.raises(ExchangeClosed):
        await unchecked
    with pytest.raises(RuntimeError, match="the run has ended"):
        await checked
    with pytest.raises(ExchangeClosed):
        await calls.once(A, "gpurt_release", check=lambda: None)
    assert not await calls.is_closing("an address that has left")


# ---- reservations ------------------------------------------------------------------------


def test_a_shard_that_was_promised_room_comes_out_wrong(tmp_path: Path) -> None:
    """The reservation is released."""
    tiered_buffer = new_tiered_buffer(str(tmp_path), Limits(2**20, 0, 0, None))
    landing = Landing(tiered_buffer, "host", Metrics())
    section = Section((0,), (0, 1), 0, 1000, b"")
    shard = Shard(0, Peer(A, "x"), "host", 0, 0, Attempt(0, 0), 0, (section,))

    def bring(_: Any) -> Any:
        raise ValueError("a checksum is wrong")

    with pytest.raises(ValueError, match="checksum"):
        landing.put("a", shard, [np.zeros(1000, np.uint8)], HostDevice(2**30), bring)
    assert tiered_buffer.ledger.cell(Tier.DEVICE, RESERVATIONS) == 0
