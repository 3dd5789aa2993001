"""Manage the shards offered to this worker, while they are pulled and read.

Pulled shards land in the memory tiers of the worker, next to the data of its keys. A shard is stored live
only if no object has to be evicted for it, since a shard is read once, and the object might be read sooner.
Storing never waits for room, since the lowest tier is the disk.
"""

from __future__ import annotations

import gc
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

from dask.typing import Key

from dask_gpurt.device import Device
from dask_gpurt.device.pool import Buffer, Mapping
from dask_gpurt.exchange.paths import Path
from dask_gpurt.exchange.shard import ExchangeClosed, RunKey, Shard
from dask_gpurt.memory.admission import reservation
from dask_gpurt.memory.ledger import SHARDS, NoRoom, Tier
from dask_gpurt.memory.reading import BufferAndMemo
from dask_gpurt.memory.serialize import Raw, raw_frames
from dask_gpurt.memory.store import TieredBuffer
from dask_gpurt.observe import Fallback, Metrics

#: Seconds after which a thread that waits for a shard checks whether its run is still open.
RUN_CHECK_INTERVAL_S = 0.5


class ShardState(Enum):
    """Enumerate the states of an offered shard, by the place of its bytes."""

    PRODUCER = "in the producer's pool"
    MOVING = "being pulled"
    LANDED = "in this process"
    GONE = "nowhere any more"


