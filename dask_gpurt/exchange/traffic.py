"""Total transfers by peer and path between two reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

#: The most pairs of a peer and a path in one report; transfers beyond that are not counted.
MAX_PEERS = 64
#: Pseudo-path of shards that are read in place, which takes no copy and counts no time.
IN_PLACE = "in-place"


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
