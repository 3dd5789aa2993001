"""Track the runs that are active on a worker: the producers that have ended their part, unclaimed shards.

An owner releases what it was offered, sooner if it is asked to make room. A shard that it does not hold, and
will not be offered, would fill the pool for good, while producers wait for its room. The protocol excludes
that; should it fail to, the run of the shard is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from dask_gpurt.exchange.shard import Peer, RunKey

#: The most runs that are not active for which producers are remembered: their offers may be late.
MAX_INACTIVE = 1024
#: Seconds for which an owner has to answer that it holds none of the shards that were published for it.
UNCLAIMED_PATIENCE_S = 20.0
#: Identifies a published shard: the kind of its device, its id, and the share.
Published = tuple[str, int, int]


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


class UnclaimedShards:
    """Compare published shards with the answers of their owners. On the event loop."""

    def __init__(self) -> None:
        self._tell: dict[RunKey, Callable[[str], None]] = {}
        #: The shards that an owner has not held since a time, by owner.
        self._unclaimed: dict[str, tuple[Mapping[Published, RunKey], float]] = {}

    def begins(self, run: RunKey, tell: Callable[[str], None]) -> None:
        """Watch the shards of a run; ``tell`` is called with an owner that does not know of some."""
        self._tell[run] = tell

    def ends(self, run: RunKey) -> None:
        """Watch a run no more: it withdraws its shards. Idempotent."""
        self._tell.pop(run, None)

    def answers(self, owner: str, unclaimed: Mapping[Published, RunKey], now: float) -> None:
        """Note the answer of an owner that was asked for room.

        ``unclaimed``: the shards that are published for it, each with its run, if it holds none; else none of
        them. Some may just be on their way.
        ``now``: the time in seconds.
        """
        before, since = self._unclaimed.pop(owner, (unclaimed, now))
        still = {shard: run for shard, run in unclaimed.items() if shard in before}
        if not still:
            still, since = dict(unclaimed), now
        if now - since < UNCLAIMED_PATIENCE_S:
            self._unclaimed[owner] = still, since
            return
        for run in set(still.values()) & self._tell.keys():
            self._tell[run](owner)

    def forget(self, owner: str) -> None:
        """Forget a worker that has left."""
        self._unclaimed.pop(owner, None)
