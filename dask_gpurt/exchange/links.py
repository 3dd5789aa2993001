"""The links from peers to this worker: what the scheduler's topology says, and what transfers here show.

A link is asked for when something may come over it: what all workers know together grows with the pairs
that are in use, not with those that there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from dask_gpurt.observe.estimators import WindowedRatio
from dask_gpurt.topology import SHIPPED, Link, Speed
from dask_gpurt.topology.links import BETWEEN_HOSTS, WITHIN_HOST

#: Seconds until the scheduler is asked again about a peer of which it knew nothing.
UNKNOWN_PEER_RETRY_S = 10.0
#: Bytes that count as seen at the usual speed before any transfer, and the latest that count at all.
PRIOR_BYTES, WINDOW_BYTES = 2**20, 2**26


class LinkEstimate(NamedTuple):
    """A class of link, and its usual speed."""

    link: Link
    speed: Speed


class MeasuredBandwidth:
    """The bandwidth that transfers show, all those together that are under way at a time.

    Unlike an average of the topology it is one of few bytes: a run that begins on a slow link is not to be
    over before that is known. And it is that of a worker, which has about one processor to compress with,
    not what a transfer gets next to others.

    Parameters
    ----------
    usual
        What is taken for it beforehand.
    """

    def __init__(self, usual: Speed):
        self._latency = usual.latency
        self._seconds_per_byte = WindowedRatio(PRIOR_BYTES / usual.bandwidth, PRIOR_BYTES, WINDOW_BYTES)
        self._until = -math.inf

    def observe(self, nbytes: int, begin: float, end: float) -> None:
        """Take a transfer that is over, later than those before; seconds by any clock."""
        seconds = end - max(begin, self._until)
        if begin >= self._until:
            seconds = max(seconds - self._latency, seconds / 2)
        self._until = end
        self._seconds_per_byte.observe(seconds, nbytes)

    @property
    def bandwidth(self) -> float:
        """Return bytes per second."""
        return self._seconds_per_byte.inverse


class Links:
    """Links by peer. On the event loop.

    Parameters
    ----------
    worker
        The Dask worker.
    """

    def __init__(self, worker: Any):
        self._worker = worker
        self._known: dict[str, LinkEstimate] = {}
        #: By class, where bytes come another way than over the link that is between two workers.
        self._classes: dict[Link, Speed] = dict(SHIPPED)
        self._asked: dict[str, float] = {}
        self._missing: set[str] = set()
        self._asking: asyncio.Task[None] | None = None
        self._shown: dict[Link, MeasuredBandwidth] = {}

    def known(self, peers: Collection[str]) -> dict[str, LinkEstimate]:
        """The links of those peers that are known; the scheduler is asked for others."""
        self._ask_soon(peers)
        return {peer: self._known[peer] for peer in peers if peer in self._known}

    async def learn(self, peer: str) -> LinkEstimate | None:
        """The link of a peer, None where the scheduler does not know it."""
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
            await asyncio.sleep(0)  # who else is asked about in this turn goes along
            peers, self._missing = list(self._missing), set()
            await self._ask(peers)

    async def _ask(self, peers: list[str]) -> None:
        with contextlib.suppress(OSError):  # then there are more urgent worries
            answer = await self._worker.scheduler.gpurt_links(worker=self._worker.address, peers=peers)
            if answer is not None:  # which is what one says on which the runtime has been switched off
                for peer, (link, *figures) in answer["links"].items():
                    self._known[peer] = LinkEstimate(Link(link), Speed(*figures))
                self._classes.update({Link(link): Speed(*known) for link, known in answer["classes"].items()})

    async def refresh(self) -> None:
        """Ask again about peers on this host: where there are several paths, it is from there."""
        if near := [peer for peer, known in self._known.items() if known.link in WITHIN_HOST]:
            await self._ask(near)

    def speed_from(self, peer: str) -> Callable[[Link], Speed]:
        """How fast classes of link are on the way from a peer."""
        known = self._known.get(peer)
        return lambda link: known.speed if known and known.link is link else self._classes[link]

    def forget(self, peers: Collection[str]) -> None:
        """These have left."""
        for peer in peers:
            self._known.pop(peer, None)
            self._asked.pop(peer, None)

    # ---- what transfers show -----------------------------------------------------------

    def observe(self, peer: str, nbytes: int, begin: float, end: float) -> None:
        """A transfer from a peer is over, the last so far; from when to when, by any clock."""
        if (known := self._known.get(peer)) is not None:
            self._shown.setdefault(known.link, MeasuredBandwidth(known.speed)).observe(nbytes, begin, end)

    def shown(self, peer: str) -> bool:
        """Whether there has been a transfer over such a link as joins a peer."""
        return peer in self._known and self._known[peer].link in self._shown

    def bandwidth_between_hosts(self, peer: str) -> float | None:
        """Bytes per second from other hosts as far as is known by now, None where a peer is on none."""
        known = self._known.get(peer)
        if known is None or known.link not in BETWEEN_HOSTS:
            return None
        shown = self._shown.get(known.link)
        return shown.bandwidth if shown else known.speed.bandwidth
