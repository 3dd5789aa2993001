"""Send the shards of a run: split a partition, pack the pieces, offer them to their owners.

Decisions and their figures: ``docs/decisions/memory.md``.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dask.sizeof import sizeof

from dask_gpurt.device import PoolFull
from dask_gpurt.device.pool import SharedMemoryFull
from dask_gpurt.exchange import Attempt, Commit, Exchange, Shard
from dask_gpurt.exchange.outgoing import HostFull, Outbox
from dask_gpurt.exchange.shard import RunKey, Section
from dask_gpurt.frames import Packed, Packer, Piece
from dask_gpurt.observe import Fallback
from dask_gpurt.observe.progress import RunProgress
from dask_gpurt.shuffle.balance import InputSizes
from dask_gpurt.shuffle.owners import Owners, Share
from dask_gpurt.shuffle.spec import Input, RunSpec
from dask_gpurt.shuffle.splitting import split_and_retry

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class _Published:
    """Record a successful attempt.

    ``outputs``: the outputs that the input was split for.
    ``shards``: the shards as first offered, one for each block in the pool.
    ``empty``: see :class:`~dask_gpurt.exchange.shard.Commit`.
    """

    source: int
    attempt: Attempt
    outputs: frozenset[int]
    outbox: Outbox
    shards: tuple[Shard, ...]
    empty: bytes | None


#: Bytes of a shard from which on its outputs get sections of their own if it may not find room when it lands.
LEAST_DIVIDED_BYTES = 1 << 20


class Sender:
    """Publish the shards of input partitions.

    ``owners``: the owner of each output when the run starts.
    ``offer``: called with an owner and a published shard or a commit for it, in the calling thread.
    ``check``: raises if the run is over.
    ``progress``: counts the shards and bytes offered.
    """

    def __init__(
        self,
        spec: RunSpec,
        run: RunKey,
        owners: Owners,
        exchange: Exchange,
        offer: Callable[[str, Shard | Commit], None],
        check: Callable[[], None],
        progress: RunProgress,
    ):
        self.spec = spec
        self.run = run
        self.exchange = exchange
        self.offer = offer
        self.check = check
        self.progress = progress
        self._lock = threading.Lock()
        self.owners = owners
        self._published: dict[int, _Published] = {}
        self._retries = itertools.count()

    def add(self, data: Any, source: int, dispatch: int) -> Attempt:
        """Split an input partition, publish its shards, and commit the attempt to each share.

        Blocks while the exchange pool is full.

        ``dispatch``: orders attempts at this input across workers; see :class:`~dask_gpurt.exchange.Attempt`.
        """
        attempt = Attempt(dispatch, next(self._retries))
        ready = self.spec.input(data, source, self.exchange)
        outbox = self.exchange.pools.outbox(ready.packer.device.kind)
        metrics = self.exchange.metrics
        ready.count(metrics)
        owners = self.owners
        shares = _beginning_after(self.exchange.me.address, owners.open_shares())
        if not shares:  # every share is sealed: nothing of this input is needed
            return attempt
        groups = [(share, share.outputs) for share in shares]
        if self._will_spill(ready, len(groups)):
            groups = [(share, (output,)) for share, outputs in groups for output in outputs]

        def split(part: Input) -> list[tuple[Share, Piece]]:
            timed = metrics.seconds("shuffle.seconds.splitting", source)
            with timed, self.progress.seconds("splitting"):
                pieces = part.split([outputs for _, outputs in groups])
            shares_of = zip((share for share, _ in groups), pieces, strict=True)
            return [(share, piece) for share, piece in shares_of if piece is not None]

        packing = _Packing(self, ready.packer, outbox, source, attempt)
        # If the input has to be halved, the halves are parts of one attempt, in row order. The first half is
        # published, and its memory freed, before the second is split.
        for owned in self.in_parts(split, ready, lambda part: part.halves(), source):
            packing.publish_all(owned)
            owned.clear()
        outputs = frozenset(output for share in shares for output in share.outputs)
        # As with ``tasks``, outputs without rows are like the first input.
        empty = ready.empty() if source == 0 else None
        published = _Published(source, attempt, outputs, outbox, tuple(packing.shards), empty)
        self._end(published, owners, packing.commits(shares, empty))
        return attempt

    def sizes(self, source: int, attempt: Attempt) -> InputSizes | None:
        """Return the sizes of the outputs in an input; None unless this attempt has published it."""
        with self._lock:
            published = self._published.get(source)
        if published is None or published.attempt != attempt:
            return None
        sections = (section for shard in published.shards for section in shard.sections)
        return InputSizes.of(sections, len(published.outputs), whole=published.outbox.has_all(self.run))

    def in_parts(
        self, work: Callable[[T], R], whole: T, halve: Callable[[T], Sequence[T]], source: int, **errors: Any
    ) -> Iterator[R]:
        """Yield the results of ``work`` on an input, or on its parts: see :func:`split_and_retry`."""

        def on_split(error: MemoryError) -> None:
            reason = f"input {source} of shuffle {self.spec.id}, transferred: {error}"
            self.exchange.metrics.fallback(Fallback.MEMORY_SPLIT, reason)

        make_room = self.exchange.landing.make_room
        return split_and_retry(work, whole, halve=halve, make_room=make_room, on_split=on_split, **errors)

    def _end(self, published: _Published, owners: Owners, commits: list[tuple[str, Commit]]) -> None:
        """Commit an attempt, and offer its shards to shares that were created in the meantime."""
        # The event loop may run `renew` while this thread splits for the old owners. If `renew` takes the
        # lock second, it finds the attempt in `_published` and offers it to the new shares itself. If it took
        # the lock first, the new owners are read here.
        with self._lock:
            self._published[published.source] = published
            newer = self.owners
        for owner, commit in commits:
            self.offer(owner, commit)
        for share in newer.open_shares():
            if share.id not in owners.shares:
                for offer in self._offers_again(published, share):
                    self.offer(share.owner, offer)

    def renew(self, owners: Owners) -> list[tuple[str, Shard | Commit]]:
        """Switch to new owners. On the event loop.

        Returns the offers of published attempts to the owners of new shares, each with the owner.
        """
        with self._lock:
            before, self.owners = self.owners, owners
            published = list(self._published.values())
        self.exchange.pools.drop_shares(self.run, owners.left)
        return [
            (share.owner, offer)
            for share in owners.open_shares()
            if share.id not in before.shares
            for each in published
            for offer in self._offers_again(each, share)
        ]

    def _offers_again(self, published: _Published, share: Share) -> list[Shard | Commit]:
        """Publish an attempt for a share that was created later, if its blocks still exist.

        Otherwise there is no commit for that share, and the barrier reports the input as missing.
        """
        if not published.outputs.issuperset(share.outputs):
            return []
        shards = [shard for shard in published.shards if not shard.places().keys().isdisjoint(share.outputs)]
        if not published.outbox.publish_again([shard.id for shard in shards], share.id, share.owner):
            return []
        self.exchange.metrics.add("shuffle.recovered.shards", len(shards))
        again = [replace(shard, share=share.id, part=part) for part, shard in enumerate(shards)]
        commit = Commit(share.id, published.source, published.attempt, len(shards), published.empty)
        return [*again, commit]

    def _will_spill(self, ready: Input, shares: int) -> bool:
        """Return whether owners will probably have to spill shards, if other inputs are as large as this one.

        A spilled section is read back as a whole for each output in it, so each output then gets its own
        section. Otherwise fewer, larger sections are cheaper.
        """
        nbytes, shares, device = sizeof(ready.data), max(1, shares), ready.packer.device
        share = nbytes * self.spec.ninputs // shares
        with self._lock:
            published = len(self._published)
        # Shards that are read in place do not land, and small ones are read back quickly. Other producers
        # have probably published as many inputs as this one.
        lands = not device.reads_in_place and nbytes >= shares * LEAST_DIVIDED_BYTES
        coming = max(0, share - published * nbytes) if lands else 0
        return not self.exchange.landing.keeps(share, coming, device.kind)


def _beginning_after(me: str, shares: list[Share]) -> list[Share]:
    """Sort shares by output, starting after our own, so that producers do not all begin with one owner."""
    shares = sorted(shares, key=lambda share: share.outputs)
    mine = [at for at, share in enumerate(shares) if share.owner == me]
    start = mine[-1] + 1 if mine else 0
    return shares[start:] + shares[:start]


class _NotPacked(MemoryError):
    """Packing a piece ran out of memory, without side effects, so that it can be retried in halves.

    Any other MemoryError fails the attempt, because it may have lost pieces that were already packed.
    """


class _Packing:
    """Pack one input partition into the pool.

    Pieces are published once all are packed, or as soon as the next one does not fit. An attempt therefore
    never waits for room while holding unpublished blocks, which no owner could release. If it fails after
    publishing, it sends no commit, and a later attempt supersedes its shards.
    """

    def __init__(self, sender: Sender, packer: Packer, outbox: Outbox, source: int, attempt: Attempt):
        self.sender = sender
        self.packer = packer
        self.outbox = outbox
        self.source = source
        self.attempt = attempt
        #: Shards that have been offered.
        self.shards: list[Shard] = []
        self._parts = Counter[int]()
        #: Packed but unpublished pieces, by share.
        self._packed: dict[Share, list[tuple[Piece, Packed]]] = {}

    def publish_all(self, owned: list[tuple[Share, Piece]]) -> None:
        metrics, progress = self.sender.exchange.metrics, self.sender.progress
        timed = metrics.seconds("shuffle.seconds.packing", self.source)
        with timed, progress.seconds("packing"):
            try:
                for share, piece in owned:
                    self._pack(share, piece)
                self._publish()
            finally:  # pieces are left if the run has ended or packing has failed
                self._give_back()

    def commits(self, shares: Iterable[Share], empty: bytes | None) -> list[tuple[str, Commit]]:
        """Return the commits of the attempt, one for each share."""
        return [
            (share.owner, Commit(share.id, self.source, self.attempt, self._parts[share.id], empty))
            for share in shares
        ]

    def _give_back(self) -> None:
        if self._packed:
            self.packer.settle()  # no pending copy may write to these blocks once they are reused
            for _, packed in itertools.chain.from_iterable(self._packed.values()):
                self.outbox.give_back(packed.block)

    def _pack(self, share: Share, piece: Piece) -> None:
        """Pack a piece, in halves if it is larger than the pool or memory is short."""
        # Each part has to be in `_packed` before the next one is packed, since that may publish `_packed`.
        errors = {"short": _NotPacked, "too_large": (PoolFull,)}
        parts = self.sender.in_parts(self._pack_whole, piece, self._halves, self.source, **errors)
        try:
            for part, packed in parts:
                self._packed.setdefault(share, []).append((part, packed))
        except HostFull as full:
            raise SharedMemoryFull(full.advice) from full
        except PoolFull as full:
            raise ValueError(
                f"{self.sender.spec.smallest} takes {full.nbytes} bytes, "
                f"gpurt.exchange.pool has {self.outbox.pool.capacity}: set it to at least the former"
            ) from full

    def _halves(self, piece: Piece) -> Sequence[Piece]:
        return piece.halves(self.packer.cut) if len(piece) > 1 else ()

    def _pack_whole(self, piece: Piece) -> tuple[Piece, Packed]:
        while True:
            self.sender.check()
            seen = self.outbox.room.wakes
            try:
                return piece, self.packer.pack(piece, self.outbox)
            except MemoryError as error:
                raise _NotPacked(*error.args) from error
            except PoolFull as full:
                self._publish()
                self.outbox.wait_for_room(full.nbytes, seen, self.sender.check)

    def _publish(self) -> None:
        self.packer.settle()
        while self._packed:
            share = next(iter(self._packed))
            self._publish_shard(share, self._packed.pop(share))

    def _publish_shard(self, share: Share, packed: list[tuple[Piece, Packed]]) -> None:
        sender = self.sender
        id_ = self.outbox.publish(sender.run, share.id, share.owner, (one.block for _, one in packed))
        try:
            # When the event loop ends the run, it first marks it as closed and then withdraws its blocks. If
            # it withdraws after this block was published, it finds the block. Otherwise the run was already
            # closed, and this check raises. Without it the block would leak until the worker exits.
            sender.check()
        except BaseException:
            self.outbox.release([(id_, share.id)])
            raise
        shard = self._describe(id_, share, packed)
        self.shards.append(shard)
        sender.progress.offered(shard.nbytes)
        sender.offer(share.owner, shard)
        self._parts[share.id] += 1
        # The owner may have left since this attempt started. `renew` sets the new owners before it drops
        # shares from the outbox. So if it dropped them before this block was published, the new owners are
        # visible here.
        if share.id in sender.owners.left:
            self.outbox.drop_shares(sender.run, [share.id])

    def _describe(self, id_: int, share: Share, packed: list[tuple[Piece, Packed]]) -> Shard:
        return Shard(
            id=id_,
            producer=self.sender.exchange.me,
            device=self.packer.device.kind,
            share=share.id,
            source=self.source,
            attempt=self.attempt,
            part=self._parts[share.id],
            sections=tuple(
                Section(piece.partitions, piece.offsets, one.block.offset, one.block.nbytes, one.header)
                for piece, one in packed
            ),
        )
