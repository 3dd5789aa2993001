"""End connections, peers, runs and the runtime while exchanges are at work; nothing may leak."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from distributed.exceptions import Reschedule
from distributed.shuffle._core import ShuffleId
from distributed.shuffle._exceptions import ShuffleClosedError

from dask_gpurt.device import PoolFull
from dask_gpurt.exchange import Attempt, ExchangeClosed, PeerLost
from dask_gpurt.exchange.incoming import ShardState
from dask_gpurt.exchange.paths import HeldMapping
from dask_gpurt.exchange.shard import PeerError
from tests.helpers.exchange_scheduler import frame_of, spec_of
from tests.helpers.exchanges import (
    RESET,
    A,
    B,
    Cluster,
    failing,
    held_back,
    intercept,
    never_answering,
    on_exchanges,
    quiet,
)


@on_exchanges()
async def test_the_connection_breaks_while_a_pool_is_asked_for(cluster: Cluster) -> None:
    calls = failing(cluster, "gpurt_ticket", None, *[RESET] * 2)
    assert await cluster.shuffle() == cluster.expected()
    assert len(calls) > 2


@on_exchanges(paths=["comms"])
async def test_the_runtime_is_switched_off_at_a_producer_while_a_shard_is_fetched(cluster: Cluster) -> None:
    """Dask then replies None. Shards offered from there are lost, which the barrier detects."""

    async def is_off(handle: Any, address: str, op: str, content: dict[str, Any]) -> Any:
        return None if op == "gpurt_fetch" else await handle(address, op, content)

    intercept(cluster, is_off)
    results = await cluster.transfer_all()
    assert sum(each.counted("shuffle.lost.shards") for each in cluster.workers)
    with pytest.raises(Reschedule, match="are transferred again"):
        await cluster.barrier("a shuffle", results)


@on_exchanges()
async def test_the_runtime_is_switched_off_at_an_owner_while_shards_are_offered(cluster: Cluster) -> None:
    failing(cluster, "shuffle_receive", B, *[ExchangeClosed("the exchange is closed")] * 9)
    await cluster.transfer_all()
    await cluster.hear()
    active = cluster.scheduler.active["a shuffle"]
    assert {share.owner for share in active.owners.shares.values()} == {A}


@on_exchanges()
async def test_a_run_ends_while_the_path_of_an_offered_shard_is_found_out(cluster: Cluster) -> None:
    await cluster.transfer_all()
    a, b = cluster.workers
    run: Any = b.run_of("a shuffle")
    incoming_shards = [
        incoming for incoming in run._receiver._unread if incoming.shard.producer == a.exchange.me
    ]
    found = b.exchange.peers.path

    async def ends_first(*args: Any) -> Any:
        path = await found(*args)
        await cluster.end()
        return path

    b.exchange.peers.path = ends_first  # type: ignore[method-assign]
    await cluster.hear()
    shard = incoming_shards[0].shard
    again = replace(shard, part=9)
    with pytest.raises((ExchangeClosed, ShuffleClosedError)):
        await run._receiver.receive([again])
    assert not any(b.exchange._incoming.values())


@on_exchanges()
async def test_a_shard_is_offered_after_its_producer_has_withdrawn_the_run(cluster: Cluster) -> None:
    """Its block may hold data of another run by then."""
    await cluster.transfer_all()
    a, b = cluster.workers
    run: Any = b.run_of("a shuffle")
    shard = next(p.shard for p in run._receiver._unread if p.shard.producer == a.exchange.me)
    await a.exchange.requests.withdraw(("a shuffle", run.run_id))
    await quiet()
    assert not any(p.shard.producer == a.exchange.me for p in run._receiver._unread)
    with pytest.raises(ExchangeClosed, match="after the end of its run"):
        await run._receiver.receive([replace(shard, attempt=Attempt(99, 0))])


class Pool:
    """A mapping that records whether it is open."""

    def __init__(self) -> None:
        self.open = True

    def view(self, offset: int, nbytes: int) -> Any:
        assert self.open
        return np.zeros(nbytes, np.uint8)

    def drop_pages(self, offset: int, nbytes: int) -> None:
        assert self.open

    def close(self) -> None:
        self.open = False


def test_a_peer_leaves_while_its_pool_is_read() -> None:
    pool = Pool()
    mapping = HeldMapping(pool, lambda close: close())
    assert mapping.hold()
    assert mapping.hold()
    mapping.retire()
    mapping.let_go()
    assert pool.open
    assert not mapping.hold(), "what comes later is refused"
    mapping.let_go()
    assert not pool.open


def test_a_peer_leaves_while_nothing_is_read() -> None:
    pool = Pool()
    mapping = HeldMapping(pool, lambda close: close())
    assert mapping.hold()
    mapping.let_go()
    assert pool.open
    mapping.retire()
    mapping.retire()
    assert not pool.open


@on_exchanges()
async def test_a_shard_is_offered_by_a_worker_that_has_left(cluster: Cluster) -> None:
    await cluster.transfer_all()
    a, b = cluster.workers
    run: Any = b.run_of("a shuffle")
    shard = next(p.shard for p in run._receiver._unread if p.shard.producer == a.exchange.me)
    a.die()
    b.exchange.on_worker_removed(A)
    await quiet()
    await run._receiver.receive([replace(shard, part=9)])
    assert run._receiver.seal({shard.source: shard.attempt}) == {shard.source}, "it is missing"


@on_exchanges()
async def test_the_runtime_is_switched_off_while_tasks_read_and_write_the_pools(cluster: Cluster) -> None:
    """Freeing a GPU's pool under a kernel fails all further CUDA calls of the process."""
    exchange = cluster.a.exchange
    entered, go_on = threading.Event(), threading.Event()

    def task() -> None:
        with exchange.in_use():
            entered.set()
            assert go_on.wait(20)

    with ThreadPoolExecutor(2) as threads:
        working = threads.submit(task)
        assert entered.wait(20)
        assert not exchange.stop()
        with pytest.raises(ExchangeClosed), exchange.in_use():
            raise AssertionError("a task has begun")
        stopped = threads.submit(exchange.stop, 20)
        go_on.set()
        assert stopped.result(20)
        working.result(20)
    cluster.close()
    await quiet()


