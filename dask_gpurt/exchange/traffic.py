"""Sum transfers by peer and path, until the sums are reported."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

#: Peers and paths between two reports; transfers of more are left out.
MAX_PEERS = 64
#: In the place of a path, of shards that are read where they lie: nothing is copied, and it takes no time.
IN_PLACE = "in-place"


class TransferTotals(NamedTuple):
    """Hold the sums of transfers from one peer over one path."""

    peer: str
    path: str
    nbytes: int
    seconds: float
    transfers: int


class Traffic:
    """Sum transfers by peer and path. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[tuple[str, str], TransferTotals] = {}

    def note(self, peer: str, path: str, nbytes: int, seconds: float) -> None:
        """Add a transfer that has ended."""
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
        """Return ``copy`` as a function that adds each call that succeeds."""

        def timed(sources: Sequence[Any]) -> list[Any]:
            start = perf_counter()
            copied = copy(sources)
            self.note(peer, path, nbytes, perf_counter() - start)
            return copied

        return timed

    def take(self) -> list[TransferTotals]:
        """Return the sums since the last call, and begin new ones."""
        with self._lock:
            totals, self._totals = self._totals, {}
        return list(totals.values())