class IncomingShard:
    """Track a shard that was offered to this worker. Thread-safe.

    ``path``: the path to its bytes, which the caller has held; it is let go when the producer's block is
    released.
    ``release``: called once, from any thread, when the producer may reuse the block.
    ``failed``: called with the error if the bytes cannot be read, to fail the run.
    """

    _keys = itertools.count()

    def __init__(
        self,
        run: RunKey,
        shard: Shard,
        path: Path,
        device: Device,
        landing: Landing,
        release: Callable[[Shard], None],
        failed: Callable[[Exception], None],
    ):
        self.run = run
        self.shard = shard
        self.path = path
        self.device = device
        self.key = f"gpurt-shard-{next(self._keys)}"
        self.state = ShardState.PRODUCER
        self.landing = landing
        self._release = release
        self._failed = failed
        self._lock = threading.Lock()
        self._readers = 0
        self._moving = False
        self._held = True
        #: Whether the bytes are in the landing.
        self._kept = False
        self._landed: Future[None] = Future()
        #: Done once the producer's block is released: nothing here reads it any more.
        self.let_go: Future[None] = Future()
        #: Memos of the table backend for each section, for reads in the producer's pool.
        self.memos: list[dict[str, Any]] = [{} for _ in shard.sections]
        self._fences: list[Callable[[], None]] = []

    def start_moving(self) -> bool:
        """Claim the move to this process; return False if it is in flight, done or too late."""
        with self._lock:
            if self.state is not ShardState.PRODUCER:
                return False
            self.state = ShardState.MOVING
            self._moving = True
            return True

    def land(self, put: Callable[[str], None]) -> None:
        """Complete the move: ``put`` stores the bytes in the landing under the given key."""
        put(self.key)
        with self._lock:
            self._moving = False
            in_vain = self.state is ShardState.GONE
            if not in_vain:
                self.state, self._kept = ShardState.LANDED, True
                self._forget()
            let_go = self._lets_go()
        if in_vain:
            self.landing.discard(self.key)
        if let_go:
            self._release_blocks()
        if not in_vain:
            with self._lock:  # it may have failed concurrently, because its producer closes
                if not self._landed.done():
                    self._landed.set_result(None)

    def fail(self, error: Exception) -> None:
        """Fail the move: readers raise the error, and the run is notified."""
        with self._lock:
            if not self._landed.done():
                self._landed.set_exception(error)
        self._failed(error)

    @contextmanager
    def staying(self, check: Callable[[], None]) -> Iterator[bool]:
        """Keep the bytes in place while the body runs. Blocks until a move in flight has ended.

        Yields whether the bytes have landed.
        Raises ExchangeClosed if the run is over.
        """
        while True:
            check()
            with self._lock:
                if self.state is ShardState.GONE:
                    raise ExchangeClosed(f"shard {self.shard.id} of {self.shard.producer.address} is gone")
                if self.state is not ShardState.MOVING:
                    self._readers += 1
                    landed = self.state is ShardState.LANDED
                    break
            try:
                self._landed.result(RUN_CHECK_INTERVAL_S)
            except TimeoutError:
                continue
        try:
            yield landed
        finally:
            with self._lock:
                self._readers -= 1
                let_go = self.state in (ShardState.LANDED, ShardState.GONE) and self._lets_go()
                unused = self._drops()
            self._end(let_go, unused)

    def source(self, which: int) -> Buffer:
        """Return the mapped bytes of a section in the producer's pool; valid while the shard is there."""
        assert self.path.mapping is not None
        section = self.shard.sections[which]
        return self.path.mapping.view(section.offset, section.nbytes)

    def sources(self) -> list[Buffer]:
        """Return the mapped bytes of all sections."""
        return [self.source(which) for which in range(len(self.shard.sections))]

    def discard(self) -> None:
        """Release a shard that is no longer needed, or leave that to its last reader.

        This does not wait for readers, since that could deadlock: a reader may be waiting for the pull of
        another shard, which needs this thread.
        """
        with self._lock:
            self.state = ShardState.GONE
            let_go, unused = self._lets_go(), self._drops()
        self._end(let_go, unused)
        self._forget()

    def _end(self, let_go: bool, unused: bool) -> None:
        """Release the producer's block and delete the landed bytes, if the caller has to."""
        if let_go:
            self._release_blocks()
        if unused:
            self._pass_fences()
            self.landing.discard(self.key)

    def abandon(self) -> None:
        """Release the shard, now or with its last reader. The caller ensures that no move or read starts."""
        with self._lock:
            self.state, self._moving = ShardState.GONE, False
            let_go = self._lets_go()
        if let_go:
            self._release_blocks()

    def _forget(self) -> None:
        self.memos = [{} for _ in self.shard.sections]

    def check_wanted(self) -> None:
        """Raise ExchangeClosed if the shard is no longer needed."""
        if self.state is ShardState.GONE:
            address = self.shard.producer.address
            raise ExchangeClosed(f"shard {self.shard.id} of {address} is no longer needed")

    def stop_moving(self) -> None:
        """Note that the mover does not read any more, whether the bytes have landed or not."""
        with self._lock:
            self._moving = False
            let_go = self.state is ShardState.GONE and self._lets_go()
        if let_go:
            self._release_blocks()

    def read_until(self, fence: Callable[[], None] | None) -> None:
        """Note that the device reads the bytes until ``fence`` has passed, even after the reader is done."""
        if fence is not None:
            self._fences.append(fence)

    def _pass_fences(self) -> None:
        # Each thread waits for all fences, since one that another thread is waiting for has not passed yet.
        for fence in list(self._fences):
            fence()

    def _lets_go(self) -> bool:
        """Return whether the caller must release the producer's block; True at most once. Under the lock."""
        held, self._held = self._held, self._held and (self._moving or self._readers > 0)
        return held and not self._held

    def _drops(self) -> bool:
        """Return whether the caller must delete the landed bytes; True at most once. Under the lock."""
        unused = self._kept and self.state is ShardState.GONE and not self._readers
        self._kept = self._kept and not unused
        return unused

    def _release_blocks(self) -> None:
        # Not under the lock, since waiting for a fence may take long, and the event loop takes the lock too.
        try:
            self._pass_fences()
            self._release(self.shard)
        except BaseException as error:
            self.let_go.set_exception(error)  # so that nothing waits for it forever
            raise
        finally:
            self.path.let_go()
        self.let_go.set_result(None)


@contextmanager
def reading(
    wanted: Sequence[tuple[IncomingShard, int]], landing: Landing, check: Callable[[], None], task: Key
) -> Iterator[list[tuple[Buffer, dict[str, Any]]]]:
    """Yield the bytes of sections, each with its memo, and keep them in place while the body runs. Blocks.

    Raises ExchangeClosed if the run is over.
    """
    with ExitStack() as stack:
        incoming_shards = {incoming for incoming, _ in wanted}
        landed = {incoming for incoming in incoming_shards if stack.enter_context(incoming.staying(check))}
        sections = ((p.key, which) for p, which in wanted if p in landed)
        found = stack.enter_context(landing.reading(sections, task))
        try:
            yield [
                found[incoming.key, which]
                if incoming in landed
                else (incoming.source(which), incoming.memos[which])
                for incoming, which in wanted
            ]
        finally:
            drop_pages(incoming_shards - landed)


