"""The receiving half of a run: take offers, put output partitions together."""

from __future__ import annotations

import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

from dask.typing import Key

from dask_gpurt.device.base import Buffer
from dask_gpurt.exchange import Attempt, Commit, Exchange, ExchangeClosed, Shard
from dask_gpurt.exchange.inbox import Parcel, reading
from dask_gpurt.exchange.shard import RunKey, Section
from dask_gpurt.frames import Part
from dask_gpurt.shuffle.inputs import Inputs, Offered
from dask_gpurt.shuffle.spec import ShuffleSpec


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
    failed
        Called when a shard that was accepted can not be had.
    """

    def __init__(
        self,
        spec: ShuffleSpec,
        run: RunKey,
        exchange: Exchange,
        check: Callable[[], None],
        failed: Callable[[Exception], None],
    ):
        self.spec = spec
        self.run = run
        self.exchange = exchange
        self._check = check
        self._failed = failed
        self._lock = threading.Lock()
        self._closed = False
        self._inputs = Inputs[Parcel]()
        #: Where each output partition that has not been read for good has rows: in which sections of which
        #: parcels, and where they stand in each.
        self._places: defaultdict[int, dict[Parcel, list[tuple[int, int]]]] = defaultdict(dict)
        #: How many outputs of each parcel have not been read for good.
        self._unread: dict[Parcel, int] = {}
        self._readers: dict[Key, set[int]] = {}
        self._consumed: set[int] = set()

    # ---- offers ----------------------------------------------------------------------

    async def receive(self, offers: Iterable[Shard | Commit]) -> None:
        """Take what a producer offers; what is known or stale changes nothing.

        Raises
        ------
        ExchangeClosed
            When the run is over.
        PeerLost
            When the producer has left.
        """
        for offer in offers:
            self._check()
            if isinstance(offer, Shard):
                outdated = await self._take(offer)
            else:
                with self._lock:
                    outdated = self._inputs.commit(offer.source, offer.attempt, offer.parts)
                    self._drop(outdated)
            if outdated:
                self.exchange.metrics.add("shuffle.shards.{answer}", len(outdated), "outdated")
                await self.exchange.offload(self.exchange.discard, outdated)

    async def _take(self, shard: Shard) -> list[Parcel]:
        """Take a shard if it is new; returns what it outdates."""
        path = await self.exchange.path(shard)
        # From here on nothing is awaited. While the path was found out, the same shard may have been offered
        # again, and the run may have ended.
        with self._lock:
            if self._closed:
                raise ExchangeClosed(f"shuffle {self.run} is over")
            offered = self._inputs.classify(shard.source, shard.attempt, shard.part)
            if offered is not Offered.NEW:
                self.exchange.metrics.add("shuffle.shards.{answer}", 1, offered.name.lower())
                if offered is Offered.STALE:  # its block would fill the producer's pool until the run is over
                    self.exchange.refuse(shard)
                return []
            parcel = self.exchange.take(self.run, shard, path, self._failed)
            outdated = self._inputs.add(shard.source, shard.attempt, shard.part, parcel)
            self._drop(outdated)
            places = shard.places()
            for partition, where in places.items():
                self._places[partition][parcel] = where
            self._unread[parcel] = len(places)
        return outdated

    def _drop(self, parcels: Iterable[Parcel]) -> None:
        """Forget parcels that do not count any more. Under the lock."""
        for parcel in parcels:
            if self._unread.pop(parcel, None) is not None:
                for partition in parcel.shard.places():
                    self._places[partition].pop(parcel, None)

    def seal(self, succeeded: Mapping[int, Attempt]) -> set[int]:
        """Close the list of shards; returns the inputs of which something is missing."""
        with self._lock:
            return self._inputs.seal(succeeded)

    # ---- outputs ---------------------------------------------------------------------

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
            places = list(self._places[partition].items())
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
        """Note that a task is in memory; returns the parcels that are needed no more."""
        if key not in self._readers:  # as almost every task; only the tasks of this run ever add themselves
            return []
        with self._lock:
            finished: list[Parcel] = []
            for partition in self._readers.pop(key, set()) - self._consumed:
                self._consumed.add(partition)
                for parcel in self._places.pop(partition, ()):
                    self._unread[parcel] -= 1
                    if not self._unread[parcel]:
                        del self._unread[parcel]
                        finished.append(parcel)
            return finished

    def close(self) -> None:
        """Let everything go. Blocks while something is being read."""
        with self._lock:
            self._closed = True
            parcels = list(self._unread)
            self._unread.clear()
            self._places.clear()
            self._inputs.clear()
        self.exchange.discard(parcels)


def _part(section: Section, at: int, buffer: Buffer, memo: dict[str, Any]) -> Part:
    return Part(section.header, buffer, section.offsets, at, memo)
