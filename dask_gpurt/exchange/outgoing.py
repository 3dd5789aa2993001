"""Publish blocks of this worker's pool to the owners that may read them.

A producer that finds the pool full waits here. A full pool cannot deadlock: the waiting producer holds no
unpublished block, and owners can always free published ones. They copy shards that they would read in place
into their own memory, in the worst case to disk, and so never wait for a pool. Blocks of which no
owner knows, since their offers have failed, are withdrawn: their run has failed too. `UnclaimedShards`
watches that.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from dask_gpurt.device import Block, Pool, PoolFull
from dask_gpurt.exchange.shard import RunKey
from dask_gpurt.memory.waits import WaitLine
from dask_gpurt.observe import Metrics

#: Seconds after which a waiting producer retries, and asks the owners again.
ROOM_RETRY_INTERVAL_S = 0.5


def _never(run: RunKey) -> bool:
    return False


def _ignore(what: object) -> None:
    """Ask nobody."""


@dataclass
class _Publication:
    run: RunKey
    blocks: tuple[Block, ...]
    #: The addresses of the owners that may read them, by share.
    readers: dict[int, str]


@dataclass(frozen=True)
class PoolHooks:
    """Hold what the pools of a worker ask of its exchange. All are called from any thread; none may block.

    ``retains``: returns whether blocks of a run may be read again. Called under an outbox's lock, as
    ``yields`` is.
    ``yields``: returns whether retained blocks of a run are reused even if the pool has other room.
    ``ask_for_room``: called from waiting producers with the owners whose shards fill the pool.
    ``ask_host``: called from waiting producers with the size of a block that the host has no memory for.
    """

    retains: Callable[[RunKey], bool] = _never
    yields: Callable[[RunKey], bool] = _never
    ask_for_room: Callable[[set[str]], None] = _ignore
    ask_host: Callable[[int], None] = _ignore


class Outbox:
    """Hold the published blocks of one pool, by shard id. Thread-safe.

    Blocks that all readers have released are *retained* while their run is active and their room is not
    needed: if a reader is lost, they can be offered to another one. Once a run has read all of its outputs
    on this worker, its retained blocks are reused before the pool grows, since memory that is touched for the
    first time is slower.
    """

    def __init__(self, pool: Pool, hooks: PoolHooks, metrics: Metrics):
        self.pool = pool
        self._hooks = hooks
        self._metrics = metrics
        self._entries: dict[int, _Publication] = {}
        #: Retained blocks, which have no readers, the oldest first.
        self._retained: dict[int, _Publication] = {}
        #: Active runs of which retained blocks were freed, so that they cannot be offered again.
        self._gone: set[RunKey] = set()
        #: Runs that published or released blocks since the last `reclaim_idle`.
        self._busy: set[RunKey] = set()
        self._ids = itertools.count()
        #: The producers that wait, woken by each freed block.
        self.room: WaitLine[str] = WaitLine("room in the exchange pool", metrics.lines)
        self._changed = self.room.changed

    def __repr__(self) -> str:
        with self._changed:
            entries = list(self._entries.values())
        used, capacity = self.pool.used, self.pool.capacity
        owners = Counter(owner for entry in entries for owner in set(entry.readers.values()))
        runs = Counter(f"{shuffle}[{run_id}]" for shuffle, run_id in (entry.run for entry in entries))
        return (
            f"<Outbox, {len(self.room.waiting)} producers wait for room, {used} B of {capacity} used, "
            f"shards to be released by {dict(sorted(owners.items()))}, of {dict(sorted(runs.items()))}>"
        )

    def allocate(self, nbytes: int) -> Block:
        """Allocate a block, reclaiming retained blocks if necessary; raise PoolFull if that fails."""
        self._reclaim(nbytes, self._hooks.yields)
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

        This does not wake waiting producers, since a producer may be freeing the blocks of its own attempt.
        """
        self.pool.free(block)

    def take_back(self, block: Block) -> None:
        """Free a block that was allocated for something else than a shard, and wake waiting producers."""
        with self._changed:
            self.pool.free(block)
            self.room.wake()

    def publish(self, run: RunKey, share: int, owner: str, blocks: Iterable[Block]) -> int:
        """Publish the blocks of a shard to the owner of a share; return the id of the shard."""
        entry = _Publication(run, tuple(blocks), {share: owner})
        with self._changed:
            shard = next(self._ids)
            self._entries[shard] = entry
            self._busy.add(run)
        return shard

    def publish_again(self, shards: Iterable[int], share: int, owner: str) -> bool:
        """Publish shards to the owner of another share too; return False, without effect, if one is gone."""
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
        """Ask for room, and block until a block is freed or it is time to retry.

        ``nbytes``: size of the block that did not fit.
        ``seen``: the value of ``room.wakes`` before the failed attempt.
        ``check``: raises if the run is over.
        Raises PoolFull if the block is larger than the whole pool.
        """
        if nbytes > self.pool.capacity:
            raise PoolFull(nbytes)
        request = f"{nbytes} B for {threading.current_thread().name}"
        with self._metrics.seconds("exchange.seconds.waiting-for-room"):
            check()
            self.room.wait(request, seen, ROOM_RETRY_INTERVAL_S, self._ask)
            check()

    def _ask(self) -> None:
        if short := self.pool.short:
            self._hooks.ask_host(short)
        self._hooks.ask_for_room(self._readers())

    def view(self, shard: int, share: int) -> tuple[Block, ...] | None:
        """Return the blocks of a shard; None if it is not published for this share any more."""
        with self._changed:
            entry = self._entries.get(shard)
            return entry.blocks if entry is not None and share in entry.readers else None

    def release(self, shards: Iterable[tuple[int, int]]) -> None:
        """Release shards on behalf of their owners.

        ``shards``: pairs of a shard and the share that no longer needs it; unknown pairs are ignored.
        """
        with self._changed:
            for shard, share in shards:
                if (entry := self._entries.get(shard)) and entry.readers.pop(share, None) is not None:
                    self._left(shard)

    def _left(self, shard: int) -> None:
        """Retain or free the blocks of a shard if its last reader has released it. Under the lock."""
        entry = self._entries[shard]
        if entry.readers:
            return
        del self._entries[shard]
        self._busy.add(entry.run)
        if self._hooks.retains(entry.run):
            self._retained[shard] = entry
            self.room.wake()  # a waiting producer may reclaim it
        else:
            self._free([entry])

    def has_all(self, run: RunKey) -> bool:
        """Return whether all published blocks of an active run still exist, and can be offered again."""
        with self._changed:
            return run not in self._gone

    def owners(self, run: RunKey) -> set[str]:
        """Return the owners that may still read blocks of a run."""
        with self._changed:
            mine = (entry for entry in self._entries.values() if entry.run == run)
            return {owner for entry in mine for owner in entry.readers.values()}

    def unread(self, run: RunKey, me: str) -> int:
        """Return the number of shards of a run that workers other than ``me`` may still read."""
        with self._changed:
            mine = (entry for entry in self._entries.values() if entry.run == run)
            return sum(any(owner != me for owner in entry.readers.values()) for entry in mine)

    def shares(self, run: RunKey) -> dict[int, str]:
        """Return the shares of a run whose blocks may still be read, each with its owner."""
        with self._changed:
            mine = (entry for entry in self._entries.values() if entry.run == run)
            return {share: owner for entry in mine for share, owner in entry.readers.items()}

    def readers(self) -> set[str]:
        """Return the owners that may still read any block."""
        with self._changed:
            return self._readers()

    def _readers(self) -> set[str]:
        return {owner for entry in self._entries.values() for owner in entry.readers.values()}

    def published(self, owner: str) -> dict[tuple[int, int], RunKey]:
        """Return the shards that an owner may still read, as pairs of shard and share, each with its run."""
        with self._changed:
            return {
                (shard, share): entry.run
                for shard, entry in self._entries.items()
                for share, reader in entry.readers.items()
                if reader == owner
            }

    def drop(self, run: RunKey, owner: str) -> None:
        """Release all shards of a run on behalf of an owner."""
        self._drop(run, lambda share, reader: reader == owner)

    def drop_shares(self, run: RunKey, shares: Collection[int]) -> None:
        """Release all shards of a run on behalf of these shares, whose owners will not read them."""
        self._drop(run, lambda share, reader: share in shares)

    def _drop(self, run: RunKey, leaves: Callable[[int, str], bool]) -> None:
        with self._changed:
            for shard, entry in list(self._entries.items()):
                if entry.run == run:
                    for share in [share for share, reader in entry.readers.items() if leaves(share, reader)]:
                        del entry.readers[share]
                        self._left(shard)

    def end(self, run: RunKey) -> None:
        """Free the retained blocks of a run that has ended."""
        with self._changed:
            ended = [shard for shard, entry in self._retained.items() if entry.run == run]
            self._free([self._retained.pop(shard) for shard in ended])
            self._busy.discard(run)
            self._gone.discard(run)

    def _reclaim(self, nbytes: int, of: Callable[[RunKey], bool]) -> bool:
        """Free the oldest retained blocks of some runs, of ``nbytes`` if possible; return False if none."""
        if not self._retained:  # the common case, without the lock; after a race the pool grows by a block
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
        """Free the retained blocks of runs that published and released nothing since the last call."""
        with self._changed:
            idle = [shard for shard, entry in self._retained.items() if entry.run not in self._busy]
            self._drop_retained(idle)
            self._busy.clear()

    def reclaim_all(self) -> None:
        """Free all retained blocks."""
        with self._changed:
            self._drop_retained(list(self._retained))

    def _drop_retained(self, shards: Iterable[int]) -> None:
        """Free retained blocks of active runs. Under the lock."""
        dropped = [self._retained.pop(shard) for shard in shards]
        self._gone.update(entry.run for entry in dropped)
        self._free(dropped)

    @property
    def retained(self) -> int:
        """Return the bytes of retained blocks."""
        with self._changed:
            return sum(block.nbytes for entry in self._retained.values() for block in entry.blocks)

    def _free(self, entries: list[_Publication]) -> None:
        for entry in entries:
            for block in entry.blocks:
                self.pool.free(block)
        if entries:
            self.room.wake()

    def wake(self) -> None:
        """Wake waiting producers, because a run has ended."""
        self.room.wake()


def _always(run: RunKey) -> bool:
    return True
