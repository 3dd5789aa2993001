"""Keep pulled shards in the tiers of the worker, next to the data of its keys.

A shard stays live only where there is room without an eviction: it will be read once, and an
evicted object might be read sooner. It never waits for room, since the lowest tier is the disk.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dask.typing import Key

from dask_gpurt.device import Device
from dask_gpurt.exchange.shard import Shard
from dask_gpurt.memory.admission import reservation
from dask_gpurt.memory.ledger import SHARDS
from dask_gpurt.memory.reading import BufferAndMemo
from dask_gpurt.memory.serialize import Raw, raw_frames
from dask_gpurt.memory.store import TieredBuffer
from dask_gpurt.memory.tiers import NoRoom, Tier
from dask_gpurt.observe import Fallback, Metrics


class Landing:
    """Keep pulled shards by key. Thread-safe; no method is called on the event loop.

    Parameters
    ----------
    tiered_buffer
        The tiers.
    main
        Kind of the device that is their upper end.
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
        """Keep the bytes of a shard, live or in a lower tier.

        Parameters
        ----------
        sources
            The bytes of each section, mapped or in memory of this process.
        bring
            Makes buffers of ``device`` out of them; may raise MemoryError.

        Raises
        ------
        OSError
            When no tier has room.
        """
        home = self._home(device.kind)
        priority = (math.inf, min(shard.places(), default=0))
        if self._tiered_buffer.reservations.try_reserve(key, shard.nbytes, home):
            try:
                self._tiered_buffer.store(key, Raw(bring(sources)), SHARDS, home=home, priority=priority)
                return
            except MemoryError:
                self._metrics.fallback(Fallback.EXCHANGE_SPILLED_ON_ARRIVAL, "it has no room for them")
            finally:  # whatever it has failed with; what was stored has taken the room
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

    def keeps(self, nbytes: int, kind: str) -> bool:
        """Return whether this many bytes of shards stay live beside other things."""
        return self._tiered_buffer.reservations.leaves_half(nbytes, self._home(kind))

    def make_room(self) -> None:
        """Spill everything that is live on the device and not held, for a task that has run out of memory."""
        # The failed task has left Python frames behind that hold its intermediate results, in cycles.
        gc.collect()
        self._tiered_buffer.spill(self._tiered_buffer.live_bytes(Tier.DEVICE))

    @contextmanager
    def reading(self, wanted: Iterable[tuple[str, int]], task: Key) -> Iterator[dict[Any, BufferAndMemo]]:
        """Yield the sections of shards for the table backend, for as long as the body of a task runs."""
        with self._tiered_buffer.reading(wanted, reservation(task)) as found:
            yield found

    def discard(self, key: str) -> None:
        """Delete a shard."""
        self._tiered_buffer.discard(key)
