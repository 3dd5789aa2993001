"""Send shards by Dask's comms: one worker asks for them, another hands them out.

Coroutines run on the event loop; what copies or compresses runs on threads of the exchange.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from distributed.protocol.serialize import to_serialize
from distributed.utils import nbytes as size_of

from dask_gpurt.device import Block, Device, PoolFull
from dask_gpurt.device.base import Buffer, Codec
from dask_gpurt.exchange.compression import Compressor
from dask_gpurt.exchange.endpoint import Endpoint
from dask_gpurt.exchange.incoming import IncomingShard
from dask_gpurt.exchange.links import PeerClass
from dask_gpurt.exchange.outgoing import COPIED
from dask_gpurt.exchange.paths import COMMS
from dask_gpurt.exchange.shard import PeerLost, RunKey
from dask_gpurt.observe import Fallback


class Comms:
    """Fetch shards from peers, and serve theirs.

    Parameters
    ----------
    compression
        Whether shards may be compressed on their way to another host: "auto", "gpu" for those of a GPU on
        that too, or "off".
    """

    def __init__(self, endpoint: Endpoint, compression: str):
        self._end = endpoint
        self._protocol = endpoint.me.address.partition("://")[0]
        self._compress, self._on_gpu = compression != "off", compression == "gpu"
        self._compressor = Compressor(endpoint.metrics)
        #: By peer, for as long as a task waits for its first shard.
        self._first: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def _carries(self, device: Device) -> bool:
        """Return whether the comms of this worker take buffers of a device as they are."""
        return device.carried_by(self._protocol)

    # ---- fetching ----------------------------------------------------------------------

    async def fetch(self, incoming: IncomingShard, *, by_host: bool = False) -> dict[str, Any]:
        """Ask the producer for a shard.

        Parameters
        ----------
        by_host
            Whether it is to be compressed in host memory only, if it is.

        Returns
        -------
        dict
            What :meth:`unpacked` reads.

        Raises
        ------
        PeerLost
            When the producer does not have it any more, or has left.
        ExchangeClosed
            When nothing needs the shard any more.
        """
        peer = incoming.shard.producer.address
        packing = await self._packing(peer, incoming.device, by_host)
        if packing is not None and not self._end.links.is_measured(peer):
            # The first shard of a peer comes alone: it shows how fast the link is before the others are sent.
            async with self._first.setdefault(peer, asyncio.Lock()):
                if not self._end.links.is_measured(peer):
                    return await self._ask(incoming, packing)
            packing = await self._packing(peer, incoming.device, by_host)
        return await self._ask(incoming, packing)

    async def _ask(self, incoming: IncomingShard, packing: dict[str, Any] | None) -> dict[str, Any]:
        shard = incoming.shard
        producer = shard.producer
        start = perf_counter()
        reply: dict[str, Any] | None = await self._end.calls.call(
            producer.address,
            "gpurt_fetch",
            check=incoming.check_wanted,
            kind=shard.device,
            shard=shard.id,
            run=list(incoming.run),
            packing=packing,
            staged_for=None if incoming.path.staging is None else self._end.me.address,
            to=producer.incarnation,
        )
        if reply is None:  # Dask's answer to an operation that it does not know
            raise PeerLost(f"the runtime was switched off at worker {producer.address}")
        if reply["data"] is None:
            raise PeerLost(f"worker {producer.address} does not have shard {shard.id} any more")
        if not reply["staged"]:
            self._note(producer.address, reply["data"], perf_counter() - start - reply["seconds"])
        return reply

    async def _packing(self, peer: str, device: Device, by_host: bool) -> dict[str, Any] | None:
        """Describe to a peer what it needs to decide on compression; None where shards come as they are."""
        if self._compress:
            await self._end.links.learn(peer)
        bandwidth = self._end.links.bandwidth_between_hosts(peer)
        if not self._compress or bandwidth is None:
            return None
        codecs = await self._end.offload(self._codecs, device)  # the first time they are loaded
        if not codecs:
            if self._compress and not (self._carries(device) and not self._on_gpu):
                self._compress = False  # so that it is counted once
                self._end.metrics.fallback(Fallback.EXCHANGE_UNCOMPRESSED, device.codecs_missing)
            return None
        names = [name for name, codec in codecs.items() if codec.on_host or not by_host]
        return {"bandwidth": bandwidth, "codecs": names}

    def _codecs(self, device: Device) -> dict[str, Codec]:
        """Return the codecs for shards of a device.

        Those of the host are among them only where the comms do not take the device's buffers.
        """
        by_host = {} if self._carries(device) else device.host_codecs()
        return {**device.own_codecs(), **by_host} if self._on_gpu else by_host

    def _note(self, peer: str, data: list[Any], seconds: float) -> None:
        """Learn what the link did, apart from what the peer took to copy and compress."""
        nbytes, now = sum(map(size_of, data)), perf_counter()
        self._end.traffic.note(peer, COMMS, nbytes, seconds)
        self._end.links.observe(peer, nbytes, now - seconds, now)
        if self._end.links.peer_class(peer) is PeerClass.OTHER_HOST:
            self._end.links.arrivals.observe(nbytes, now - seconds, now)

    def unpacked(self, incoming: IncomingShard, reply: dict[str, Any]) -> list[Any]:
        """Return the sections of a shard that was fetched; where staged, they stay until it is released.
        Blocks.
        """
        sizes = [section.nbytes for section in incoming.shard.sections]
        if reply["staged"]:
            assert incoming.path.staging is not None
            return list(map(incoming.path.staging.view, reply["staged"]["offsets"], sizes))
        if reply["codec"] is None:
            whole = [received(data) for data in reply["data"]]
            # Within a process a comm hands over the memory of the producer, which will reuse it.
            return [np.array(data) for data in whole] if self._protocol == "inproc" else whole
        with self._end.metrics.seconds("exchange.seconds.decompressing"):
            (packed,) = map(received, reply["data"])
            return self._codecs(incoming.device)[reply["codec"]].decompress(packed, sizes)

    def bring(self, device: Device, reply: dict[str, Any]) -> Callable[[Sequence[Any]], list[Buffer]]:
        """Return what makes buffers of a device out of fetched sections."""
        if reply["codec"] is not None:
            return device.from_host if self._codecs(device)[reply["codec"]].on_host else list
        return device.from_comm if self._carries(device) and not reply["staged"] else device.from_host

    # ---- serving -----------------------------------------------------------------------

    async def serve(
        self,
        kind: str,
        shard: int,
        run: list[Any],
        packing: dict[str, Any] | None,
        staged_for: str | None,
        to: str,
    ) -> dict[str, Any]:
        """Handle a fetch: return the bytes of a shard of ``to``, and the seconds that it took.

        Sent is the pool itself, where it can be: its block is not used again before the peer has let go.

        Parameters
        ----------
        packing
            Whether they may be compressed: the bandwidth of the link, and the codecs of the peer.
        staged_for
            The peer, where it maps this worker's pool in host memory.

        Returns
        -------
        dict
            Under "staged" where the sections lie in that pool; else the sections, or all compressed as one.
        """
        start = perf_counter()
        key = (run[0], run[1])
        if to != self._end.me.incarnation:
            self._end.metrics.add("exchange.messages.stale")
            return {"data": None}
        outbox = self._end.pools.known(kind)
        blocks = outbox.view(shard)
        if blocks is None:
            return {"data": None}
        device = self._end.pools.device(kind)
        staged = None
        if staged_for:
            staged = await self._end.offload(self._staged, device, blocks, key, staged_for)
        codec, data = None, []
        if staged is None:
            codec, data = await self._end.offload(self._prepared, device, blocks, key, packing)
        if outbox.view(shard) is None:  # the run has ended meanwhile, too early to see what was staged
            if staged is not None:
                self._end.pools.known("host").release([(staged["shard"], COPIED)])
            return {"data": None}
        return {
            "data": [to_serialize(one) for one in data],
            "staged": staged,
            "codec": codec,
            "seconds": perf_counter() - start,
        }

    def _staged(
        self, device: Device, blocks: Sequence[Block], run: RunKey, peer: str
    ) -> dict[str, Any] | None:
        """Copy a shard into the pool in host memory; None where that has no room."""
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
            "shard": outbox.publish(run, COPIED, peer, copies),
            "offsets": [copy.offset for copy in copies],
        }

    def _prepared(
        self, device: Device, blocks: Sequence[Block], run: RunKey, packing: dict[str, Any] | None
    ) -> tuple[str | None, list[Any]]:
        sections = [block.buffer for block in blocks]
        if packing is not None:
            shared = [codec for name, codec in self._codecs(device).items() if name in packing["codecs"]]
            if found := self._compressor.pack(run, sections, packing["bandwidth"], shared):
                codec, packed = found
                return codec.name, [packed if codec.on_host else self._sendable(device, packed)]
        return None, [self._sendable(device, section) for section in sections]

    def _sendable(self, device: Device, buffer: Buffer) -> Any:
        return device.for_comm(buffer) if self._carries(device) else memoryview(device.to_host(buffer))

    def forget(self, run: RunKey) -> None:
        """Forget a run that is over."""
        self._compressor.forget(run)


def received(data: Any) -> Buffer | np.ndarray:
    """Return what a comm has brought, as bytes."""
    if hasattr(data, "__cuda_array_interface__"):
        return data
    return np.frombuffer(memoryview(data).cast("B"), np.uint8)
