"""Track the runs that are active on a worker, and which producers have ended their part of them."""

from __future__ import annotations

from collections.abc import Iterator

from dask_gpurt.exchange.shard import Peer, RunKey

#: The most runs that are not active for which producers are remembered: their offers may be late.
MAX_INACTIVE = 1024


class ActiveRuns:
    """Hold the active runs, each with the producers that have ended their part of it.

    A producer may end its part before its first offer has arrived, with which the run begins here::

        producer: offers a shard ------------------------ arrives: the run begins
        producer: its part has failed ---- arrives: forget its shards

    The shard must not be accepted, since the producer may have reused its block. Changed on the event loop,
    read from any thread.
    """

    def __init__(self) -> None:
        self._active: dict[RunKey, set[Peer]] = {}
        #: The same for runs that have ended or have yet to begin here, the latest last.
        self._inactive: dict[RunKey, set[Peer]] = {}

    def begins(self, run: RunKey) -> None:
        """Note that a run begins to receive here."""
        self._active[run] = self._inactive.pop(run, set())

    def ends(self, run: RunKey) -> None:
        """Note that a run has ended here. Idempotent."""
        self._active.pop(run, None)

    def __contains__(self, run: object) -> bool:
        return run in self._active

    def __iter__(self) -> Iterator[RunKey]:
        return iter(list(self._active))

    def __len__(self) -> int:
        return len(self._active)

    def withdraws(self, producer: Peer, run: RunKey) -> None:
        """Note that a producer has ended its part of a run, which may have yet to begin here."""
        withdrawn = self._active.get(run)
        if withdrawn is None:
            withdrawn = self._inactive[run] = self._inactive.pop(run, set())
            if len(self._inactive) > MAX_INACTIVE:
                del self._inactive[next(iter(self._inactive))]
        withdrawn.add(producer)

    def takes_from(self, producer: Peer, run: RunKey) -> bool:
        """Return whether a run is active here, and a producer has not ended its part of it."""
        withdrawn = self._active.get(run)
        return withdrawn is not None and producer not in withdrawn
