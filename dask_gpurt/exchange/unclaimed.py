"""Watch the published shards that fill a pool while producers wait for its room.

An owner releases what it was offered, sooner if it is asked to make room. A shard that it does not hold, and
will not be offered, would fill the pool for good. The protocol excludes that; should it fail to, the run of
the shard is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dask_gpurt.exchange.shard import RunKey

#: Seconds for which an owner has to answer that it holds none of the shards that were published for it.
UNCLAIMED_PATIENCE_S = 20.0
#: Identifies a published shard: the kind of its device, its id, and the share.
Published = tuple[str, int, int]


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

        Parameters
        ----------
        unclaimed
            The shards that are published for it, each with its run, if it holds none; else none of them. Some
            may just be on their way.
        now
            The time in seconds.
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
