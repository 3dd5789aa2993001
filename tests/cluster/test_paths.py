"""Choose the path of shards: the fastest available one."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from dask_gpurt.exchange.incoming import reading
from dask_gpurt.exchange.shard import Attempt, Section, Shard
from tests.helpers.far_device import Accelerator
from tests.helpers.in_process import on_cluster, until

RUN = ("a shuffle", 1)


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


@on_cluster(workers=2)
async def test_a_shard_of_a_device_that_peers_cannot_map_goes_through_comms(
    client: Any, scheduler: Any, a: Any, b: Any
) -> None:
    here, there = with_accelerator(a), with_accelerator(b)
    data = np.random.default_rng(0).integers(0, 256, NBYTES, dtype=np.uint8)
    shard = await here.offload(publish, here, b.address, data)
    np.testing.assert_array_equal(await bytes_of(there, shard), data)
    assert moved(there) == {"exchange.bytes.comms"}
    assert "no peer access" in str(there.metrics.snapshot()["fallbacks"])
    await until(lambda: not here.pools.outbox("accelerator").pool.used)


@on_cluster(workers=2)
async def test_a_shard_is_let_go_of_while_it_is_sent(
    client: Any, scheduler: Any, a: Any, b: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its outputs have moved, or its run has ended: its block may be written again."""
    here = with_accelerator(a)
    device, copying, go_on = here.pools.device("accelerator"), threading.Event(), threading.Event()
    to_host = device.to_host

    def slowly(source: Any) -> Any:
        copying.set()
        assert go_on.wait(10)
        return to_host(source)

    monkeypatch.setattr(device, "to_host", slowly)
    shard = await here.offload(publish, here, b.address, np.zeros(NBYTES, np.uint8))
    fetch = {"kind": "accelerator", "shard": shard.id, "share": shard.share, "to": here.me.incarnation}
    serving = asyncio.create_task(here.comms.serve(**fetch))
    assert await here.offload(copying.wait, 10)
    here.release(kind="accelerator", shards=[(shard.id, shard.share)], to=here.me.incarnation)
    go_on.set()
    assert (await serving)["data"] is None
    assert (await here.comms.serve(**fetch))["data"] is None
