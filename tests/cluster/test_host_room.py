"""Share a host between workers: reads of each other's pools, and room in /dev/shm."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

from dask_gpurt.device import Block, PoolFull
from dask_gpurt.exchange import Attempt, Exchange, Shard, outgoing
from dask_gpurt.exchange.incoming import IncomingShard, reading
from dask_gpurt.exchange.outgoing import HostFull, Outbox
from dask_gpurt.exchange.shard import Section
from dask_gpurt.scheduler import worker_calls as asking
from tests.helpers.clusters import cluster
from tests.helpers.in_process import on_cluster
from tests.helpers.shared_memory import PAGE, Shm, filled, held, resident

RUN = ("a shuffle", 1)
MIB = 2**20
ROWS = 500_000


def exchange_of(worker: Any) -> Any:
    return worker.plugins["gpurt"].exchange


def publish(exchange: Any, owner: str, nbytes: int) -> Shard:
    outbox = exchange.pools.outbox("host")
    block = filled(outbox.pool, nbytes)
    section = Section((0,), (0, 1), block.offset, nbytes, b"")
    return Shard(
        outbox.publish(RUN, 0, owner, [block]), exchange.me, "host", 0, 0, Attempt(0, 0), 0, (section,)
    )


def read(exchange: Any, incoming: IncomingShard) -> int:
    with reading([(incoming, 0)], exchange.landing, lambda: None, "task") as ((buffer, _),):
        return int(buffer.sum())


async def taken(exchange: Exchange, shard: Shard) -> IncomingShard:
    """Return a shard that was offered to an owner."""
    exchange.run_begins(RUN)
    return exchange.take(RUN, shard, await exchange.path(shard), print)


async def _keep_no_house(exchange: Exchange) -> None:
    pass


class Enough(Exception):
    """End a producer that has waited long enough."""


def cut(outbox: Outbox, nbytes: int, seconds: float = 20) -> Block:
    """Cut a block, as a producer does whose run ends after ``seconds``."""
    until = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > until:
            raise Enough

    while True:
        seen = outbox.room.wakes
        try:
            return outbox.allocate(nbytes)
        except PoolFull as full:
            outbox.wait_for_room(full.nbytes, seen, check)


@pytest.mark.parametrize("drained", [False, True])
@on_cluster(workers=2)
async def test_pages_read_from_a_peer_do_not_count(
    client: Any, scheduler: Any, a: Any, b: Any, drained: bool
) -> None:
    """Neither mapped nor copied reads count. Dask pauses and kills workers by what counts."""
    here, there = exchange_of(a), exchange_of(b)
    shard = await here.offload(publish, here, b.address, 4 * MIB)
    incoming = await taken(there, shard)
    if drained:
        there.drain(producer=list(here.me))
        await asyncio.wrap_future(incoming._landed)
    assert await there.offload(read, there, incoming) == 4 * MIB
    assert resident(incoming.path.mapping._mapping) == 0
    await there.offload(there.discard, [incoming])


@on_cluster(workers=4)
async def test_a_producer_waits_for_what_another_worker_has_published(
    client: Any, scheduler: Any, a: Any, b: Any, c: Any, d: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiting producer has published nothing, so the shards in its own pool name no peer to ask.

    It takes a round to have the shards copied, and another one to get their memory. A fourth worker is
    stopped, and replies to none.
    """
    monkeypatch.setattr(asking, "ROOM_TIMEOUT_S", 0.1)
    monkeypatch.setattr(Exchange, "run_housekeeping", _keep_no_house)  # only the rounds return memory
    goes_on = asyncio.Event()
    d.handlers["gpurt_make_room"] = goes_on.wait
    ends = [exchange_of(worker) for worker in (a, b, c)]
    boxes = [await end.offload(end.pools.outbox, "host") for end in ends]
    shm = Shm(monkeypatch, 4 * MIB)
    shm.pools = [box.pool for box in boxes]
    shard = await ends[0].offload(publish, ends[0], b.address, 3 * MIB)
    incoming = await taken(ends[1], shard)
    block = await ends[2].offload(cut, boxes[2], 2 * MIB)
    assert held(boxes[0].pool) == 0
    assert held(boxes[2].pool) == 2 * MIB
    assert await ends[1].offload(read, ends[1], incoming) == 3 * MIB
    fallbacks = ends[2].metrics.snapshot()["fallbacks"]
    assert fallbacks["exchange.shm-full"]["count"] >= 1
    boxes[2].give_back(block)
    await ends[1].offload(ends[1].discard, [incoming])
    goes_on.set()


@on_cluster(workers=2)
async def test_a_wait_for_memory_that_other_files_fill_ends(
    client: Any, scheduler: Any, a: Any, b: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small blocks may still fit. While any worker holds memory itself, producers keep waiting."""
    monkeypatch.setattr(outgoing, "FOREIGN_PATIENCE_S", 0.3)
    ends = [exchange_of(worker) for worker in (a, b)]
    boxes = [await end.offload(end.pools.outbox, "host") for end in ends]
    shm = Shm(monkeypatch, 4 * PAGE)
    shm.pools = [box.pool for box in boxes]
    being_packed = filled(boxes[0].pool, 4 * PAGE)
    with pytest.raises(Enough):
        await ends[1].offload(cut, boxes[1], MIB, 1)
    boxes[0].give_back(being_packed)
    with pytest.raises(HostFull, match="--shm-size"):
        await ends[1].offload(cut, boxes[1], MIB)
    boxes[1].give_back(await ends[1].offload(cut, boxes[1], 4 * PAGE))
    shm.total = 0
    with pytest.raises(MemoryError, match="--shm-size"):
        await ends[0].offload(cut, boxes[0], 2 * PAGE)


# ---- processes -----------------------------------------------------------------------


def part(number: int) -> pd.DataFrame:
    random = np.random.default_rng(number)
    return pd.DataFrame({"key": random.integers(0, 10**6, ROWS), "a": random.random(ROWS), "b": 1.0})


def numbered(number: int) -> pd.DataFrame:
    rows = np.arange(ROWS) + number * ROWS
    return pd.DataFrame({"key": part(number).key, "row": rows, "twice": rows * 2.0})


def keys_and_rows(frame: pd.DataFrame) -> pd.Series:
    assert (frame.twice == frame.row * 2).all()
    return pd.Series([(frame.key.unique(), frame.row.to_numpy())])


@pytest.mark.slow
def test_eight_workers_of_a_host_keep_to_their_limits() -> None:
    """Each of them reads pools twice as large as its limit. Dask's thresholds are the defaults."""
    parts = 48
    with cluster(workers=8, memory_limit="400 MiB", exchange__pool="110 MiB") as client:
        df = dd.from_map(numbered, range(parts), meta=numbered(0).iloc[:0])
        found = df.shuffle("key").map_partitions(keys_and_rows, meta=(None, object))
        # Gather them one by one: all of them exceed one worker's limit.
        outputs = [output[0] for output in client.gather(client.compute(found.to_delayed()))]
        assert not client.get_events("worker-restart-memory")
        keys, rows = (np.concatenate(each) for each in zip(*outputs, strict=True))
        assert len(np.unique(keys)) == len(keys), "each key is in one partition"
        assert np.array_equal(np.sort(rows), np.arange(parts * ROWS))
