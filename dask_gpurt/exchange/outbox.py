"""What this worker has published: blocks of its pool that owners may read.

A producer that finds the pool full waits here. It never holds a block that nobody was told
of, and owners can always make room: they copy what they had left in place into their own
memory, which ends on disk and so never waits for a pool. This is why a full pool can not
deadlock.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dask_gpurt.device import Block, Pool, PoolFull
from dask_gpurt.exchange.shard import RunKey
from dask_gpurt.observe import Metrics

#: Seconds after which a producer that still waits tries, and asks the owners, again.
ASK_AGAIN = 0.5


@dataclass(frozen=True)
class _Entry:
    run: RunKey
    owner: str
    blocks: tuple[Block, ...]


class Outbox:
    """Published blocks of one pool, by shard id. Thread-safe.

    Parameters
    ----------
    pool
        Where blocks are cut from.
    ask_for_room
        Called from waiting producers with the owners whose shards fill the pool; must not
        block.
    """

    def __init__(
        self,
        pool: Pool,
        ask_for_room: Callable[[set[str]], None],
        metrics: Metrics,
    ):
        self.pool = pool
        self._ask_for_room = ask_for_room
        self._metrics = metrics
        self._entries: dict[int, _Entry] = {}
        self._ids = itertools.count()
        self._changed = threading.Condition()
        self._waiting = 0
        #: Counts blocks that came back, so that a producer can not miss one.
        self.freed = 0

    @property
    def under_pressure(self) -> bool:
        """Whether a producer waits for room."""
        return self._waiting > 0

    def allocate(self, nbytes: int) -> Block:
        """Cut a block, or raise PoolFull."""
        block = self.pool.allocate(nbytes)
        self._metrics.peak("exchange.pool.peak", self.pool.used)
        return block

    def give_back(self, block: Block) -> None:
        """Free a block that was never published.

        This is not room that a producer waits for: it may be what its own attempt gave back.
        """
        self.pool.free(block)

    def publish(self, run: RunKey, owner: str, blocks: Iterable[Block]) -> int:
        """Hand the blocks of a shard over to ``owner``; returns the id by which they are released."""
        entry = _Entry(run, owner, tuple(blocks))
        with self._changed:
            shard = next(self._ids)
            self._entries[shard] = entry
        return shard

    def wait_for_room(self, nbytes: int, seen: int, check: Callable[[], None]) -> None:
        """Ask for room and wait until a block comes back, or for a moment: then try again.

        Parameters
        ----------
        nbytes
            Size of the block that did not fit.
        seen
            ``freed`` from before the attempt.
        check
            Raises when waiting makes no sense any more.

        Raises
        ------
        PoolFull
            When the block does not fit into the whole pool.
        """
        if nbytes > self.pool.capacity:
            raise PoolFull(nbytes)
        with self._metrics.seconds("exchange.seconds.waiting-for-room"), self._changed:
            self._waiting += 1
            try:
                check()
                if self.freed == seen:
                    self._ask_for_room({entry.owner for entry in self._entries.values()})
                    self._changed.wait(ASK_AGAIN)
                check()
            finally:
                self._waiting -= 1

    def view(self, shard: int) -> tuple[Block, ...] | None:
        """The blocks of a shard that is still published."""
        with self._changed:
            entry = self._entries.get(shard)
        return entry.blocks if entry else None

    def release(self, shards: Iterable[int]) -> None:
        """Free blocks that their owners are done with; unknown ids are ignored."""
        with self._changed:
            self._free([self._entries.pop(shard) for shard in shards if shard in self._entries])

    def owners(self, run: RunKey) -> set[str]:
        """Who may still read blocks of a run."""
        with self._changed:
            return {entry.owner for entry in self._entries.values() if entry.run == run}

    def readers(self) -> set[str]:
        """Who may still read any block."""
        with self._changed:
            return {entry.owner for entry in self._entries.values()}

    def drop(self, run: RunKey, owner: str) -> None:
        """Free what a run had published for an owner who will not read it any more."""
        with self._changed:
            gone = [s for s, entry in self._entries.items() if (entry.run, entry.owner) == (run, owner)]
            self._free([self._entries.pop(shard) for shard in gone])

    def _free(self, entries: list[_Entry]) -> None:
        for entry in entries:
            for block in entry.blocks:
                self.pool.free(block)
        if entries:
            self.freed += len(entries)
            self._changed.notify_all()

    def wake(self) -> None:
        """Let waiting producers look again, because a run has ended."""
        with self._changed:
            self._changed.notify_all()
