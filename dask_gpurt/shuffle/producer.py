"""The sending half of a run: cut a partition, pack it, tell the owners."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from dask_gpurt.device import PoolFull
from dask_gpurt.exchange import Exchange, Shard
from dask_gpurt.exchange.outbox import Outbox
from dask_gpurt.exchange.shard import RunKey
from dask_gpurt.shuffle.spec import ShuffleSpec
from dask_gpurt.table import Packed, Piece, Table, backend_for


class Producer:
    """Publishes the shards of input partitions.

    Parameters
    ----------
    worker_for
        The owner of each output partition.
    offer
        Called with an owner and a shard that waits for it; from the thread of the caller.
    check
        Raises when the run is over.
    """

    def __init__(
        self,
        spec: ShuffleSpec,
        run: RunKey,
        worker_for: dict[int, str],
        exchange: Exchange,
        offer: Callable[[str, Shard], None],
        check: Callable[[], None],
    ):
        self.spec = spec
        self.run = run
        self.exchange = exchange
        self._offer = offer
        self._check = check
        self._groups: dict[str, list[int]] = {}
        for partition, owner in sorted(worker_for.items()):
            self._groups.setdefault(owner, []).append(partition)
        self._attempts = itertools.count()

    def add(self, frame: Any, source: int) -> None:
        """Split an input partition and publish a shard, or several, for each owner.

        Blocks while the exchange pool is full.
        """
        table = backend_for(frame, self.exchange.device)
        self._validate(frame, source)
        if tuple(frame.columns) != self.spec.columns:
            frame = frame[list(self.spec.columns)]
        outbox = self.exchange.outbox(table.device.kind)
        metrics = self.exchange.metrics
        metrics.add("shuffle.rows", len(frame))
        with metrics.seconds("shuffle.seconds.splitting"):
            pieces = table.split(
                frame,
                self.spec.column,
                list(self._groups.values()),
                self.spec.npartitions,
                drop_column=self.spec.drop_column,
                ignore_index=self.spec.ignore_index,
            )
        parts = itertools.count()
        attempt = next(self._attempts)
        for owner, piece in zip(self._groups, pieces, strict=True):
            if piece is None:
                continue
            for small, packed in self._pack(table, piece, outbox):
                shard = outbox.publish(self.run, owner, packed.block)
                offered = self._describe(shard, source, attempt, next(parts), table, small, packed)
                self._offer(owner, offered)

    def _describe(
        self, shard: int, source: int, attempt: int, part: int, table: Table, piece: Piece, packed: Packed
    ) -> Shard:
        return Shard(
            id=shard,
            producer=self.exchange.worker.address,
            device=table.device.kind,
            source=source,
            attempt=attempt,
            part=part,
            offset=packed.block.offset,
            nbytes=packed.block.nbytes,
            header=packed.header,
            partitions=piece.partitions,
            offsets=piece.offsets,
        )

    def _pack(self, table: Table, piece: Piece, outbox: Outbox) -> Iterator[tuple[Piece, Packed]]:
        """Pack a piece, in halves where it does not fit into the pool as a whole."""
        try:
            yield piece, self._pack_whole(table, piece, outbox)
        except PoolFull as full:
            if len(piece) < 2:
                raise MemoryError(
                    f"one row of shuffle {self.spec.id} takes {full.nbytes} bytes, gpurt.exchange.pool has "
                    f"{outbox.pool.capacity}: set it to at least that"
                ) from full
            for half in piece.halves(table.cut):
                if len(half):
                    yield from self._pack(table, half, outbox)

    def _pack_whole(self, table: Table, piece: Piece, outbox: Outbox) -> Packed:
        while True:
            self._check()
            seen = outbox.freed
            try:
                with self.exchange.metrics.seconds("shuffle.seconds.packing"):
                    return table.pack(piece, outbox)
            except PoolFull as full:
                outbox.wait_for_room(full.nbytes, seen, self._check)

    def _validate(self, frame: Any, source: int) -> None:
        """Refuse a partition of another schema before anything of it is published."""
        expected, given = set(self.spec.columns), set(frame.columns)
        if expected == given:
            return
        missing = sorted(map(str, expected - given))
        extra = sorted(map(str, given - expected))
        raise ValueError(
            f"input partition {source} of shuffle {self.spec.id} has other columns than the collection says: "
            f"missing {missing}, unexpected {extra}. All partitions need the columns of `df._meta`"
        )
