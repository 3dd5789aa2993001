"""Pull shards, out of mapped pools or through Dask's comms: owners fetch them, producers serve them.

Coroutines run on the event loop, copies in threads of the exchange.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from distributed.protocol.serialize import to_serialize
from distributed.utils import nbytes as size_of

from dask_gpurt.dask_hooks.worker import call_soon
from dask_gpurt.device import Block, Device, DirectComms, PoolFull
from dask_gpurt.device.base import direct_comms
from dask_gpurt.device.libraries import is_device_buffer
from dask_gpurt.device.pool import Buffer
from dask_gpurt.exchange.incoming import IncomingShard, ShardState, drop_pages
from dask_gpurt.exchange.paths import COMMS, Endpoint
from dask_gpurt.exchange.shard import ExchangeClosed, PeerLost, RunKey
from dask_gpurt.memory.waits import WaitLine
from dask_gpurt.observe import Fallback
from dask_gpurt.protocol import FETCH_HANDLER


class Comms:
    """Fetch shards from peers, and serve the fetches of peers."""

    def __init__(self, endpoint: Endpoint):
        self._end = endpoint
        self._protocol = endpoint.me.address.partition("://")[0]
        #: The copies in the pool in host memory, made or in the making, by kind of device, shard and share.
        self._copies: dict[tuple[str, int, int], tuple[RunKey, asyncio.Task[dict[str, Any] | None]]] = {}

    def _direct(self, device: Device) -> DirectComms | None:
        """Return the device if this worker's comms can send its buffers directly, else None."""
        return direct_comms(device, self._protocol)

    # ---- fetching ----------------------------------------------------------------------

    async def fetch(self, incoming: IncomingShard) -> dict[str, Any]:
        """Fetch a shard from its producer.

        Returns the reply, for :meth:`unpacked`.
        Raises PeerLost if the producer no longer has the shard, or has left.
        Raises ExchangeClosed if the shard is no longer needed.
        """
        shard = incoming.shard
        producer = shard.producer
        start = perf_counter()
        reply: dict[str, Any] | None = await self._end.calls.call(
            producer.address,
            FETCH_HANDLER,
            check=incoming.check_wanted,
            awaited_by=lambda: incoming.run,
            kind=shard.device,
            shard=shard.id,
            share=shard.share,
            run=list(incoming.run),
            staged_for=None if incoming.path.staging is None else self._end.me.address,
            to=producer.incarnation,
        )
        if reply is None:  # Dask's reply to an unknown operation
            raise PeerLost(f"the runtime was switched off at worker {producer.address}")
        if reply["data"] is None:
            raise PeerLost(f"worker {producer.address} no longer has shard {shard.id}")
        if not reply["staged"]:  # without the time in which the peer copied
            seconds = perf_counter() - start - reply["seconds"]
            self._end.traffic.note(producer.address, COMMS, sum(map(size_of, reply["data"])), seconds)
        return reply

    def unpacked(self, incoming: IncomingShard, reply: dict[str, Any]) -> list[Any]:
        """Return the sections of a fetched shard. Staged ones are valid until it is released. Blocks."""
        sizes = [section.nbytes for section in incoming.shard.sections]
        if reply["staged"]:
            assert incoming.path.staging is not None
            return list(map(incoming.path.staging.view, reply["staged"]["offsets"], sizes))
        whole = [received(data) for data in reply["data"]]
        # An inproc comm passes the producer's own memory, which the producer will reuse.
        return [np.array(data) for data in whole] if self._protocol == "inproc" else whole

    def bring(self, device: Device, reply: dict[str, Any]) -> Callable[[Sequence[Any]], list[Buffer]]:
        """Return the function that copies fetched sections into buffers of a device."""
        direct = self._direct(device)
        return device.from_host if direct is None or reply["staged"] else direct.from_comm

    # ---- serving -----------------------------------------------------------------------

    async def serve(
        self,
        kind: str,
        shard: int,
        share: int,
        run: list[Any],
        staged_for: str | None,
        to: str,
    ) -> dict[str, Any]:
        """Handle a fetch: return the bytes of a shard published by incarnation ``to``.

        If possible, the block in the pool is sent without a copy, since it is not reused before the peer has
        released it.

        ``staged_for``: the address of the peer if it maps this worker's pool in host memory, else None.
        Returns, under "staged", the place of the sections in that pool; otherwise, under "data", the
        sections; and the "seconds" it took.
        """
        start = perf_counter()
        key = (run[0], run[1])
        if to != self._end.me.incarnation:
            self._end.metrics.add("exchange.messages.stale")
            return {"data": None}
        outbox = self._end.pools.known(kind)
        blocks = outbox.view(shard, share)
        if blocks is None:
            return {"data": None}
        device = self._end.pools.device(kind)
        staged = None
        if staged_for:
            copy = partial(self._copy, device, blocks, key, share, staged_for)
            staged = await self._staged((kind, shard, share), key, copy)
        data: list[Any] = []
        if staged is None:
            data = await self._end.offload(self._sendable, device, blocks)
        if outbox.view(shard, share) is None:  # released meanwhile, or its run has ended
            if staged is not None:
                self._end.pools.known("host").release([(staged["shard"], share)])
            return {"data": None}
        return {
            "data": [to_serialize(one) for one in data],
            "staged": staged,
            "seconds": perf_counter() - start,
        }

    async def _staged(
        self, which: tuple[str, int, int], run: RunKey, copy: Callable[[], dict[str, Any] | None]
    ) -> dict[str, Any] | None:
        """Return a shard's copy in the pool in host memory; None if that has no room.

        A repeated fetch gets the same copy: its owner does not know of an earlier one, and would free only
        one of them.
        """
        if (known := self._copies.get(which)) is None:
            known = self._copies[which] = run, asyncio.ensure_future(self._end.offload(copy))
        _, copying = known
        try:
            return await asyncio.shield(copying)
        finally:
            if copying.done() and _result(copying) is None and self._copies.get(which) is known:
                del self._copies[which]  # the next fetch tries again

    def release(self, kind: str, shards: Iterable[tuple[int, int]]) -> None:
        """Free the copies of shards that their owners have released, given as pairs of a shard and a share.

        An owner releases a shard once it does not read it any more, so it does not read the copy either.
        """
        for shard, share in shards:
            if (known := self._copies.pop((kind, shard, share), None)) is not None:
                known[1].add_done_callback(partial(self._free, share))

    def _free(self, share: int, copying: asyncio.Future[dict[str, Any] | None]) -> None:
        if (staged := _result(copying)) is not None:
            self._end.pools.known("host").release([(staged["shard"], share)])

    def _copy(
        self, device: Device, blocks: Sequence[Block], run: RunKey, share: int, peer: str
    ) -> dict[str, Any] | None:
        """Copy a shard into the pool in host memory; return None if that has no room. Blocks."""
        outbox = self._end.pools.outbox("host")
        copies: list[Block] = []
        try:
            for block in blocks:
                copies.append(outbox.allocate(block.nbytes))
            into = [[copy.buffer] for copy in copies]
            device.scatter([block.buffer for block in blocks], into, ordered=False)()
        except (PoolFull, MemoryError) as error:
            for copy in copies:
                outbox.give_back(copy)
            reason = f"the pool in host memory has no room: {error}"
            self._end.metrics.fallback(Fallback.EXCHANGE_COMMS, reason)
            return None
        return {
            "shard": outbox.publish(run, share, peer, copies, is_copy=True),
            "offsets": [copy.offset for copy in copies],
        }

    def _sendable(self, device: Device, blocks: Sequence[Block]) -> list[Any]:
        if (direct := self._direct(device)) is not None:
            return [direct.for_comm(block.buffer) for block in blocks]
        return [memoryview(device.to_host(block.buffer)) for block in blocks]

    def forget(self, run: RunKey) -> None:
        """Forget a run that is over; its copies are freed with its other blocks."""
        self._copies = {which: known for which, known in self._copies.items() if known[0] != run}


