"""The receiving half of a run: take offers, put output partitions together."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from dask.typing import Key

from dask_gpurt.device.protocol import Buffer
from dask_gpurt.exchange import Exchange, Shard
from dask_gpurt.exchange.inbox import Parcel, reading
from dask_gpurt.exchange.shard import RunKey, Section
from dask_gpurt.shuffle.spec import ShuffleSpec
from dask_gpurt.table import Part


class Consumed(Exception):
    """An output partition was asked for after its shards had been let go."""


class Consumer:
    """Holds what was offered to this worker until it has been read for good.

    A partition counts as read once the task that asked for it is in memory: a task that
    fails after reading, and is tried again, finds its shards.

    Parameters
    ----------
    check
        Raises when the run is over.
    """

    def __init__(self, spec: ShuffleSpec, run: RunKey, exchange: Exchange, check: Callable[[], None]):
        self.spec = spec
        self.run = run
        self.exchange = exchange
        self._check = check
        self._lock = threading.Lock()
        #: By source; each attempt at a source replaces the one before.
        self._parcels: dict[int, list[Parcel]] = {}
        #: Where a parcel has rows of outputs that have not been read for good.
        self._unread: dict[Parcel, dict[int, list[tuple[int, int]]]] = {}
        self._readers: dict[Key, set[int]] = {}
        self._consumed: set[int] = set()

    async def accept(self, shard: Shard, on_error: Callable[[Exception], None]) -> None:
        """Take an offer."""
        parcel = await self.exchange.accept(self.run, shard, on_error)
        outdated: list[Parcel] = []
        with self._lock:
            known = self._parcels.setdefault(shard.source, [])
            if known and _attempt(known[0].shard) != _attempt(shard):
                if known[0].shard.producer == shard.producer and known[0].shard.attempt > shard.attempt:
                    outdated = [parcel]
                else:
                    outdated, known[:] = list(known), []
            if parcel not in outdated:
                known.append(parcel)
                self._unread[parcel] = shard.places()
            for old in outdated:
                self._unread.pop(old, None)
        if outdated:
            await self.exchange.offload(self.exchange.discard, outdated)

    def assemble(self, partition: int, key: Key) -> Any:
        """Concatenate the rows of an output partition, in the order of the inputs.

        Parameters
        ----------
        key
            The task that asks.

        Raises
        ------
        Consumed
            When a task had asked before, and was done.
        """
        with self._lock:
            if partition in self._consumed:
                raise Consumed(partition)
            self._readers.setdefault(key, set()).add(partition)
            places = [(p, unread[partition]) for p, unread in self._unread.items() if partition in unread]
        places.sort(key=lambda place: (place[0].shard.source, place[0].shard.part))
        wanted = [(parcel, which, at) for parcel, mine in places for which, at in mine]
        table = self.exchange.table(self._meta)
        metrics = self.exchange.metrics
        landing = self.exchange.landing
        sections = [(parcel, which) for parcel, which, _ in wanted]
        read = reading(sections, landing, self._check, key)
        with read as found, metrics.seconds("shuffle.seconds.assembling"):
            parts = [
                _part(parcel.shard.sections[which], at, *bytes_)
                for (parcel, which, at), bytes_ in zip(wanted, found, strict=True)
            ]
            frame = table.assemble(
                parts, self._meta, ignore_index=self.spec.ignore_index, order_by=self.spec.order_by
            )
            fence = table.fence()
            for parcel, _ in places:
                parcel.read_until(fence)
        return frame

    @cached_property
    def _meta(self) -> Any:
        """The empty output partition."""
        meta = pickle.loads(self.spec.meta)
        if self.spec.drop_column:
            meta = meta.drop(columns=self.spec.column)
        return meta.reset_index(drop=True) if self.spec.ignore_index else meta

    def task_done(self, key: Key) -> list[Parcel]:
        """A task is in memory: the parcels that nobody needs any more."""
        with self._lock:
            return list(self._finished(self._readers.pop(key, set())))

    def _finished(self, partitions: set[int]) -> Iterator[Parcel]:
        self._consumed |= partitions
        for parcel, unread in list(self._unread.items()):
            for partition in partitions & unread.keys():
                del unread[partition]
            if not unread:
                del self._unread[parcel]
                yield parcel

    def close(self) -> None:
        """Let everything go. Blocks while something is being read."""
        with self._lock:
            parcels = list(self._unread)
            self._unread.clear()
            self._parcels.clear()
        self.exchange.discard(parcels)


def _part(section: Section, at: int, buffer: Buffer, memo: dict[str, Any]) -> Part:
    return Part(section.header, buffer, section.offsets, at, memo)


def _attempt(shard: Shard) -> tuple[str, int]:
    return shard.producer, shard.attempt
