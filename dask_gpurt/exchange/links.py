"""Know the links from peers to this worker by the scheduler's topology, and total transfers over them.

The scheduler is asked for a link only when a shard may cross it, so that memory grows with the number of
pairs of workers in use, not with that of all pairs. Transfers are also totalled by peer and path, for the
worker's reports to the scheduler.

Decisions and their figures: ``docs/decisions/shuffle.md``.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import StrEnum
from time import perf_counter
from typing import Any, NamedTuple

from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.topology import Link
from dask_gpurt.topology.model import WITHIN_HOST

#: Seconds until the scheduler is asked again about an unknown peer.
UNKNOWN_PEER_RETRY_S = 10.0
#: The most pairs of a peer and a path in one report; transfers beyond that are not counted.
MAX_PEERS = 64
#: Pseudo-path of shards that are read in place, which takes no copy and counts no time.
IN_PLACE = "in-place"


class PeerClass(StrEnum):
    """Classify peers by distance: the label ``peer`` of metrics."""

    SAME_WORKER = "same-worker"
    SAME_HOST = "same-host"
    OTHER_HOST = "other-host"


def _without_port(address: str) -> str:
    """Return the protocol and the host of an address; for inproc addresses only the protocol."""
    return address.rpartition(":")[0]


class Links:
    """Hold the links to this worker, by peer. On the event loop, not thread-safe."""

    def __init__(self, worker: WorkerServer):
        self._worker = worker
        self._known: dict[str, Link] = {}
        self._asked: dict[str, float] = {}
        self._missing: set[str] = set()
        self._asking: asyncio.Task[None] | None = None
        self._closed = False

    def peer_class(self, peer: str) -> PeerClass:
        """Return the class of a peer, from its link or, if that is unknown, from its address."""
        if peer == self._worker.address:
            return PeerClass.SAME_WORKER
        if (known := self._known.get(peer)) is not None:
            near = known in WITHIN_HOST
        else:
            near = _without_port(peer) == _without_port(self._worker.address)
        return PeerClass.SAME_HOST if near else PeerClass.OTHER_HOST

    async def learn(self, peer: str) -> Link | None:
        """Return the link of a peer, waiting for the scheduler's reply; None if it is unknown there."""
        self._ask_soon([peer])
        if peer not in self._known and self._asking is not None:
            await asyncio.shield(self._asking)
        return self._known.get(peer)

    def _ask_soon(self, peers: Iterable[str]) -> None:
        now = self._worker.loop.time()
        for peer in peers:
            if (
                peer not in self._known
                and now - self._asked.get(peer, -UNKNOWN_PEER_RETRY_S) >= UNKNOWN_PEER_RETRY_S
            ):
                self._asked[peer] = now
                self._missing.add(peer)
        if self._missing and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._ask_missing())

    async def _ask_missing(self) -> None:
        while self._missing:
            await asyncio.sleep(0)  # batch the peers of one turn of the loop
            peers, self._missing = list(self._missing), set()
            await self._ask(peers)

    async def _ask(self, peers: list[str]) -> None:
        if self._closed:
            return
        with contextlib.suppress(OSError):  # if the scheduler comes back, peers are requested again
            answer = await self._worker.scheduler.gpurt_links(worker=self._worker.address, peers=peers)
            if answer is not None:  # None comes from a scheduler on which the runtime is off
                self._known.update({peer: Link(link) for peer, link in answer.items()})

    def forget(self, peers: Collection[str]) -> None:
        """Forget peers that have left."""
        for peer in peers:
            self._known.pop(peer, None)
            self._asked.pop(peer, None)

    def close(self) -> None:
        """Ask the scheduler no more. From any thread."""
        self._closed = True


class TransferTotals(NamedTuple):
    """Hold the totals of transfers from one peer over one path."""

    peer: str
    path: str
    nbytes: int
    seconds: float
    transfers: int


class Traffic:
    """Total transfers by peer and path. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[tuple[str, str], TransferTotals] = {}

    def note(self, peer: str, path: str, nbytes: int, seconds: float) -> None:
        """Add a completed transfer."""
        with self._lock:
            if (peer, path) not in self._totals and len(self._totals) >= MAX_PEERS:
                return
            known = self._totals.get((peer, path), TransferTotals(peer, path, 0, 0.0, 0))
            self._totals[peer, path] = TransferTotals(
                peer, path, known.nbytes + nbytes, known.seconds + seconds, known.transfers + 1
            )

    def timed(
        self, peer: str, path: str, copy: Callable[[Sequence[Any]], list[Any]], nbytes: int
    ) -> Callable[[Sequence[Any]], list[Any]]:
        """Wrap ``copy`` to add each successful call."""

        def timed(sources: Sequence[Any]) -> list[Any]:
            start = perf_counter()
            copied = copy(sources)
            self.note(peer, path, nbytes, perf_counter() - start)
            return copied

        return timed

    def take(self) -> list[TransferTotals]:
        """Return the totals since the last call, and reset them."""
        with self._lock:
            totals, self._totals = self._totals, {}
        return list(totals.values())