@on_exchanges()
async def test_the_runtime_is_switched_off_while_a_block_of_the_pool_is_lent(cluster: Cluster) -> None:
    """A peer may be reading it."""
    exchange = cluster.a.exchange
    used = exchange.pools.outbox("host").pool.used
    loan = await asyncio.to_thread(exchange.lend, 1000)
    assert loan.pool.used > used
    with pytest.raises(PoolFull):
        await asyncio.to_thread(exchange.lend, loan.pool.capacity + 1)
    assert not await asyncio.to_thread(exchange.stop)
    with pytest.raises(PoolFull):
        await asyncio.to_thread(exchange.lend, 1000)
    loan.give_back()
    assert loan.pool.used == used
    assert await asyncio.to_thread(exchange.stop)
    cluster.close()
    await quiet()


@on_exchanges()
async def test_the_runtime_is_switched_off_while_a_pool_is_mapped(cluster: Cluster) -> None:
    a, b = cluster.workers
    made = list[HeldMapping]()
    hold = b.exchange.peers._held

    def closes_first(path: Any) -> Any:
        b.exchange.close()
        held = hold(path)
        made.append(held.mapping)
        return held

    b.exchange.peers._held = closes_first  # type: ignore[method-assign]
    with pytest.raises(PeerError, match="is closed"):
        await b.exchange.peers.path(a.exchange.me, "host")
    assert made
    assert not made[0].hold()


@on_exchanges()
async def test_a_shard_is_let_go_while_it_is_fetched_and_a_device_still_reads_it(cluster: Cluster) -> None:
    """The event loop does not block on the device."""
    await cluster.transfer_all()
    a, b = cluster.workers
    incoming = next(iter(b.exchange._incoming[a.exchange.me]))
    where = list[int]()
    incoming.read_until(lambda: where.append(threading.get_ident()))
    b.exchange.executor.shutdown()
    b.exchange.executor = ThreadPoolExecutor(1)

    def lets_go_and_fails(incoming: Any) -> None:
        incoming.discard()
        raise OSError("a test")

    b.exchange.puller._pull_mapped = lets_go_and_fails  # type: ignore[method-assign]
    assert incoming.start_moving()
    await b.exchange.puller._pull(incoming)
    assert where
    assert threading.get_ident() not in where


@on_exchanges()
async def test_a_producer_closes_while_a_shard_of_it_lands(cluster: Cluster) -> None:
    """The shard counts as lost; its late arrival raises no error."""
    await cluster.transfer_all()
    a, b = cluster.workers
    run: Any = b.run_of("a shuffle")
    incoming = next(
        incoming for incoming in run._receiver._unread if incoming.shard.producer == a.exchange.me
    )
    assert incoming.start_moving()
    incoming.fail(PeerLost("it closes"))
    incoming.land(lambda key: None)
    await quiet()
    run.raise_if_closed()
    assert run._receiver.seal({incoming.shard.source: incoming.shard.attempt}) == {incoming.shard.source}


@on_exchanges()
async def test_a_run_that_ends_as_a_shard_is_published_leaves_nothing_in_the_pool(cluster: Cluster) -> None:
    """The run has already withdrawn all that it published, so a later block would never be withdrawn."""
    cluster.scheduler.begin(spec_of("shuffle", cluster.OUTPUTS))
    process = cluster.a
    run: Any = await process.shuffles.shuffle_runs.get_or_create(ShuffleId("shuffle"), "transfer-0")
    loop, publish = asyncio.get_running_loop(), process.outbox.publish

    def publish_once_it_has_ended(*args: Any) -> int:
        asyncio.run_coroutine_threadsafe(run.close(), loop).result()
        return publish(*args)

    def transfer() -> None:
        with process.task("transfer-0", cluster.scheduler.next_dispatch()):
            run.add_partition(frame_of(cluster.rows(0), cluster.OUTPUTS), 0)

    process.outbox.publish = publish_once_it_has_ended  # type: ignore[method-assign]
    with pytest.raises(ShuffleClosedError):
        await asyncio.to_thread(transfer)
    assert process.outbox.pool.used == 0


