"""Run one worker's end of the exchange: its pools, its paths to peers, and the shards offered to it.

Coroutines run on the worker's event loop, everything that copies in the threads of ``executor``. Peers call
the handlers in the section "what peers call", mostly through their :class:`PeerRequests`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial, wraps
from typing import Any

from dask_gpurt._version import __version__
from dask_gpurt.config import Settings
from dask_gpurt.dask_hooks import PatchSet
from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.device import PoolFull
from dask_gpurt.exchange.calls import Calls, is_exiting, off_on
from dask_gpurt.exchange.comms import Comms, Puller
from dask_gpurt.exchange.incoming import IncomingShard, Landing, ShardState
from dask_gpurt.exchange.outgoing import HostRoom, PoolHooks
from dask_gpurt.exchange.paths import Endpoint, Path, Peers, peer_class
from dask_gpurt.exchange.pools import ActiveRuns, Pools, PoolUsers
from dask_gpurt.exchange.requests import PeerRequests
from dask_gpurt.exchange.shard import ExchangeClosed, Peer, PeerLost, RunKey, Shard
from dask_gpurt.frames import ChunkTable, Table, backend_for, chunk_table
from dask_gpurt.memory.peer_copies import Loan
from dask_gpurt.memory.store import TieredBuffer
from dask_gpurt.observe import Metrics
from dask_gpurt.observe.progress import RecentRuns
from dask_gpurt.protocol import (
    DRAIN_HANDLER,
    FETCH_HANDLER,
    FORGET_HANDLER,
    MAKE_ROOM_HANDLER,
    RELEASE_HANDLER,
    TICKET_HANDLER,
    is_off,
)

logger = logging.getLogger(__name__)

#: Seconds between checks whether a pool is idle and can return its memory.
TRIM_INTERVAL_S = 10.0
#: Seconds for which a producer counts as short of room after it has asked for room.
PRESSURE_LASTS_S = 1.0
#: Threads that copy: several, since copies over a fast link are too short for one to keep it busy.
COPY_THREADS = 4


class Exchange:
    """Publish, receive and release shards: one worker's end of all transfers.

    ``tiered_buffer``: the destination of pulled shards.
    """

    def __init__(
        self,
        worker: WorkerServer,
        pools: Pools,
        tiered_buffer: TieredBuffer,
        settings: Settings,
        metrics: Metrics,
    ):
        self.worker = worker
        self.me = Peer.begin(worker.address)
        self.settings = settings
        self.metrics = metrics
        self.pools = pools
        self.host_room = HostRoom(worker, pools.trim_host, pools.drain_host, metrics, self.offload)
        self.landing = Landing(tiered_buffer, pools.main, metrics)
        self.recent_runs = RecentRuns()
        self.calls = Calls(worker, metrics)
        endpoint = Endpoint(self.me, worker, pools, self.calls, metrics, self.offload)
        self.peers = Peers(endpoint, settings.exchange.paths, self._close_soon)
        self.comms = Comms(endpoint)
        self.executor = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="gpurt-comm")
        self.requests = PeerRequests(endpoint, self)
        hooks = PoolHooks(self._goes_on, self._is_read, self.requests.ask_for_room, self.host_room.ask)
        self.pools.serve(hooks)
        inflight = settings.exchange.inflight
        self.puller = Puller(endpoint, inflight, self.comms, self._tell_in_flight)
        self._incoming: defaultdict[Peer, set[IncomingShard]] = defaultdict(set)
        self._asked: dict[Peer, float] = {}
        self._publishing: set[RunKey] = set()
        self._receiving = ActiveRuns()
        #: The runs without outputs left to read here.
        self._read: set[RunKey] = set()
        #: Called on the event loop with the numbers of publishing runs and of pulls in flight.
        self.in_flight: Callable[[int, int], None] = _ignore
        self.closed = False
        self._users = PoolUsers(worker.address)
        self._patches, self._off = PatchSet(), off_on(worker)
        self._patches.add_handlers(
            worker.handlers,
            {
                TICKET_HANDLER: self.until_closed(self.ticket),
                FETCH_HANDLER: self.until_closed(self.comms.serve),
                RELEASE_HANDLER: self.release,
                DRAIN_HANDLER: self.drain,
                FORGET_HANDLER: self.forget,
            },
            off=self._off,
        )
        self._patches.add_handlers(worker.handlers, {MAKE_ROOM_HANDLER: self.host_room.make_room}, off=is_off)

    def __repr__(self) -> str:
        states = {
            f"{producer.address} ({producer.incarnation})": dict(Counter(one.state.name for one in shards))
            for producer, shards in list(self._incoming.items())
            if shards
        }
        return f"<Exchange of {self.me.address}, shards offered by {states}>"

    # ---- active runs -----------------------------------------------------------------

    def run_begins(self, run: RunKey) -> None:
        """Note that a run starts to publish and to receive on this worker."""
        self._publishing.add(run)
        self._receiving.begins(run)
        self._tell_in_flight()

    def _goes_on(self, run: RunKey) -> bool:
        """Return whether a run is active, so that it may need its published blocks again. From any thread."""
        return run in self._receiving

    def run_is_read(self, run: RunKey, is_read: bool) -> None:
        """Note whether a run has no outputs left to read here."""
        if is_read:
            self._read.add(run)
        else:
            self._read.discard(run)

    def _is_read(self, run: RunKey) -> bool:
        """Return whether a run currently neither publishes nor reads here. From any thread."""
        return run in self._read and run not in self._publishing

    def run_published(self, run: RunKey) -> None:
        """Note that a run has published all of its shards here. Idempotent."""
        if run in self._publishing:
            self._publishing.remove(run)
            self._tell_in_flight()

    def run_ends(self, run: RunKey) -> None:
        """Note that a run has ended on this worker. Idempotent."""
        self.run_published(run)
        self._read.discard(run)
        self._receiving.ends(run)  # its blocks are no longer retained from here on
        self.pools.end(run)

    def _tell_in_flight(self) -> None:
        self.in_flight(len(self._publishing), self.puller.under_way)

    def table(self, frame: Any) -> Table:
        """Return the backend for a frame; see :func:`~dask_gpurt.frames.backend_for`."""
        return backend_for(frame, self.pools.device)

    def chunk_table(self, library: str) -> ChunkTable:
        """Return the backend for chunks; see :func:`~dask_gpurt.frames.chunk_table`."""
        return chunk_table(library, self.pools.device)

    def pool_bytes(self, kind: str) -> int:
        """Return the capacity of a device's pool, which is created on first use. Blocks."""
        return self.pools.outbox(kind).pool.capacity

    # ---- reading ---------------------------------------------------------------------

    async def path(self, shard: Shard) -> Path:
        """Return the path along which an offered shard will be read.

        Raises PeerLost if its producer has left.
        """
        return await self.peers.path(shard.producer, shard.device)

    def take(
        self, run: RunKey, shard: Shard, path: Path, failed: Callable[[Exception], None]
    ) -> IncomingShard:
        """Accept an offered shard, and start to pull it unless it can be read in place. Does not block.

        Raises ExchangeClosed if the run has ended here, or on the producer, which may have reused the block.
        Raises PeerLost if the producer has left.
        """
        if not self._receiving.takes_from(shard.producer, run):
            address = shard.producer.address
            raise ExchangeClosed(f"shard {shard.id} of {address} was offered after the end of its run")
        device = self.pools.device(shard.device)
        if not path.hold():  # nothing below raises, and the incoming shard releases it
            raise PeerLost(f"worker {shard.producer.address} has left")
        release = partial(self._release_soon, path)
        incoming = IncomingShard(run, shard, path, device, self.landing, release, failed)
        self._incoming[shard.producer].add(incoming)
        headers = sum(len(section.header) for section in shard.sections)
        peer = peer_class(self.me.address, shard.producer.address)
        self.metrics.add("exchange.bytes.{path}", shard.nbytes + headers, path.name, peer)
        self.metrics.add("exchange.shards.{path}", 1, path.name, peer)
        pressed = (
            self.worker.loop.time() - self._asked.get(shard.producer, -PRESSURE_LASTS_S) < PRESSURE_LASTS_S
        )
        if pressed or not path.in_place:
            self.puller.pull_soon(incoming)
        return incoming

    def refuse(self, shard: Shard) -> None:
        """Release a shard that is not accepted, so that its producer can free it."""
        self.requests.release_soon(shard.producer, shard.device, shard.id, shard.share)

    # ---- releasing -------------------------------------------------------------------

    def _release_soon(self, path: Path, shard: Shard) -> None:
        """Release a shard at its producer. From any thread."""
        self.requests.release_soon(shard.producer, shard.device, shard.id, shard.share)

    def discard(self, incoming_shards: Iterable[IncomingShard]) -> None:
        """Release incoming shards that are no longer needed, those being read with their last reader. Blocks.

        Raises Exception: the first error, after an attempt to release each of them.
        """
        errors: list[Exception] = []
        for incoming in incoming_shards:
            try:
                incoming.discard()
            except Exception as error:
                errors.append(error)
            # It stays listed until its last reader is done, so that `forget` waits for that reader.
            incoming.let_go.add_done_callback(partial(self._unlist, incoming))
        if errors:
            raise errors[0]

    def _unlist(self, incoming: IncomingShard, _: object) -> None:
        self._incoming[incoming.shard.producer].discard(incoming)

    def discard_soon(self, incoming_shards: Iterable[IncomingShard]) -> None:
        """Release incoming shards in a thread of the exchange."""
        with contextlib.suppress(ExchangeClosed):  # a closed exchange has released them
            self._submit(self.discard, incoming_shards).add_done_callback(_log_failure)

    # ---- what peers call -------------------------------------------------------------

    async def ticket(self, kind: str, to: str | None) -> dict[str, Any]:
        """Return a ticket with which a peer maps the pool of incarnation ``to`` of this worker."""
        reply = {"version": __version__, "incarnation": self.me.incarnation, "ticket": None}
        if kind in self.pools.devices and to in (None, self.me.incarnation):
            # Off the event loop: that of a GPU's pool takes a CUDA call.
            reply["ticket"] = await self.offload(lambda: self.pools.outbox(kind).pool.ticket())
        return reply

    def release(self, kind: str, shards: Sequence[Sequence[int]], to: str) -> None:
        """Handle the release of shards of incarnation ``to``, given as pairs of a shard and a share."""
        if to == self.me.incarnation:
            self.pools.known(kind).release((shard, share) for shard, share in shards)
            self.requests.note_released()
        else:  # for a former worker at this address, whose shard ids mean nothing here
            self.metrics.add("exchange.messages.stale")

    def drain(self, producer: list[str]) -> None:
        """Make room in the pool of a producer: pull the shards that were left there to be read in place."""
        peer = Peer(*producer)
        self._asked[peer] = self.worker.loop.time()
        self.metrics.add("exchange.drains")
        for incoming in sorted(tuple(self._incoming[peer]), key=lambda incoming: incoming.shard.id):
            self.puller.pull_soon(incoming)

    async def forget(self, producer: list[str], run: list[Any]) -> None:
        """Handle the end of a producer's part of a run.

        Returns once none of its shards is being read, nor will be. If the run is still active here, because
        only the producer closes, shards that have not landed are lost.
        """
        peer, key = Peer(*producer), (run[0], run[1])
        self._receiving.withdraws(peer, key)  # its offers may still be in flight
        incoming_shards = [incoming for incoming in list(self._incoming[peer]) if incoming.run == key]
        for incoming in incoming_shards:
            if incoming.state in (ShardState.PRODUCER, ShardState.MOVING):
                incoming.fail(PeerLost(f"worker {peer.address} has ended its part of {key}"))
        # Landed shards are copies of our own. Gone ones may still have readers in the producer's pool.
        await self._release_and_wait(
            incoming for incoming in incoming_shards if incoming.state is not ShardState.LANDED
        )

    async def forget_shares(self, producer: str, run: RunKey, shares: Collection[int]) -> None:
        """Release the shards of shares that have been replaced; return once none of them is being read."""
        # Copies of the sets, since threads remove released shards from them concurrently.
        mine = [
            (peer, incoming)
            for peer, incoming_shards in self._incoming.items()
            for incoming in list(incoming_shards)
        ]
        await self._release_and_wait(
            incoming
            for peer, incoming in mine
            if peer.address == producer and incoming.run == run and incoming.shard.share in shares
        )

    async def _release_and_wait(self, which: Iterable[IncomingShard]) -> None:
        incoming_shards = list(which)
        with contextlib.suppress(ExchangeClosed):
            await self.offload(self.discard, incoming_shards)
            # Only the reader knows when it is done: a comm is still sending from the producer's pool long
            # after it has accepted a message, and mapped pools are read without the producer.
            waiting = [asyncio.wrap_future(incoming.let_go) for incoming in incoming_shards]
            await asyncio.gather(*waiting, return_exceptions=True)  # errors are raised at their origin

    # ---- life ------------------------------------------------------------------------

    async def offload(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a blocking function in a thread of this exchange; raise ExchangeClosed if it is too late."""
        done = asyncio.wrap_future(self._submit(function, *args))
        try:
            await asyncio.wait([done])
        finally:
            done.cancel()  # a no-op if it is done
        if done.cancelled():  # `close` has dropped it from the queue
            raise ExchangeClosed(f"the exchange of {self.worker.address} is closed")
        return done.result()

    def _submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Submit a function to the threads; raise ExchangeClosed if the exchange is closed."""
        try:
            if not self.closed:
                return self.executor.submit(function, *args)
        except RuntimeError:
            # Race: `close` has shut the executor down in another thread, or the interpreter has done so.
            if not (self.closed or is_exiting()):
                raise
        raise ExchangeClosed(f"the exchange of {self.worker.address} is closed")

    def on_worker_removed(self, address: str) -> None:
        """Forget a worker that has left the cluster; a new one at the same address is unrelated to it."""
        self.peers.forget(address)
        self.calls.on_worker_removed(address)
        for peer in [peer for peer in self._asked if peer.address == address]:
            del self._asked[peer]
        for peer in list(self._incoming):
            if peer.address == address and not self._incoming[peer]:
                del self._incoming[peer]

    async def run_housekeeping(self) -> None:
        """Free idle memory. Called periodically."""
        with contextlib.suppress(ExchangeClosed):
            await self.offload(self.pools.trim_idle)

    def _close_soon(self, close: Callable[[], None]) -> None:
        try:
            self._submit(close).add_done_callback(_log_failure)
        except ExchangeClosed:
            close()

    def in_use(self) -> AbstractContextManager[None]:
        """Keep the pools while a task publishes or assembles in the body; see :meth:`PoolUsers.using`."""
        return self._users.using()

    def lend(self, nbytes: int) -> Loan:
        """Lend a block of the device's pool for the copy of an object that a peer fetches. Blocks.

        Raises PoolFull if the pool has no room, or is being closed.
        """
        with ExitStack() as ending:
            try:
                ending.enter_context(self.in_use())
            except ExchangeClosed as error:
                raise PoolFull(nbytes) from error
            outbox = self.pools.outbox(self.pools.main)
            block = outbox.allocate(nbytes)
            ending.callback(outbox.take_back, block)
            return Loan(block, outbox.pool, ending.pop_all().close)

    def stop(self, timeout_s: float = 0.0) -> bool:
        """End all transfers, and wait for tasks that use memory of the pools. Blocks.

        Returns whether no task uses the pools any more.
        """
        self.closed = True
        self._users.close()
        self.pools.wake()
        self.host_room.close()
        self._patches.restore()
        self.executor.shutdown(cancel_futures=True)
        for incoming in [
            incoming
            for incoming_shards in list(self._incoming.values())
            for incoming in list(incoming_shards)
        ]:
            incoming.abandon()  # otherwise its mapping would stay open
        # Dask remembers which handlers are coroutines, and with them this object. The list would keep runs.
        self._incoming.clear()
        return self._users.wait(timeout_s)

    def close(self) -> None:
        """Release memory, mappings and files, which no task may use any more. Blocks."""
        self.stop()
        self.peers.close()
        self.pools.close()

    def until_closed(self, handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Return a handler that replies as if it were called later if this exchange closes meanwhile."""

        @wraps(handler)
        async def answer(**message: Any) -> Any:
            try:
                return await handler(**message)
            except ExchangeClosed:
                return self._off()

        return answer


def _log_failure(done: Future[Any]) -> None:
    """Log the error of a call that nothing waits for."""
    if not done.cancelled() and (error := done.exception()) is not None:
        logger.error("the exchange failed to release a shard or a mapping", exc_info=error)


def _ignore(runs: int, pulls: int) -> None:
    """Do nothing."""
