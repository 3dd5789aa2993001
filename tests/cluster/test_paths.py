"""Choose the path of shards: the fastest available one."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dask_gpurt.exchange.incoming import reading
from dask_gpurt.exchange.shard import Attempt, Section, Shard
from tests.helpers.far_device import Accelerator
from tests.helpers.in_process import all_placed, on_cluster, until

RUN = ("a shuffle", 1)


# ---- through host memory, on workers -------------------------------------------------

NBYTES = 100_000


def with_accelerator(worker: Any) -> Any:
    """Give a worker's exchange an accelerator."""
    exchange = worker.plugins["gpurt"].exchange
    exchange.pools.devices["accelerator"] = Accelerator(2**30)
    return exchange


def publish(exchange: Any, owner: str, data: np.ndarray) -> Shard:
    outbox = exchange.pools.outbox("accelerator")
    blocks = [outbox.allocate(half.nbytes) for half in np.split(data, 2)]
    for block, half in zip(blocks, np.split(data, 2), strict=True):
        block.buffer[:] = half
    sections = tuple(
        Section((at,), (0, 1), block.offset, block.nbytes, b"") for at, block in enumerate(blocks)
    )
    return Shard(
        outbox.publish(RUN, 0, owner, blocks), exchange.me, "accelerator", 0, 0, Attempt(0, 0), 0, sections
    )


async def bytes_of(exchange: Any, shard: Shard) -> np.ndarray:
    """Return the bytes of a shard that arrive."""
    errors: list[Exception] = []
    exchange.run_begins(RUN)
    incoming = exchange.take(RUN, shard, await exchange.path(shard), errors.append)

    def read() -> np.ndarray:
        with reading([(incoming, 0), (incoming, 1)], exchange.landing, lambda: None, "task") as found:
            return np.concatenate([buffer for buffer, _ in found])

    data = await exchange.offload(read)
    await exchange.offload(exchange.discard, [incoming])
    assert not errors
    return data


def moved(exchange: Any) -> set[str]:
    return {name for name in exchange.metrics.snapshot()["counters"] if name.startswith("exchange.bytes.")}


@pytest.mark.parametrize("room", [True, False])
@on_cluster(workers=2)
async def test_a_shard_goes_through_host_memory(
    client: Any, scheduler: Any, a: Any, b: Any, room: bool
) -> None:
    """Comms are used where host memory has no room."""
    await all_placed(scheduler)
    here, there = with_accelerator(a), with_accelerator(b)
    host = here.pools.outbox("host")
    if not room:
        taken = host.allocate(host.pool.capacity)
    data = np.random.default_rng(0).integers(0, 256, NBYTES, dtype=np.uint8)
    shard = await here.offload(publish, here, b.address, data)
    np.testing.assert_array_equal(await bytes_of(there, shard), data)
    assert moved(there) == {"exchange.bytes.through-host"}
    fallbacks = here.metrics.snapshot()["fallbacks"]
    assert room == ("exchange.comms" not in fallbacks)
    assert "no peer access" in str(there.metrics.snapshot()["fallbacks"])
    if not room:
        host.give_back(taken)
    await until(lambda: not host.pool.used and not here.pools.outbox("accelerator").pool.used)


async def serve(exchange: Any, shard: Shard, owner: Any) -> Any:
    """Serve a fetch of a shard by an owner that maps the pool in host memory."""
    fetch = {"kind": "accelerator", "shard": shard.id, "share": shard.share, "run": list(RUN)}
    return await exchange.comms.serve(**fetch, staged_for=owner.address, to=exchange.me.incarnation)


@on_cluster(workers=2)
async def test_a_shard_is_fetched_again_since_the_reply_got_lost(
    client: Any, scheduler: Any, a: Any, b: Any
) -> None:
    """Both fetches get the same staged copy, even while it is made, and it is freed with the shard."""
    here = with_accelerator(a)
    host, published = here.pools.outbox("host"), here.pools.outbox("accelerator")
    shard = await here.offload(publish, here, b.address, np.zeros(NBYTES, np.uint8))
    assert published.publish_again([shard.id], 1, b.address)
    lost, *replies = await asyncio.gather(*(serve(here, shard, b) for _ in range(3)))
    assert [reply["staged"] for reply in replies] == [lost["staged"]] * 2
    assert (await serve(here, shard, b))["staged"] == lost["staged"]
    once = host.pool.used
    other = await serve(here, replace(shard, share=1), b)
    assert other["staged"] != lost["staged"], "its owner reads and releases it on its own"
    here.release(kind="accelerator", shards=[(shard.id, shard.share)], to=here.me.incarnation)
    await until(lambda: host.pool.used == once)
    assert (await serve(here, shard, b))["data"] is None, "nothing would free a copy made now"
    here.release(kind="accelerator", shards=[(shard.id, 1)], to=here.me.incarnation)
    await until(lambda: not host.pool.used and not published.pool.used)


@on_cluster(workers=2)
async def test_a_shard_is_let_go_of_while_it_is_staged(
    client: Any, scheduler: Any, a: Any, b: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its outputs have moved: the fetch is given up, and nothing reads the copy."""
    here = with_accelerator(a)
    copying, go_on = hold_staging(here, monkeypatch)
    shard = await here.offload(publish, here, b.address, np.zeros(NBYTES, np.uint8))
    serving = asyncio.create_task(serve(here, shard, b))
    assert await here.offload(copying.wait, 10)
    here.release(kind="accelerator", shards=[(shard.id, shard.share)], to=here.me.incarnation)
    go_on.set()
    assert (await serving)["data"] is None
    await until(lambda: not here.pools.outbox("host").pool.used)
    assert not here.comms._copies


def hold_staging(exchange: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Block copies into host memory; returns the events that one has begun, and that lets them continue."""
    device, copying, go_on = exchange.pools.device("accelerator"), threading.Event(), threading.Event()
    scatter = device.scatter

    def slowly(*args: Any, **options: Any) -> Any:
        copying.set()
        assert go_on.wait(10)
        return scatter(*args, **options)

    monkeypatch.setattr(device, "scatter", slowly)
    return copying, go_on


@pytest.mark.parametrize("published", ["once the run is over", "while its owner lets go"])
@on_cluster(workers=2)
async def test_a_staged_shard_is_freed_when_its_run_ends(
    client: Any, scheduler: Any, a: Any, b: Any, published: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = with_accelerator(a)
    copying, go_on = hold_staging(here, monkeypatch)

    async def lets_go(producer: str, run: list[Any]) -> None:
        if published == "while its owner lets go":
            go_on.set()
            await serving

    b.handlers["gpurt_forget"] = lets_go
    shard = await here.offload(publish, here, b.address, np.zeros(NBYTES, np.uint8))
    serving = asyncio.create_task(serve(here, shard, b))
    assert await here.offload(copying.wait, 10)
    await here.withdraw(RUN)
    go_on.set()
    reply = await serving
    assert (reply["data"] is None) == (published == "once the run is over")
    assert not here.pools.outbox("host").pool.used
    assert not here.pools.outbox("accelerator").pool.used