def _result(copying: asyncio.Future[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return a copy that is complete; None if there was no room or it has failed."""
    return None if copying.cancelled() or copying.exception() is not None else copying.result()


def received(data: Any) -> Buffer | np.ndarray:
    """Return a buffer received through a comm, as bytes."""
    if is_device_buffer(data):
        return data
    return np.frombuffer(memoryview(data).cast("B"), np.uint8)


# ---- pulls -------------------------------------------------------------------------------------------


#: Shared by all steps while no trace is recorded.
_NOT_RECORDED = contextlib.nullcontext()


class Puller:
    """Pull shards out of mapped pools, in threads, or through Dask's comms.

    ``inflight``: the bytes in flight beyond which no further pull begins. The last one may exceed them.
    ``changed``: called on the event loop whenever a pull starts or ends.
    """

    def __init__(self, endpoint: Endpoint, inflight: int, comms: Comms, changed: Callable[[], None]):
        self._end = endpoint
        self._inflight = inflight
        self._line: WaitLine[str] = WaitLine("bytes in flight", endpoint.metrics.lines)
        self._comms = comms
        self._changed = changed
        #: The number of pulls in flight, and their bytes.
        self.under_way = self.nbytes = 0

    def __repr__(self) -> str:
        return f"<Puller, {self.under_way} shards of {self.nbytes} B are being pulled>"

    def pull_soon(self, incoming: IncomingShard) -> bool:
        """Start to pull a shard; return False if it is already being pulled, has landed or is gone."""
        if begins := incoming.start_moving():
            call_soon(self._end.worker, self._pull, incoming)
        return begins

    async def _pull(self, incoming: IncomingShard) -> None:
        try:
            await self._line.reserve_or_wait_async(incoming.key, partial(self._may_begin, incoming.key))
            if incoming.state is not ShardState.GONE:
                await self._pull_now(incoming)
                return
        except Exception as error:
            if incoming.state is not ShardState.GONE:  # otherwise its run is over, and nothing reads it
                incoming.fail(error)
        with contextlib.suppress(ExchangeClosed):  # a closed exchange has released it
            await self._end.offload(incoming.stop_moving)  # in a thread, since it may wait for a device

    async def _may_begin(self, key: str) -> bool:
        return self._line.first in (None, key) and self.nbytes < self._inflight

    async def _pull_now(self, incoming: IncomingShard) -> None:
        nbytes = incoming.shard.nbytes
        self.nbytes += nbytes
        self._end.metrics.peak("exchange.inflight.peak", self.nbytes)
        try:
            with self._pulling():
                if incoming.path.mapping is None:
                    await self._pull_fetched(incoming)
                else:
                    with self._end.metrics.seconds("exchange.seconds.pulling"):
                        await self._end.offload(self._pull_mapped, incoming)
        finally:
            self.nbytes -= nbytes
            self._line.wake_first()

    async def _pull_fetched(self, incoming: IncomingShard) -> None:
        began = perf_counter()
        reply = await self._comms.fetch(incoming)
        self._record_fetch(incoming, began)
        await self._end.offload(self._land_fetched, incoming, reply)

    def _record_fetch(self, incoming: IncomingShard, began: float) -> None:
        if (recording := self._end.metrics.recording) is not None:
            shard = incoming.shard
            recording.waited("fetch", began, bytes=shard.nbytes, producer=shard.producer.address)

    def _pull_mapped(self, incoming: IncomingShard) -> None:
        shard = incoming.shard
        address = shard.producer.address
        copy = self._end.traffic.timed(address, incoming.path.name, incoming.device.land, shard.nbytes)
        try:
            with self._recorded(incoming):
                self._land(incoming, incoming.sources(), copy)
        finally:
            drop_pages([incoming])
        self._end.metrics.add("exchange.pulled.bytes", incoming.shard.nbytes)

    def _land_fetched(self, incoming: IncomingShard, reply: dict[str, Any]) -> None:
        with self._recorded(incoming):
            sources = self._comms.unpacked(incoming, reply)
            self._land(incoming, sources, self._comms.bring(incoming.device, reply))
        if staged := reply["staged"]:
            assert incoming.path.staging is not None
            for offset, section in zip(staged["offsets"], incoming.shard.sections, strict=True):
                incoming.path.staging.drop_pages(offset, section.nbytes)

    def _recorded(self, incoming: IncomingShard) -> AbstractContextManager[None]:
        """Record the body as a pull, if a trace is being recorded."""
        if (recording := self._end.metrics.recording) is None:
            return _NOT_RECORDED
        shard = incoming.shard
        return recording.span(
            "pull",
            shard=shard.name,
            bytes=shard.nbytes,
            path=incoming.path.name,
            producer=shard.producer.address,
        )

    def _land(
        self, incoming: IncomingShard, sources: Sequence[Any], bring: Callable[[Sequence[Any]], list[Any]]
    ) -> None:
        incoming.land(lambda key: incoming.landing.put(key, incoming.shard, sources, incoming.device, bring))

    @contextlib.contextmanager
    def _pulling(self) -> Iterator[None]:
        self.under_way += 1
        self._changed()
        try:
            yield
        finally:
            self.under_way -= 1
            self._changed()
