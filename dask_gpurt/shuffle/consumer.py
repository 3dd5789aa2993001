"""The receiving half of a run: take offers, put output partitions together."""

from __future__ import annotations

import pickle
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from dask.typing import Key

from dask_gpurt.device.protocol import Buffer
from dask_gpurt.exchange import Exchange, Shard
from dask_gpurt.exchange.inbox import Parcel, reading
from dask_gpurt.exchange.shard import RunKey, Section
from dask_gpurt.shuffle.ahead import ReadAhead
from dask_gpurt.shuffle.spec import ShuffleSpec
from dask_gpurt.table import Part, backend_for


class Consumed(Exception):
    """An output partition was asked for after its shards had been let go."""


class Consumer:
    """Holds what was offered to this worker until it has been read for good.

    A partition counts as read once the task that asked for it is in memory: a task that
    fails after reading, and is tried again, finds its shards.

    Parameters
    ----------
    outputs
        The output partitions of this worker, in order.
    check
        Raises when the run is over.
    """

    def __init__(
        self,
        spec: ShuffleSpec,
        run: RunKey,
        outputs: Sequence[int],
        exchange: Exchange,
        check: Callable[[], None],
    ):
        self.spec = spec
        self.run = run
        self.outputs = outputs
        self.exchange = exchange
        self._check = check
        self._lock = threading.Lock()
        #: By source; each attempt at a source replaces the one before.
        self._parcels: dict[int, list[Parcel]] = {}
        #: Where a parcel has rows of outputs that have not been read for good.
        self._unread: dict[Parcel, dict[int, list[tuple[int, int]]]] = {}
        self._readers: dict[Key, set[int]] = {}
        self._consumed: set[int] = set()
        self._ahead = ReadAhead(exchange)

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
            wanted, following = self._sections(partition), self._following(partition)
        table = backend_for(self._meta, self.exchange.pools.device)
        metrics = self.exchange.metrics
        landing = self.exchange.landing
        sections = [(parcel, which) for parcel, which, _ in wanted]
        with (
            self._ahead.taken(partition, self._check) as ahead,
            reading(sections, landing, self._check, key, ahead) as found,
            metrics.seconds("shuffle.seconds.assembling"),
        ):
            if following is not None:
                self._ahead.begin(*following)
            parts = [
                _part(parcel.shard.sections[which], at, *bytes_)
                for (parcel, which, at), bytes_ in zip(wanted, found, strict=True)
            ]
            frame = table.assemble(parts, self._meta, ignore_index=self.spec.ignore_index)
            fence = table.fence()
            for parcel in {parcel for parcel, _, _ in wanted}:
                parcel.read_until(fence)
        return frame

    def _sections(self, partition: int) -> list[tuple[Parcel, int, int]]:
        """The sections with rows of an output, in order, and where it stands in them. Under the lock."""
        parcels = [parcel for parcel, unread in self._unread.items() if partition in unread]
        parcels.sort(key=lambda parcel: (parcel.shard.source, parcel.shard.part))
        return [(parcel, which, at) for parcel in parcels for which, at in self._unread[parcel][partition]]

    def _following(self, partition: int) -> tuple[int, list[tuple[Parcel, int]]] | None:
        """The output that will be asked for next, as Dask orders them, and its sections. Under the lock."""
        asked = self._consumed.union(*self._readers.values())
        for output in self.outputs[bisect_right(self.outputs, partition) :]:
            if output not in asked:
                return output, [(parcel, which) for parcel, which, _ in self._sections(output)]
        return None

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
        self._ahead.close()
        with self._lock:
            parcels = list(self._unread)
            self._unread.clear()
            self._parcels.clear()
        self.exchange.discard(parcels)


def _part(section: Section, at: int, buffer: Buffer, memo: dict[str, Any]) -> Part:
    return Part(section.header, buffer, section.offsets, at, memo)


def _attempt(shard: Shard) -> tuple[str, int]:
    return shard.producer, shard.attempt
