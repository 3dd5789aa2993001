"""The links from peers to this worker: what the scheduler's topology says, and what transfers here show.

A link is asked for when something may come over it: what all workers know together grows with the pairs
that are in use, not with those that there are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from dask_gpurt.topology import Link, Speed
from dask_gpurt.topology.links import BETWEEN_HOSTS

#: Seconds until the scheduler is asked again about a peer of which it knew nothing.
ASK_AGAIN = 10.0
#: Bytes that count as seen at the usual speed before any transfer, and the latest that count at all.
PRIOR, WINDOW = 2**20, 2**26


class Known(NamedTuple):
    """A class of link, and its usual speed."""

    link: Link
    speed: Speed


class Shown:
    """The bandwidth of a link as transfers over it show, each next to others.

    Unlike an average of the topology it is one of few bytes: a run that begins on a slow link is not to be
    over before that is known.

    Parameters
    ----------
    usual
        What is taken for it beforehand.
    """

    def __init__(self, usual: Speed):
        self._latency = usual.latency
        self._bytes, self._seconds = float(PRIOR), PRIOR / usual.bandwidth

    def observe(self, nbytes: int, seconds: float) -> None:
        """Take a transfer."""
        scale = WINDOW / max(WINDOW, self._bytes + nbytes)
        self._bytes = scale * (self._bytes + nbytes)
        self._seconds = scale * (self._seconds + max(seconds - self._latency, seconds / 2))

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self._bytes / self._seconds


class Links:
    """Links by peer. On the event loop.

    Parameters
    ----------
    worker
        The Dask worker.
    """

    def __init__(self, worker: Any):
        self._worker = worker
        self._known: dict[str, Known] = {}
        self._asked: dict[str, float] = {}
        self._shown: dict[str, Shown] = {}

    def known(self, peers: Iterable[str]) -> dict[str, Known]:
        """The links of those peers that are known; the scheduler is asked for others."""
        found = {peer: self._known.get(peer) for peer in peers}
        if missing := self._to_ask(peer for peer, known in found.items() if known is None):
            self._worker._ongoing_background_tasks.call_soon(self._ask, missing)
        return {peer: known for peer, known in found.items() if known is not None}

    async def learn(self, peer: str) -> Known | None:
        """The link of a peer, None where the scheduler does not know it."""
        if peer not in self._known and (missing := self._to_ask([peer])):
            await self._ask(missing)
        return self._known.get(peer)

    def _to_ask(self, peers: Iterable[str]) -> list[str]:
        now = self._worker.loop.time()
        missing = [peer for peer in peers if now - self._asked.get(peer, -ASK_AGAIN) >= ASK_AGAIN]
        self._asked.update(dict.fromkeys(missing, now))
        return missing

    async def _ask(self, peers: list[str]) -> None:
        with contextlib.suppress(OSError):  # then there are more urgent worries
            answer = await self._worker.scheduler.gpurt_links(worker=self._worker.address, peers=peers)
            for peer, (link, bandwidth, latency) in (answer or {}).items():
                self._known[peer] = Known(Link(link), Speed(bandwidth, latency))

    def forget(self, peers: Collection[str]) -> None:
        """These have left."""
        for peer in peers:
            for kept in (self._known, self._asked, self._shown):
                kept.pop(peer, None)

    # ---- what transfers show -----------------------------------------------------------

    def observe(self, peer: str, nbytes: int, seconds: float) -> None:
        """A transfer from a peer over the network is over."""
        known = self._known.get(peer)
        if known is not None and nbytes > 0 and seconds > 0:
            self._shown.setdefault(peer, Shown(known.speed)).observe(nbytes, seconds)

    def bandwidth_between_hosts(self, peer: str) -> float | None:
        """Bytes per second from a peer on another host as far as is known by now, None of any other."""
        known = self._known.get(peer)
        if known is None or known.link not in BETWEEN_HOSTS:
            return None
        shown = self._shown.get(peer)
        return shown.bandwidth if shown else known.speed.bandwidth