def drop_pages(read: Iterable[IncomingShard]) -> None:
    """Drop the pages of peers' pools, after a read, from the resident set of this process. Blocks.

    Dask pauses and kills workers by the memory that the system reports, and in time each worker reads the
    pools of all its peers.
    """
    spans: dict[Mapping, tuple[int, int]] = {}
    for incoming in read:
        mapping = incoming.path.mapping
        if mapping is None:
            continue
        for section in incoming.shard.sections:
            start, stop = spans.get(mapping, (section.offset, 0))
            spans[mapping] = min(start, section.offset), max(stop, section.offset + section.nbytes)
    # One call for each mapping: hardly any page between these shards is mapped, so covering them is cheap.
    for mapping, (start, stop) in spans.items():
        mapping.drop_pages(start, stop - start)


class Landing:
    """Store pulled shards by key. Thread-safe; not for the event loop.

    ``main``: the kind of device that holds their top tier.
    """

    def __init__(self, tiered_buffer: TieredBuffer, main: str, metrics: Metrics):
        self._tiered_buffer = tiered_buffer
        self._main = main
        self._metrics = metrics

    def put(
        self,
        key: str,
        shard: Shard,
        sources: Sequence[Any],
        device: Device,
        bring: Callable[[Sequence[Any]], list[Any]],
    ) -> None:
        """Store the bytes of a shard, live or in a lower tier.

        ``sources``: the bytes of each section, mapped or in memory of this process.
        ``bring``: copies them into buffers of ``device``; may raise MemoryError.
        Raises OSError if no tier has room.
        """
        home = self._home(device.kind)
        priority = (math.inf, min(shard.places(), default=0))
        if self._tiered_buffer.reservations.try_reserve(key, shard.nbytes, home):
            try:
                self._tiered_buffer.store(key, Raw(bring(sources)), SHARDS, home=home, priority=priority)
                return
            except MemoryError:
                self._metrics.fallback(Fallback.EXCHANGE_SPILLED_ON_ARRIVAL, "the device is out of memory")
            finally:  # on any error; if it was stored, the reservation has been used
                self._tiered_buffer.reservations.cancel(key)
        try:
            tier = self._tiered_buffer.store_below(
                key, raw_frames(sources), SHARDS, home=home, priority=priority
            )
        except NoRoom as error:
            raise OSError(f"no tier has room for the shards that this worker has pulled: {error}") from error
        self._metrics.add("memory.spill.bytes.{from}.{to}", shard.nbytes, "exchange", str(tier))

    def _home(self, kind: str) -> Tier:
        return Tier.DEVICE if kind == self._main else Tier.HOST

    def keeps(self, nbytes: int, coming: int, kind: str) -> bool:
        """Return whether shards will probably stay live until they are read.

        They have to take at most half of the tier. If an object had to be evicted for them, they would be
        stored in a lower tier instead (see :meth:`put`).

        ``nbytes``: bytes of the shards together.
        ``coming``: bytes of those that have not landed yet.
        """
        reservations, home = self._tiered_buffer.reservations, self._home(kind)
        return reservations.leaves_half(nbytes, home) and (not coming or reservations.has_room(coming, home))

    def make_room(self) -> None:
        """Spill all live objects on the device that are not in use, for a task that has run out of memory."""
        # The traceback of the failed task holds its intermediate results, in reference cycles.
        gc.collect()
        self._tiered_buffer.spill(self._tiered_buffer.live_bytes(Tier.DEVICE))

    @contextmanager
    def reading(self, wanted: Iterable[tuple[str, int]], task: Key) -> Iterator[dict[Any, BufferAndMemo]]:
        """Yield sections of shards for the table backend, and keep them in place while the body runs."""
        with self._tiered_buffer.reading(wanted, reservation(task)) as found:
            yield found

    def discard(self, key: str) -> None:
        """Delete a shard."""
        self._tiered_buffer.discard(key)
