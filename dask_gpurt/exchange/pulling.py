"""Pull offered shards into the memory tiers of their owner, with a bounded number of bytes in flight."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import perf_counter
from typing import Any

from dask_gpurt.dask_hooks.worker import call_soon
from dask_gpurt.exchange.comms import Comms
from dask_gpurt.exchange.incoming import IncomingShard, ShardState, drop_pages
from dask_gpurt.exchange.paths import Endpoint
from dask_gpurt.exchange.shard import ExchangeClosed
from dask_gpurt.memory.waits import WaitLine

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
