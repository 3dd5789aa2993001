"""Store pulled shards in the memory tiers of the worker, next to the data of its keys.

A shard is stored live only if no object has to be evicted for it, since a shard is read once, and the object
might be read sooner. Storing never waits for room, since the lowest tier is the disk.
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
    """Store pulled shards by key. Thread-safe; not for the event loop.

    Parameters
    ----------
    tiered_buffer
        The tiers.
    main
        The kind of device that holds their top tier.
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

        Parameters
        ----------
        sources
            The bytes of each section, mapped or in memory of this process.
        bring
            Copies them into buffers of ``device``; may raise MemoryError.

        Raises
        ------
        OSError
            If no tier has room.
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

        Parameters
        ----------
        nbytes
            Bytes of the shards together.
        coming
            Bytes of those that have not landed yet.
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
