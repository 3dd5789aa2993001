"""Pull shards, out of mapped pools or through Dask's comms: owners fetch them, producers serve them.

Coroutines run on the event loop, copies in threads of the exchange.

Decisions and their figures: ``docs/decisions/shuffle.md``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from distributed.protocol.serialize import to_serialize

from dask_gpurt.dask_hooks.worker import call_soon
from dask_gpurt.device import Block, Device, DirectComms
from dask_gpurt.device.base import direct_comms
from dask_gpurt.device.libraries import is_device_buffer
from dask_gpurt.device.pool import Buffer
from dask_gpurt.exchange.incoming import IncomingShard, ShardState, drop_pages
from dask_gpurt.exchange.paths import Endpoint
from dask_gpurt.exchange.shard import ExchangeClosed, PeerLost
from dask_gpurt.memory.waits import WaitLine
from dask_gpurt.protocol import FETCH_HANDLER


class Comms:
    """Fetch shards from peers, and serve the fetches of peers."""

    def __init__(self, endpoint: Endpoint):
        self._end = endpoint
        self._protocol = endpoint.me.address.partition("://")[0]

    def _direct(self, device: Device) -> DirectComms | None:
        """Return the device if this worker's comms can send its buffers directly, else None."""
        return direct_comms(device, self._protocol)

    # ---- fetching ----------------------------------------------------------------------

    async def fetch(self, incoming: IncomingShard) -> list[Any]:
        """Return the sections of a shard, fetched from its producer.

        Raises PeerLost if the producer no longer has the shard, or has left.
        Raises ExchangeClosed if the shard is no longer needed.
        """
        shard = incoming.shard
        producer = shard.producer
        reply: dict[str, Any] | None = await self._end.calls.call(
            producer.address,
            FETCH_HANDLER,
            check=incoming.check_wanted,
            awaited_by=lambda: incoming.run,
            kind=shard.device,
            shard=shard.id,
            share=shard.share,
            to=producer.incarnation,
        )
        if reply is None:  # Dask's reply to an unknown operation
            raise PeerLost(f"the runtime was switched off at worker {producer.address}")
        if reply["data"] is None:
            raise PeerLost(f"worker {producer.address} no longer has shard {shard.id}")
        return [received(section) for section in reply["data"]]

    def own(self, sections: list[Any]) -> list[Any]:
        """Return fetched sections in memory of their own. Blocks.

        An inproc comm passes the producer's memory, which the producer will reuse.
        """
        return [np.array(section) for section in sections] if self._protocol == "inproc" else sections

    def bring(self, device: Device) -> Callable[[Sequence[Any]], list[Buffer]]:
        """Return the function that copies fetched sections into buffers of a device."""
        direct = self._direct(device)
        return device.from_host if direct is None else direct.from_comm

    # ---- serving -----------------------------------------------------------------------

    async def serve(self, kind: str, shard: int, share: int, to: str) -> dict[str, Any]:
        """Handle a fetch: return the bytes of a shard published by incarnation ``to``.

        If possible, the block in the pool is sent without a copy, since it is not reused before the peer has
        released it.

        Returns, under "data", the sections, None if there are none any more.
        """
        if to != self._end.me.incarnation:
            self._end.metrics.add("exchange.messages.stale")
            return {"data": None}
        outbox = self._end.pools.known(kind)
        blocks = outbox.view(shard, share)
        if blocks is None:
            return {"data": None}
        data = await self._end.offload(self._sendable, self._end.pools.device(kind), blocks)
        if outbox.view(shard, share) is None:  # released meanwhile, or its run has ended
            return {"data": None}
        return {"data": [to_serialize(section) for section in data]}

    def _sendable(self, device: Device, blocks: Sequence[Block]) -> list[Any]:
        if (direct := self._direct(device)) is not None:
            return [direct.for_comm(block.buffer) for block in blocks]
        return [memoryview(device.to_host(block.buffer)) for block in blocks]


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
        sections = await self._comms.fetch(incoming)
        self._record_fetch(incoming, began)
        await self._end.offload(self._land_fetched, incoming, sections)

    def _record_fetch(self, incoming: IncomingShard, began: float) -> None:
        if (recording := self._end.metrics.recording) is not None:
            shard = incoming.shard
            recording.waited("fetch", began, bytes=shard.nbytes, producer=shard.producer.address)

    def _pull_mapped(self, incoming: IncomingShard) -> None:
        try:
            with self._recorded(incoming):
                self._land(incoming, incoming.sources(), incoming.device.land)
        finally:
            drop_pages([incoming])
        self._end.metrics.add("exchange.pulled.bytes", incoming.shard.nbytes)

    def _land_fetched(self, incoming: IncomingShard, sections: list[Any]) -> None:
        with self._recorded(incoming):
            self._land(incoming, self._comms.own(sections), self._comms.bring(incoming.device))

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
