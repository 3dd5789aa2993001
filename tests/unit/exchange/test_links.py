"""Classify a peer's distance for metrics: by the link if known, else by the addresses."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpurt.exchange.links import Links, PeerClass


@pytest.mark.parametrize(
    ("me", "peer", "expected"),
    [
        ("tcp://10.0.0.1:40000", "tcp://10.0.0.1:40000", PeerClass.SAME_WORKER),
        ("tcp://10.0.0.1:40000", "tcp://10.0.0.1:40001", PeerClass.SAME_HOST),
        ("ucx://10.0.0.1:40000", "ucx://10.0.0.2:40000", PeerClass.OTHER_HOST),
        ("tcp://[fe80::1]:40000", "tcp://[fe80::1]:40001", PeerClass.SAME_HOST),
        ("tcp://[fe80::1]:40000", "tcp://[fe80::2]:40000", PeerClass.OTHER_HOST),
        ("inproc://10.0.0.1/7/1", "inproc://10.0.0.1/7/2", PeerClass.SAME_HOST),
    ],
)
def test_addresses_tell_how_far_a_peer_is(me: str, peer: str, expected: PeerClass) -> None:
    assert Links(SimpleNamespace(address=me)).peer_class(peer) is expected


@pytest.mark.parametrize(
    ("link", "expected"),
    [("nvlink", PeerClass.SAME_HOST), ("loopback", PeerClass.SAME_HOST), ("rdma", PeerClass.OTHER_HOST)],
)
def test_a_known_link_tells_more_than_addresses(link: str, expected: PeerClass) -> None:
    """A host may have several addresses, and containers of one host have one each."""

    class Scheduler:
        async def gpurt_links(self, worker: str, peers: list[str]) -> dict[str, Any]:
            return dict.fromkeys(peers, link)

    async def run() -> PeerClass:
        loop = asyncio.get_running_loop()
        worker = SimpleNamespace(address="tcp://10.0.0.1:1", loop=loop, scheduler=Scheduler())
        links = Links(worker)
        await links.learn("tcp://10.0.0.9:1")
        return links.peer_class("tcp://10.0.0.9:1")

    assert asyncio.run(run()) is expected