@on_exchanges()
async def test_an_exchange_that_has_stopped_keeps_no_shards(cluster: Cluster) -> None:
    await cluster.transfer_all()
    stopped = cluster.workers[1].exchange
    assert A in repr(stopped)
    await asyncio.to_thread(stopped.stop)
    assert repr(stopped).endswith("shards offered by {}>")


# ---- a worker that is about to leave has its shards copied by their owners ---------------------------


async def transferred(cluster: Cluster) -> Any:
    """Return the run of a worker that has transferred an input, and is about to leave."""
    cluster.begin()
    await cluster.transfer("a shuffle", 0, cluster.a)
    return cluster.a.run_of("a shuffle")


@on_exchanges()
async def test_a_worker_is_evacuated_and_leaves(cluster: Cluster) -> None:
    """Its outputs have moved, of which it has yet to hear; it is needed for nothing any more."""
    results = await cluster.transfer_all()
    a, b = cluster.workers
    run: Any = a.run_of("a shuffle")
    active = cluster.scheduler.active["a shuffle"]
    cluster.scheduler.balance("a shuffle", active.owners, B)
    assert await run.evacuate(active.owners.epoch) == 0
    assert {shard.state for shard in b.exchange._incoming[a.exchange.me]} == {ShardState.LANDED}
    a.die()
    a.close()
    cluster.scheduler.leaves(A, results_survive=True)
    await cluster.hear()
    await cluster.barrier("a shuffle", results)
    assert await cluster.outputs() == cluster.expected()
    assert b.counted("shuffle.inputs.missing") == 0
    await cluster.end()


@on_exchanges()
async def test_a_worker_is_evacuated_as_soon_as_the_last_release_arrives(cluster: Cluster) -> None:
    arrives = held_back(cluster, "gpurt_release")
    run = await transferred(cluster)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dask_gpurt.exchange.requests.ROOM_RETRY_INTERVAL_S", 3600.0)
        patch.setattr("dask_gpurt.shuffle.run.EVACUATION_STEP_S", 3600.0)
        evacuating = asyncio.ensure_future(run.evacuate(0))
        while not cluster.b.exchange.requests._released:
            await asyncio.sleep(0.001)
        await quiet()
        assert not evacuating.done()
        arrives.set()
        assert await evacuating == 0


@on_exchanges()
async def test_a_worker_is_evacuated_whose_offers_have_not_arrived(cluster: Cluster) -> None:
    """Their owner copies them once they have, although they are offered after it was asked."""
    arrives = held_back(cluster, "shuffle_receive")
    run = await transferred(cluster)
    evacuating = asyncio.ensure_future(run.evacuate(0))
    await quiet()
    assert not evacuating.done()
    arrives.set()
    assert await evacuating == 0


@on_exchanges()
async def test_a_worker_is_evacuated_whose_inputs_have_no_rows_for_an_owner(cluster: Cluster) -> None:
    """There is no shard to copy, but the owner has to learn so before the worker leaves."""
    arrives, commits = asyncio.Event(), list[bytes]()

    async def hold_back(handle: Any, address: str, op: str, content: dict[str, Any]) -> Any:
        if op == "shuffle_receive":
            await arrives.wait()
            commits.append(content["data"])
        return await handle(address, op, content)

    intercept(cluster, hold_back)
    owners = cluster.begin().owners
    cluster.rows = lambda source: [row for row in range(40) if owners[row % cluster.OUTPUTS] == A]  # type: ignore
    await cluster.transfer("a shuffle", 0, cluster.a)
    run: Any = cluster.a.run_of("a shuffle")
    evacuating = asyncio.ensure_future(run.evacuate(0))
    await quiet()
    assert not evacuating.done()
    arrives.set()
    assert await evacuating == 0
    assert [b"Commit" in data for data in commits] == [True]


@on_exchanges()
async def test_a_run_fails_while_its_worker_is_evacuated(cluster: Cluster) -> None:
    """Its shards are withdrawn, not copied: the worker is still needed."""
    run = await transferred(cluster)
    called = never_answering(cluster, "gpurt_drain", B)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dask_gpurt.shuffle.run.EVACUATION_STEP_S", 0.01)
        evacuating = asyncio.ensure_future(run.evacuate(0))
        await called.wait()
        run.fail(MemoryError("no memory"))
        assert await evacuating is None


@on_exchanges()
async def test_owners_do_not_copy_the_shards_of_a_worker_that_is_evacuated(cluster: Cluster) -> None:
    run = await transferred(cluster)
    called = never_answering(cluster, "gpurt_drain", B)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dask_gpurt.shuffle.run.EVACUATION_STEP_S", 0.01)
        assert await run.evacuate(0) == 1
    assert called.is_set()
