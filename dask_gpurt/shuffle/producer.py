"""The sending half of a run: cut a partition, pack it, tell the owners."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dask.sizeof import sizeof

from dask_gpurt.device import PoolFull
from dask_gpurt.exchange import Attempt, Commit, Exchange, Shard
from dask_gpurt.exchange.outbox import Outbox
from dask_gpurt.exchange.shard import RunKey, Section
from dask_gpurt.frames import Packed, Piece, Routed, Table
from dask_gpurt.shuffle.spec import ShuffleSpec


class Producer:
    """Publishes the shards of input partitions.

    Parameters
    ----------
    worker_for
        The owner of each output partition.
    offer
        Called with an owner and a shard that waits for it, or the end of an attempt; from the thread of the
        caller.
    check
        Raises when the run is over.
    """

    def __init__(
        self,
        spec: ShuffleSpec,
        run: RunKey,
        worker_for: dict[int, str],
        exchange: Exchange,
        offer: Callable[[str, Shard | Commit], None],
        check: Callable[[], None],
    ):
        self.spec = spec
        self.run = run
        self.exchange = exchange
        self.offer = offer
        self.check = check
        outputs = _beginning_after(exchange.worker.address, worker_for)
        #: The outputs that go into one section, and whom it goes to: coarse, and fine.
        self._coarse: dict[str, list[int]] = {}
        for partition, owner in outputs:
            self._coarse.setdefault(owner, []).append(partition)
        self._fine = [(owner, [partition]) for partition, owner in outputs]
        self.owners = list(self._coarse)
        self._retries = itertools.count()

    def add(self, frame: Any, source: int, dispatch: int) -> Attempt:
        """Split an input partition and publish its shards, and a commit for each owner.

        Blocks while the exchange pool is full.

        Parameters
        ----------
        dispatch
            Orders the attempts at this input on all workers; see :class:`~dask_gpurt.exchange.Attempt`.

        Returns
        -------
        Attempt
            The one that has succeeded.
        """
        attempt = Attempt(dispatch, next(self._retries))
        frame = self._validated(frame, source)
        plain = frame.frame if isinstance(frame, Routed) else frame
        table = self.exchange.table(plain)
        outbox = self.exchange.pools.outbox(table.device.kind)
        metrics = self.exchange.metrics
        metrics.add("shuffle.rows", len(plain))
        groups = self._fine if self._will_spill(plain, table.device.kind) else list(self._coarse.items())
        with metrics.seconds("shuffle.seconds.splitting"):
            pieces = table.split(
                frame,
                self.spec.column,
                [partitions for _, partitions in groups],
                self.spec.npartitions,
                drop_column=self.spec.drop_column,
                ignore_index=self.spec.ignore_index,
            )
        owned = [
            (owner, piece) for (owner, _), piece in zip(groups, pieces, strict=True) if piece is not None
        ]
        _Packing(self, table, outbox, source, attempt).publish_all(owned)
        return attempt

    def _will_spill(self, frame: Any, kind: str) -> bool:
        """Whether owners can hardly keep all that is shuffled live, if other inputs are like this one.

        A section that has been spilled is read as a whole for each output in it. So each output
        gets a section of its own then; otherwise fewer and larger ones are cheaper.
        """
        share = sizeof(frame) * self.spec.npartitions // max(1, len(self._coarse))
        return not self.exchange.landing.keeps(share, kind)

    def _validated(self, frame: Any, source: int) -> Any:
        """The partition with its columns in order; refused before anything of it is published."""
        if isinstance(frame, Routed):
            plain = self._in_order(
                frame.frame, [c for c in self.spec.columns if c != self.spec.column], source
            )
            if plain is frame.frame:
                return frame
            return replace(frame, frame=plain, assign=lambda: frame.assign()[list(self.spec.columns)])
        return self._in_order(frame, list(self.spec.columns), source)

    def _in_order(self, frame: Any, columns: list[Any], source: int) -> Any:
        if list(frame.columns) == columns:
            return frame
        missing = sorted(map(str, set(columns) - set(frame.columns)))
        extra = sorted(map(str, set(frame.columns) - set(columns)))
        if missing or extra:
            raise ValueError(
                f"input partition {source} of shuffle {self.spec.id} has other columns than the collection "
                f"says: missing {missing}, unexpected {extra}. All partitions need the columns of `df._meta`"
            )
        return frame[columns]


def _beginning_after(me: str, worker_for: dict[int, str]) -> list[tuple[int, str]]:
    """The outputs in order, from the first behind our own on: not all send to one owner first."""
    outputs = sorted(worker_for.items())
    mine = [at for at, (_, owner) in enumerate(outputs) if owner == me]
    start = mine[-1] + 1 if mine else 0
    return outputs[start:] + outputs[:start]


class _Packing:
    """One input partition on its way into the pool.

    Pieces are published once they are all packed, or as soon as one more does not fit:
    nobody waits for room while holding what nobody else knows of. An attempt that fails
    after that has no commit, and a later one takes the place of what it has published.
    """

    def __init__(self, producer: Producer, table: Table, outbox: Outbox, source: int, attempt: Attempt):
        self.producer = producer
        self.table = table
        self.outbox = outbox
        self.source = source
        self.attempt = attempt
        #: Shards that each owner has been offered.
        self._parts = Counter[str]()
        self._packed: list[tuple[str, Piece, Packed]] = []

    def publish_all(self, owned: list[tuple[str, Piece]]) -> None:
        with self.producer.exchange.metrics.seconds("shuffle.seconds.packing"):
            try:
                for owner, piece in owned:
                    self._pack(owner, piece)
                self._publish()
                self._commit()
            finally:  # when the run has ended meanwhile, or a piece could not be packed
                self._give_back()

    def _give_back(self) -> None:
        if self._packed:
            self.table.settle()  # whoever gets these blocks next shall not meet what still writes them
            for _, _, packed in self._packed:
                self.outbox.give_back(packed.block)

    def _pack(self, owner: str, piece: Piece) -> None:
        """Pack a piece, in halves where it does not fit into the pool as a whole."""
        try:
            packed = self._pack_whole(piece)  # which may publish what was packed before
        except PoolFull as full:
            if len(piece) < 2:
                raise ValueError(
                    f"one row of shuffle {self.producer.spec.id} takes {full.nbytes} bytes, "
                    f"gpurt.exchange.pool has {self.outbox.pool.capacity}: set it to at least that"
                ) from full
            for half in piece.halves(self.table.cut):
                if len(half):
                    self._pack(owner, half)
        else:
            self._packed.append((owner, piece, packed))

    def _pack_whole(self, piece: Piece) -> Packed:
        while True:
            self.producer.check()
            seen = self.outbox.freed
            try:
                return self.table.pack(piece, self.outbox)
            except PoolFull as full:
                self._publish()
                self.outbox.wait_for_room(full.nbytes, seen, self.producer.check)

    def _publish(self) -> None:
        self.table.settle()
        packed, self._packed = self._packed, []
        sections: dict[str, list[tuple[Piece, Packed]]] = {}
        for owner, piece, one in packed:
            sections.setdefault(owner, []).append((piece, one))
        for owner, mine in sections.items():
            shard = self.outbox.publish(self.producer.run, owner, (one.block for _, one in mine))
            self.producer.offer(owner, self._describe(shard, owner, mine))
            self._parts[owner] += 1

    def _commit(self) -> None:
        for owner in self.producer.owners:
            self.producer.offer(owner, Commit(self.source, self.attempt, self._parts[owner]))

    def _describe(self, shard: int, owner: str, packed: list[tuple[Piece, Packed]]) -> Shard:
        return Shard(
            id=shard,
            producer=self.producer.exchange.me,
            device=self.table.device.kind,
            source=self.source,
            attempt=self.attempt,
            part=self._parts[owner],
            sections=tuple(
                Section(piece.partitions, piece.offsets, one.block.offset, one.block.nbytes, one.header)
                for piece, one in packed
            ),
        )
