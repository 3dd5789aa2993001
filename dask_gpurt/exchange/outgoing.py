"""Publish blocks of this worker's pool, which owners may read.

A producer that finds the pool full waits here. It holds no block that no owner knows of, and
owners can always make room: they copy the shards that they had left in place into their own
memory, at last to disk, so they never wait for a pool. This is why a full pool cannot deadlock.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from dask_gpurt.device import Block, Pool, PoolFull
from dask_gpurt.exchange.shard import RunKey
from dask_gpurt.observe import Metrics

#: Seconds after which a producer that still waits tries, and asks the owners, again.
ROOM_RETRY_INTERVAL_S = 0.5


#: The share of copies that are made for one reader, and are of no use to any other.
COPIED = -1


@dataclass
class _Publication:
    run: RunKey
    blocks: tuple[Block, ...]
    #: The addresses of the owners that may read them, by share.
    readers: dict[int, str]


class Outbox:
    """Keep the published blocks of one pool, by shard id. Thread-safe.

    Blocks that all readers have let go of are *retained* for as long as their run goes on and nothing else
    needs their room: should a reader be lost, another one is offered them again. A pool does not grow beside
    them once all has been read here: memory that was never used is slower than memory that was.

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
        self._entries: dict[int, _Publication] = {}
        #: Those without readers, the oldest first.
        self._retained: dict[int, _Publication] = {}
        #: The runs that go on of which blocks were freed that others could be offered.
        self._gone: set[RunKey] = set()
        #: Runs of which blocks came or went since the last look.
        self._busy: set[RunKey] = set()
        #: Whether blocks of a run may be read once more. Called under the lock, from any thread.
        self.retains: Callable[[RunKey], bool] = _never
        #: Whether retained blocks of a run make room for what is cut now, also where the pool has other room.
        #: Called as the one before.
        self.yields: Callable[[RunKey], bool] = _never
        self._ids = itertools.count()
        self._changed = threading.Condition()
        #: The producers that wait for room.
        self.waiting = 0
        #: Counts blocks that came back, so that a producer cannot miss one.
        self.freed = 0

    def allocate(self, nbytes: int) -> Block:
        """Cut a block, if need be where retained blocks are; or raise PoolFull."""
        self._reclaim(nbytes, self.yields)
        while True:
            try:
                block = self.pool.allocate(nbytes)
                break
            except PoolFull:
                if not self._reclaim(nbytes, _always):
                    raise
        self._metrics.peak("exchange.pool.peak", self.pool.used)
        return block

    def give_back(self, block: Block) -> None:
        """Free a block that was never published.

        This is not room that a producer waits for: it may be what its own attempt gave back.
        """
        self.pool.free(block)

    def publish(self, run: RunKey, share: int, owner: str, blocks: Iterable[Block]) -> int:
        """Hand the blocks of a shard over to the owner of a share; return the id of the shard."""
        entry = _Publication(run, tuple(blocks), {share: owner})
        with self._changed:
            shard = next(self._ids)
            self._entries[shard] = entry
            self._busy.add(run)
        return shard

    def publish_again(self, shards: Iterable[int], share: int, owner: str) -> bool:
        """Offer shards to the owner of another share too; False, and nothing done, when one is gone."""
        with self._changed:
            found = [self._entries.get(shard) or self._retained.get(shard) for shard in shards]
            if not all(found):
                return False
            for shard, entry in zip(shards, found, strict=True):
                assert entry is not None
                entry.readers[share] = owner
                self._entries[shard] = entry
                self._retained.pop(shard, None)
            return True

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
            self.waiting += 1
            try:
                check()
                if self.freed == seen:
                    self._ask_for_room(self._readers())
                    self._changed.wait(ROOM_RETRY_INTERVAL_S)
                check()
            finally:
                self.waiting -= 1

    def view(self, shard: int) -> tuple[Block, ...] | None:
        """Return the blocks of a shard that is still published."""
        with self._changed:
            entry = self._entries.get(shard)
        return entry.blocks if entry else None

    def release(self, shards: Iterable[tuple[int, int]]) -> None:
        """Note that owners are done with shards.

        Parameters
        ----------
        shards
            Each with the share that needs it no more; unknown ones are ignored.
        """
        with self._changed:
            for shard, share in shards:
                if (entry := self._entries.get(shard)) and entry.readers.pop(share, None) is not None:
                    self._left(shard, share)

    def _left(self, shard: int, share: int) -> None:
        """Retain or free a block that a reader has left, if that was the last. Under the lock."""
        entry = self._entries[shard]
        if entry.readers:
            return
        del self._entries[shard]
        self._busy.add(entry.run)
        if share != COPIED and self.retains(entry.run):
            self._retained[shard] = entry
            self._notify(1)  # a producer that waits for room takes it
        else:
            self._free([entry])

    def has_all(self, run: RunKey) -> bool:
        """Return whether all that was published in a run that goes on is still there to be offered."""
        with self._changed:
            return run not in self._gone

    def owners(self, run: RunKey) -> set[str]:
        """Return the owners that may still read blocks of a run."""
        with self._changed:
            mine = (entry for entry in self._entries.values() if entry.run == run)
            return {owner for entry in mine for owner in entry.readers.values()}

    def shares(self, run: RunKey) -> dict[int, str]:
        """Return the shares of a run whose blocks may still be read, each with its owner."""
        with self._changed:
            mine = (entry for entry in self._entries.values() if entry.run == run)
            return {
                share: owner for entry in mine for share, owner in entry.readers.items() if share != COPIED
            }

    def readers(self) -> set[str]:
        """Return the owners that may still read any block."""
        with self._changed:
            return self._readers()

    def _readers(self) -> set[str]:
        return {owner for entry in self._entries.values() for owner in entry.readers.values()}

    def drop(self, run: RunKey, owner: str) -> None:
        """Note that an owner will not read any more what a run had published for it."""
        self._drop(run, lambda share, reader: reader == owner)

    def drop_shares(self, run: RunKey, shares: Collection[int]) -> None:
        """Note that nothing reads what a run had published for these shares, since their owners have left."""
        self._drop(run, lambda share, reader: share in shares)

    def _drop(self, run: RunKey, leaves: Callable[[int, str], bool]) -> None:
        with self._changed:
            for shard, entry in list(self._entries.items()):
                if entry.run == run:
                    for share in [share for share, reader in entry.readers.items() if leaves(share, reader)]:
                        del entry.readers[share]
                        self._left(shard, share)

    def end(self, run: RunKey) -> None:
        """Free what was retained of a run."""
        with self._changed:
            ended = [shard for shard, entry in self._retained.items() if entry.run == run]
            self._free([self._retained.pop(shard) for shard in ended])
            self._busy.discard(run)
            self._gone.discard(run)

    def _reclaim(self, nbytes: int, of: Callable[[RunKey], bool]) -> bool:
        """Free this many bytes of the oldest retained blocks of some runs; False when there are none."""
        if not self._retained:  # as most often; should one come at this moment, the pool grows by a block
            return False
        with self._changed:
            oldest, found = [], 0
            for shard, entry in self._retained.items():
                if found >= nbytes:
                    break
                if of(entry.run):
                    oldest.append(shard)
                    found += sum(block.nbytes for block in entry.blocks)
            self._drop_retained(oldest)
        self._metrics.add("exchange.retained.reclaimed", found)
        return bool(oldest)

    def reclaim_idle(self) -> None:
        """Free what is retained of runs of which nothing came or went since the last call."""
        with self._changed:
            idle = [shard for shard, entry in self._retained.items() if entry.run not in self._busy]
            self._drop_retained(idle)
            self._busy.clear()

    def reclaim_all(self) -> None:
        """Free all that is retained."""
        with self._changed:
            self._drop_retained(list(self._retained))

    def _drop_retained(self, shards: Iterable[int]) -> None:
        """Free what is retained of runs that go on. Under the lock."""
        dropped = [self._retained.pop(shard) for shard in shards]
        self._gone.update(entry.run for entry in dropped)
        self._free(dropped)

    @property
    def retained(self) -> int:
        """Return the bytes that are retained."""
        with self._changed:
            return sum(block.nbytes for entry in self._retained.values() for block in entry.blocks)

    def _free(self, entries: list[_Publication]) -> None:
        for entry in entries:
            for block in entry.blocks:
                self.pool.free(block)
        if entries:
            self._notify(len(entries))

    def _notify(self, freed: int) -> None:
        self.freed += freed
        self._changed.notify_all()

    def wake(self) -> None:
        """Let waiting producers look again, because a run has ended."""
        with self._changed:
            self._changed.notify_all()


def _never(run: RunKey) -> bool:
    return False


def _always(run: RunKey) -> bool:
    return True
