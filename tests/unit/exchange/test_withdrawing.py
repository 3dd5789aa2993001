"""End a run while its shards are read elsewhere: their blocks are reused only after the reads.

Two ends of the exchange run in one process; the wire between them holds messages until released.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import numpy as np
import pytest
from distributed.comm import CommClosedError

from dask_gpurt.exchange import ExchangeClosed, Shard, requests
from dask_gpurt.exchange.incoming import IncomingShard, ShardState
from dask_gpurt.exchange.outgoing import Outbox
from dask_gpurt.exchange.shard import Attempt, Section
from tests.helpers.exchanges import A, B, Cluster, intercept
from tests.helpers.waiting import on_a_loop

RUN, NEXT = ("a shuffle", 1), ("a shuffle", 2)
NBYTES = 2**16
OURS, OTHERS = 1, 2


class Landed:
    """Fake the tiers: copy the bytes of shards from their source once released."""

    def __init__(self) -> None:
        self.found: list[np.ndarray] = []
        self.begun, self.let = threading.Event(), threading.Event()

    def put(self, key: str, shard: Shard, sources: Any, *_: Any) -> None:
        self.begun.set()
        assert self.let.wait(60)
        self.found = [np.array(source) for source in sources]

    def discard(self, key: str) -> None:
        pass


class Pair:
    """Hold a producer that has published one shard, and its owner."""

    def __init__(self, *paths: str):
        self.cluster = Cluster(A, B, paths=paths, pool=4 * NBYTES)
        self.producer, self.owner = (self.cluster.network.processes[at].exchange for at in (A, B))
        for end in (self.producer, self.owner):
            end.executor = ThreadPoolExecutor(4)  # type: ignore[assignment]
        #: Set once a shard has been read for its owner, and to let it arrive there.
        self.sent, self.wire = asyncio.Event(), asyncio.Event()
        intercept(self.cluster, self._send)
        self.landed: Any = Landed()
        self.owner.landing = self.landed
        self.outbox: Outbox = self.producer.pools.outbox("host")
        block = self.outbox.allocate(NBYTES)
        block.buffer[:] = OURS
        number = self.outbox.publish(RUN, 0, B, [block])
        section = Section((0,), (0, 1), block.offset, NBYTES, b"")
        self.shard = Shard(number, self.producer.me, "host", 0, 0, Attempt(0, 0), 0, (section,))
        self.owner.run_begins(RUN)
        self.failed: list[Exception] = []

    async def _send(self, handle: Any, address: str, op: str, content: dict[str, Any]) -> Any:
        reply = await handle(address, op, content)
        if op == "gpurt_fetch":
            self.sent.set()
            await self.wire.wait()
        return reply

    async def accepted(self) -> IncomingShard:
        return self.owner.take(RUN, self.shard, await self.owner.path(self.shard), self.failed.append)

    def overwrite(self) -> None:
        """Overwrite all reusable memory: the pool frees memory, and another run takes some of it."""
        self.producer.pools.trim()
        self.outbox.allocate(NBYTES).buffer[:] = OTHERS

    async def settled(self) -> None:
        """Return once everything is done that does not wait for the test."""
        for _ in range(50):
            for end in (self.producer, self.owner):
                await end.offload(int)

    async def ends(self, incoming: IncomingShard, *, owner_first: bool, go_on: Callable[[], object]) -> None:
        """End the run; ``go_on`` releases the readers after reusable memory has been overwritten."""
        let_go = []
        if owner_first:
            let_go.append(asyncio.create_task(self.owner.offload(self.owner.discard, [incoming])))
            await self.settled()
        let_go.append(asyncio.create_task(self.producer.requests.withdraw(RUN)))
        await self.settled()
        while incoming.state is not ShardState.GONE:  # on a busy machine; the session has a time limit
            await self.settled()
        self.overwrite()
        go_on()
        await asyncio.gather(*let_go)
        assert self.outbox.pool.used == NBYTES  # held by the other run
        assert not self.owner._incoming[self.producer.me]
        await self.close()

    async def close(self) -> None:
        for end in (self.producer, self.owner):
            await asyncio.to_thread(end.close)


class Reading:
    """Read a shard in place on a thread, until released."""

    def __init__(self, incoming: IncomingShard):
        self._incoming = incoming
        self._begun, self.go_on = threading.Event(), threading.Event()

    async def begins(self) -> asyncio.Task[set[int]]:
        found = asyncio.create_task(asyncio.to_thread(self._read))
        await asyncio.to_thread(self._begun.wait, 60)
        return found

    def _read(self) -> set[int]:
        with self._incoming.staying(lambda: None):
            self._begun.set()
            assert self.go_on.wait(60)
            return set(self._incoming.source(0))


either_end_first = pytest.mark.parametrize("owner_first", [False, True])


@either_end_first
@on_a_loop
async def test_a_run_ends_while_a_shard_is_sent(owner_first: bool) -> None:
    pair = Pair("comms")
    incoming = await pair.accepted()
    await pair.sent.wait()
    pair.landed.let.set()
    await pair.ends(incoming, owner_first=owner_first, go_on=pair.wire.set)
    assert set(np.concatenate(pair.landed.found)) == {OURS}


@either_end_first
@on_a_loop
async def test_a_run_ends_while_a_shard_is_copied(owner_first: bool) -> None:
    """By its owner, out of the mapped pool."""
    pair = Pair("shared-memory", "comms")
    incoming = await pair.accepted()
    pair.owner.drain(list(pair.producer.me))
    await asyncio.to_thread(pair.landed.begun.wait, 60)
    await pair.ends(incoming, owner_first=owner_first, go_on=pair.landed.let.set)
    assert set(np.concatenate(pair.landed.found)) == {OURS}


@either_end_first
@on_a_loop
async def test_a_run_ends_while_a_shard_is_read_where_it_lies(owner_first: bool) -> None:
    pair = Pair("shared-memory", "comms")
    incoming = await pair.accepted()
    reading = Reading(incoming)
    found = await reading.begins()
    await pair.ends(incoming, owner_first=owner_first, go_on=reading.go_on.set)
    assert await found == {OURS}


@on_a_loop
async def test_an_owner_that_reads_and_can_not_be_asked_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests, "PEER_RETRY_INTERVAL_S", 0.0)
    pair = Pair("shared-memory", "comms")
    incoming = await pair.accepted()
    reading, asked = Reading(incoming), count(1)

    async def asks(**message: Any) -> None:
        if next(asked) <= 3:
            raise CommClosedError("a comm between two that live has broken")
        await forget(**message)

    handlers = pair.owner.worker.handlers
    forget, handlers["gpurt_forget"] = handlers["gpurt_forget"], asks
    found = await reading.begins()
    await pair.ends(incoming, owner_first=False, go_on=reading.go_on.set)
    assert await found == {OURS}


@on_a_loop
async def test_an_owner_that_has_left_keeps_nothing() -> None:
    pair = Pair("shared-memory", "comms")
    await pair.accepted()
    pair.cluster.network.processes[B].die()
    pair.cluster.scheduler.leaves(B)
    await pair.producer.requests.withdraw(RUN)
    assert not pair.outbox.pool.used
    await pair.close()


@on_a_loop
async def test_the_first_offer_of_a_run_arrives_after_its_producer_has_ended_it() -> None:
    pair = Pair("shared-memory", "comms")
    await pair.owner.forget(list(pair.producer.me), list(NEXT))
    pair.owner.run_begins(NEXT)
    path = await pair.owner.path(pair.shard)
    with pytest.raises(ExchangeClosed, match="after the end of its run"):
        pair.owner.take(NEXT, pair.shard, path, pair.failed.append)
    await pair.close()


@on_a_loop
async def test_a_pull_that_fails_leaves_nothing_behind() -> None:
    async def failing(**_: Any) -> Any:
        raise ValueError("no")

    pair = Pair("comms")
    pair.producer.worker.handlers["gpurt_fetch"] = failing
    incoming = await pair.accepted()
    while not pair.failed:
        await pair.settled()
    await pair.ends(incoming, owner_first=False, go_on=lambda: None)
