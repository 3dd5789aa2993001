"""Shards that go by Dask's comms: asked for by one worker, handed out by another.

Coroutines run on the event loop; what copies or compresses runs on threads of the exchange.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from distributed.protocol.serialize import to_serialize
from distributed.utils import nbytes as size_of

from dask_gpurt.device import Device
from dask_gpurt.device.protocol import Buffer
from dask_gpurt.exchange import compression
from dask_gpurt.exchange.compression import Compressor
from dask_gpurt.exchange.inbox import Parcel, Place
from dask_gpurt.exchange.links import Links
from dask_gpurt.exchange.paths import COMMS
from dask_gpurt.exchange.pools import Pools
from dask_gpurt.exchange.shard import RunKey, Shard
from dask_gpurt.exchange.traffic import Traffic
from dask_gpurt.observe import Metrics

#: Attempts to reach a peer before a pull gives up, and the seconds between them.
ATTEMPTS, PAUSE = 30, 1.0


class PeerError(RuntimeError):
    """A peer can not be worked with; the message says what would be right."""


class Comms:
    """Fetches shards from peers, and serves theirs.

    Parameters
    ----------
    worker
        The Dask worker.
    compress
        Whether shards may be compressed on their way to another host.
    offload
        Runs what blocks on a thread.
    """

    def __init__(
        self,
        worker: Any,
        pools: Pools,
        links: Links,
        traffic: Traffic,
        metrics: Metrics,
        compress: bool,
        offload: Callable[..., Awaitable[Any]],
    ):
        self._worker = worker
        self._pools = pools
        self._links = links
        self._traffic = traffic
        self._metrics = metrics
        self._compress = compress
        self._offload = offload
        self._compressor = Compressor(metrics)

    def _carries(self, device: Device) -> bool:
        """Whether the comms of this worker take buffers of a device as they are."""
        return device.carried_by(str(self._worker.address).partition("://")[0])

    # ---- fetching ----------------------------------------------------------------------

    async def fetch(self, parcel: Parcel) -> dict[str, Any]:
        """Ask the producer for a shard.

        Returns
        -------
        dict
            What :meth:`unpacked` reads.

        Raises
        ------
        PeerError
            When the producer does not have it any more.
        OSError
            When the producer can not be reached.
        """
        shard = parcel.shard
        packing = await self._packing(shard.producer)
        for attempt in range(ATTEMPTS):
            start = perf_counter()
            try:
                reply: dict[str, Any] = await self._worker.rpc(shard.producer).gpurt_fetch(
                    kind=shard.device, shard=shard.id, run=list(parcel.run), packing=packing
                )
                break
            except OSError:
                if attempt == ATTEMPTS - 1 or parcel.place is Place.GONE:
                    raise
                await asyncio.sleep(PAUSE)
        if reply["data"] is None:
            raise PeerError(f"worker {shard.producer} does not have shard {shard.id} any more")
        self._note(shard.producer, reply["data"], perf_counter() - start - reply["seconds"])
        return reply

    async def _packing(self, peer: str) -> dict[str, Any] | None:
        """What a peer needs to know to decide on compression; None where shards come as they are."""
        if not self._compress or await self._links.learn(peer) is None:
            return None
        bandwidth = self._links.bandwidth_between_hosts(peer)
        if bandwidth is None:
            return None
        codecs = compression.installed()
        if not codecs:
            self._compress = False
            self._metrics.fallback(
                "shards go to other hosts as they are",
                "neither lz4 nor zstandard is installed: pip install dask-gpurt[compression]",
            )
            return None
        return {"bandwidth": bandwidth, "codecs": list(codecs)}

    def _note(self, peer: str, data: list[Any], seconds: float) -> None:
        """Learn what the link did, apart from what the peer took to copy and compress."""
        nbytes = sum(map(size_of, data))
        self._traffic.note(peer, COMMS, nbytes, seconds)
        self._links.observe(peer, nbytes, seconds)

    def unpacked(self, shard: Shard, reply: dict[str, Any]) -> list[Any]:
        """The sections of a shard that was fetched. Blocks."""
        if reply["codec"] is None:
            return [received(data) for data in reply["data"]]
        with self._metrics.seconds("exchange.seconds.decompressing"):
            (packed,) = reply["data"]
            return compression.decompress(reply["codec"], packed, [one.nbytes for one in shard.sections])

    def bring(self, device: Device) -> Callable[[Sequence[Any]], list[Buffer]]:
        """What makes buffers of a device out of fetched sections."""
        return list if device.on_host or self._carries(device) else device.from_host

    # ---- serving -----------------------------------------------------------------------

    async def serve(
        self, kind: str, shard: int, run: list[Any], packing: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Handler: the bytes of a shard by section, or compressed as one, and the seconds that it took."""
        start = perf_counter()
        blocks = self._pools.known(kind).view(shard)
        if blocks is None:
            return {"data": None}
        device, key = self._pools.device(kind), (run[0], run[1])
        buffers = [block.buffer for block in blocks]
        codec, data = await self._offload(self._prepared, device, buffers, key, packing)
        return {
            "data": [to_serialize(one) for one in data],
            "codec": codec,
            "seconds": perf_counter() - start,
        }

    def _prepared(
        self, device: Device, buffers: list[Buffer], run: RunKey, packing: dict[str, Any] | None
    ) -> tuple[str | None, list[Any]]:
        if self._carries(device):
            # Compression would take a codec that works on the device; they have none yet.
            return None, [device.for_comm(buffer) for buffer in buffers]
        sections = [memoryview(device.to_host(buffer)) for buffer in buffers]
        if packing is None:
            return None, list(sections)
        return self._compressor.pack(run, sections, packing["bandwidth"], packing["codecs"])

    def forget(self, run: RunKey) -> None:
        """A run is over."""
        self._compressor.forget(run)


def received(data: Any) -> Buffer | np.ndarray:
    """What a comm has brought, as bytes."""
    if hasattr(data, "__cuda_array_interface__"):
        return data
    return np.frombuffer(memoryview(data).cast("B"), np.uint8)
