"""Publish blocks of this worker's pool to the owners that may read them.

A producer that finds the pool full waits here. A full pool cannot deadlock: the waiting producer holds no
unpublished block, and owners can always free published ones. They copy shards that they would read in place
into their own memory, in the worst case to disk, and so never wait for a pool. Blocks of which no
owner knows, since their offers have failed, are withdrawn: their run has failed too.

Decisions and their figures: ``docs/decisions/shuffle.md``.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from distributed.comm.addressing import get_address_host

from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.dask_hooks.worker import is_closing
from dask_gpurt.device import Block, Pool
from dask_gpurt.device.host import SHM, no_room
from dask_gpurt.device.pool import PoolFull, SharedMemoryFull
from dask_gpurt.exchange.shard import RunKey
from dask_gpurt.memory.waits import WaitLine
from dask_gpurt.observe import Fallback, Metrics

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


class Reading(NamedTuple):
    """Name an owner that may read a published shard, for one of its shares."""

    run: RunKey
    shard: int
    share: int
    owner: str


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
        self._hooks.ask_for_room(self.readers())

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

    def readings(self) -> list[Reading]:
        """Return the owners that may still read shards, by shard."""
        with self._changed:
            return [
                Reading(entry.run, shard, share, owner)
                for shard, entry in self._entries.items()
                for share, owner in entry.readers.items()
            ]

    def readers(self) -> set[str]:
        """Return the owners that may still read any shard."""
        return {each.owner for each in self.readings()}

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


# ---- room in the memory of the host --------------------------------------------------------------------
#
# Share /dev/shm among the pools of all workers of a host.
#
# A pool has a capacity, and allocates memory only as blocks need it. The pools of a host may have more
# capacity together than the host has memory, since workers may join later. So a block may fit into its pool
# while the system has no memory for it. Its producer then waits as if the pool were full. This cannot
# deadlock:
#
# 1. A waiting producer holds no unpublished block. The allocated memory of the pools of a host belongs to
#    free blocks, to published blocks, and to blocks that other producers are packing, which publish them or
#    wait next.
# 2. While a producer waits, there is a round twice a second: all workers of the host return the memory of
#    free blocks, and ask the owners of all their published blocks to copy them. Owners need no pool for
#    that, since the copies can go to disk. So published blocks become free, and the next round returns
#    their memory. A worker that is stopped does not delay the others: each has a limited time to reply.
# 3. A waiting producer without published blocks needs no signal, since it retries each round.
# 4. Memory that other producers take in the meantime goes into blocks that are published in turn, and their
#    number is bounded by the number of inputs. A run that fails, and a worker that dies, return all of
#    theirs.
#
# So as long as a worker of the host holds memory, the memory is returned, or its run fails and ends the
# wait. Once no worker holds any, /dev/shm is filled by other programs, for which producers wait a limited
# time.

#: Seconds for which a producer waits while /dev/shm is full without any worker of this cluster using it.
FOREIGN_PATIENCE_S = 20.0
#: Seconds after which the result of the last round is stale.
ROUND_FORGOTTEN_S = 5.0
#: Blocks above this many bytes are halved before their task fails, since the halves may find room.
SMALLEST_BLOCK = 2**16


class HostFull(PoolFull):
    """The host has no memory for a block that its pool has room for, and waiting is futile.

    ``nbytes``: the requested size.
    ``advice``: the message.
    """

    def __init__(self, nbytes: int, advice: str):
        super().__init__(nbytes)
        self.args = (nbytes, advice)  # as unpickling calls it
        self.advice = advice

    def __str__(self) -> str:
        return self.advice


class HostRoom:
    """Ask the workers of a host to make room for a producer of this one.

    ``give_back``: returns the memory of free blocks of this worker's pool, and the bytes still in use.
    Blocks.
    ``drain``: asks the owners of this worker's published blocks to copy them; must not block.
    """

    def __init__(
        self,
        worker: WorkerServer,
        give_back: Callable[[], int],
        drain: Callable[[], None],
        metrics: Metrics,
        offload: Callable[..., Awaitable[Any]],
    ):
        self._worker = worker
        self._give_back = give_back
        self._drain = drain
        self._metrics = metrics
        self._offload = offload
        self._asking = False
        self._closed = False
        #: Time since which rounds have found no worker that uses memory, and time of the last round.
        self._foreign_since: float | None = None
        self._last_round = time.monotonic()

    def __repr__(self) -> str:
        since = self._foreign_since
        full = (
            "" if since is None else f", full of other programs' files for {time.monotonic() - since:.1f} s"
        )
        return f"<HostRoom, {'a round' if self._asking else 'no round'} for room in progress{full}>"

    def ask(self, nbytes: int) -> None:
        """Start a round for a block of this many bytes. From any thread; does not block.

        Raises HostFull if waiting is futile, but smaller blocks might fit.
        Raises SharedMemoryFull if waiting is futile and the block is small.
        """
        now = time.monotonic()
        if now - self._last_round > ROUND_FORGOTTEN_S:
            self._foreign_since = None
        # Start a round even if waiting is futile, so that this finding stays fresh. Otherwise every further
        # task, and every retry, would wait as long as the first.
        self._worker.loop.add_callback(self._round)
        if self._foreign_since is not None and now - self._foreign_since > FOREIGN_PATIENCE_S:
            if nbytes > SMALLEST_BLOCK:
                raise HostFull(nbytes, no_room(nbytes))
            raise SharedMemoryFull(no_room(nbytes))

    async def _round(self) -> None:
        if self._asking or self._closed:
            return
        self._asking = True
        self._metrics.fallback(Fallback.EXCHANGE_SHM_FULL, f"{SHM} is full")
        try:
            # If the scheduler is unreachable, the next round asks it, or this worker closes.
            with contextlib.suppress(OSError):
                host = get_address_host(self._worker.address)
                # A scheduler on which the runtime has been switched off replies None.
                self._note(await self._worker.scheduler.gpurt_host_room(host=host) or {})
        finally:
            self._asking = False

    def _note(self, held: Mapping[str, int | None]) -> None:
        """Record the bytes that the workers of this host still use, None for those that have not told."""
        now = time.monotonic()
        if self._worker.address not in held or any(nbytes != 0 for nbytes in held.values()):
            self._foreign_since = None
        elif self._foreign_since is None:
            self._foreign_since = now
        self._last_round = now

    def close(self) -> None:
        """Start no further rounds. From any thread."""
        self._closed = True

    async def make_room(self) -> int:
        """Handle a round of a worker of this host; return the bytes that this worker still uses."""
        if is_closing(self._worker):
            return 0
        self._drain()
        held: int = await self._offload(self._give_back)
        return held
