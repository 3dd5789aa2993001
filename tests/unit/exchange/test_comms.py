"""Fetch shards over Dask's comms: their order, while the speed of a link is being measured."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpurt.device.host import HostDevice
from dask_gpurt.exchange import calls, compression
from dask_gpurt.exchange.calls import Calls
from dask_gpurt.exchange.comms import Comms
from dask_gpurt.exchange.links import Links, Traffic
from dask_gpurt.exchange.paths import Endpoint
from dask_gpurt.exchange.shard import Peer, PeerLost
from dask_gpurt.observe import Metrics
from dask_gpurt.topology import Link
from tests.helpers.waiting import on_a_loop

ME, SLOW, QUICK = "tcp://here:1", "tcp://slow:1", "tcp://quick:1"


@pytest.fixture(autouse=True)
def have_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake installed codecs: they are named in requests, and peers compress nothing."""
    monkeypatch.setattr(compression, "compressions", dict.fromkeys(compression.CODECS))


class Worker:
    """Fake a worker whose peers are on other hosts, and reply when the test releases them."""

    address = ME

    def __init__(self, reachable: bool = True) -> None:
        self.reachable = reachable
        self.loop = SimpleNamespace(time=asyncio.get_running_loop().time)
        self.scheduler = SimpleNamespace(gpurt_links=self._links, gpurt_gone=self._gone)
        self.answers = {SLOW: asyncio.Event(), QUICK: asyncio.Event()}
        self.asked = Counter[str]()

    async def _links(self, worker: str, peers: list[str]) -> dict[str, Any]:
        return dict.fromkeys(peers, str(Link.TCP))

    async def _gone(self, peers: list[str]) -> list[str]:
        return [] if self.reachable else peers

    def rpc(self, peer: str) -> Any:
        async def fetch(**_: Any) -> dict[str, Any]:
            self.asked[peer] += 1
            await self.answers[peer].wait()
            if not self.reachable:
                raise OSError("it has left")
            return {"data": [b"bytes"], "staged": None, "codec": None, "seconds": 0.0}

        return SimpleNamespace(gpurt_fetch=fetch)


def comms_of(worker: Worker) -> Comms:
    nothing: Any = None  # fetching uses no pool
    metrics = Metrics()
    calls = Calls(worker, metrics)
    end = Endpoint(Peer.begin(ME), worker, nothing, Links(worker), Traffic(), calls, metrics, at_once)
    return Comms(end, "auto")


async def at_once(function: Any, *args: Any) -> Any:
    return function(*args)


def shard_of(peer: str) -> Any:
    shard = SimpleNamespace(producer=Peer.begin(peer), device="host", id=0, share=0)
    path = SimpleNamespace(staging=None)
    return SimpleNamespace(
        shard=shard, run=("a shuffle", 1), path=path, device=HostDevice(0), check_wanted=lambda: None
    )


async def settled() -> None:
    """Return once all tasks are blocked."""
    for _ in range(20):
        await asyncio.sleep(0)


@on_a_loop
async def test_the_first_shard_of_a_peer_comes_alone() -> None:
    worker = Worker()
    ours = comms_of(worker)
    pulls = [asyncio.create_task(ours.fetch(shard_of(QUICK))) for _ in range(3)]
    await settled()
    assert worker.asked[QUICK] == 1
    worker.answers[QUICK].set()
    await asyncio.wait_for(asyncio.gather(*pulls), 10)
    assert worker.asked[QUICK] == 3


@on_a_loop
async def test_a_slow_peer_does_not_hold_up_the_others() -> None:
    worker = Worker()
    ours = comms_of(worker)
    slow = [asyncio.create_task(ours.fetch(shard_of(SLOW))) for _ in range(2)]
    await settled()
    worker.answers[QUICK].set()
    await asyncio.wait_for(asyncio.gather(*(ours.fetch(shard_of(QUICK)) for _ in range(3))), 10)
    assert worker.asked == {SLOW: 1, QUICK: 3}
    worker.answers[SLOW].set()
    await asyncio.wait_for(asyncio.gather(*slow), 10)


@on_a_loop
async def test_nothing_is_kept_of_peers_that_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "LONGEST_PAUSE_S", 0.0)
    monkeypatch.setattr(calls, "FIRST_PAUSE_S", 0.0)
    worker = Worker(reachable=False)
    worker.answers[SLOW].set()
    ours = comms_of(worker)
    pulls = [asyncio.create_task(ours.fetch(shard_of(SLOW))) for _ in range(2)]
    await asyncio.wait(pulls, timeout=10)
    assert [type(pull.exception()) for pull in pulls] == [PeerLost, PeerLost]
    pulls.clear()
    assert not ours._first
