"""Receive the shards of a run: accept offers, assemble output partitions."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

from dask.typing import Key

from dask_gpurt.device.pool import Buffer
from dask_gpurt.exchange import Attempt, Commit, Exchange, ExchangeClosed, PeerLost, Shard
from dask_gpurt.exchange.incoming import IncomingShard, reading
from dask_gpurt.exchange.shard import RunKey, Section
from dask_gpurt.frames import Part
from dask_gpurt.observe.progress import RunProgress
from dask_gpurt.shuffle.owners import Owners, Share
from dask_gpurt.shuffle.spec import Assembler, RunSpec

# ---- which offered parts count. Pure -----------------------------------------------------------------
#
# A transfer task splits an input partition in one or more attempts, which the scheduler orders. Each
# attempt publishes parts 0, 1, … for each share, and ends with a commit that has their number. Messages may
# be duplicated, delayed or lost, and an attempt may fail halfway and be retried on another worker.
# Therefore
#
# - of two attempts only the later one counts, and supersedes the parts of the earlier one;
# - parts and commits are idempotent;
# - an input is complete once its commit and all of its parts have been received;
# - the barrier seals the run with the successful attempts. A seal either reports the incomplete inputs, or
#   fixes the list of shards for good.
#
# Missing parts are transferred again, so no row is lost silently. docs/design/exactly-once.md describes the
# protocol.

T = TypeVar("T")


class Offered(Enum):
    """Classify an offered part."""

    NEW = "to be taken"
    REPEATED = "known already"
    STALE = "of an attempt that does not count"


@dataclass
class ReceivedInput(Generic[T]):
    """Hold the received parts of one attempt at an input partition."""

    attempt: Attempt
    parts: dict[int, T] = field(default_factory=dict)
    #: The number of parts, None before the commit.
    expected: int | None = None
    #: Whether a part was lost, so that only a later attempt can complete the input.
    lost: bool = False
    #: What an output without rows looks like, if the commit has it.
    empty: bytes | None = None

    @property
    def complete(self) -> bool:
        return not self.lost and len(self.parts) == self.expected


class Inputs(Generic[T]):
    """Track the input partitions of a run for one share, on its owner. Not thread-safe."""

    def __init__(self) -> None:
        self._inputs: dict[int, ReceivedInput[T]] = {}
        #: The successful attempts; None before the seal.
        self._sealed: Mapping[int, Attempt] | None = None

    def classify(self, source: int, attempt: Attempt, part: int) -> Offered:
        """Classify an offered part, without side effects."""
        known = self._inputs.get(source)
        if self._sealed is not None and self._sealed.get(source) != attempt:
            return Offered.STALE
        if known is None or known.attempt < attempt:
            return Offered.NEW
        if known.attempt > attempt or known.lost:
            return Offered.STALE
        return Offered.REPEATED if part in known.parts else Offered.NEW

    def add(self, source: int, attempt: Attempt, part: int, shard: T) -> list[T]:
        """Add a new part; return the parts that it supersedes."""
        assert self.classify(source, attempt, part) is Offered.NEW
        outdated = self._advance(source, attempt)
        self._inputs[source].parts[part] = shard
        return outdated

    def commit(self, source: int, attempt: Attempt, parts: int, empty: bytes | None = None) -> list[T]:
        """Commit an attempt; return the parts that it supersedes. Stale and repeated commits are ignored."""
        if self._sealed is not None and self._sealed.get(source) != attempt:
            return []
        outdated = self._advance(source, attempt)
        known = self._inputs[source]
        if known.attempt == attempt:
            known.expected, known.empty = parts, empty
        return outdated

    @property
    def empty(self) -> bytes | None:
        """Return what an output without rows looks like, if the attempt at the first input has said so."""
        first = self._inputs.get(0)
        return None if first is None else first.empty

    def _advance(self, source: int, attempt: Attempt) -> list[T]:
        """Start an attempt if it is later than the known one; return the parts that it supersedes."""
        known = self._inputs.get(source)
        if known is not None and known.attempt >= attempt:
            return []
        self._inputs[source] = ReceivedInput(attempt)
        return [] if known is None else list(known.parts.values())

    def lose(self, source: int, attempt: Attempt) -> list[T]:
        """Mark an attempt as lost, so that only a later one counts; return its other parts.

        A released shard is never accepted again, even if it is offered again: its producer may reuse the
        block as soon as the first release arrives.
        """
        known = self._inputs.get(source)
        if known is not None and known.attempt > attempt:
            return []
        self._inputs[source] = ReceivedInput(attempt, lost=True)
        return [] if known is None else list(known.parts.values())

    @property
    def sealed(self) -> bool:
        """Return whether the barrier has found all inputs complete."""
        return self._sealed is not None

    def seal(self, succeeded: Mapping[int, Attempt]) -> set[int]:
        """Close the list of shards if all inputs are complete; otherwise return the incomplete ones.

        ``succeeded``: the successful attempt at each input.
        """
        missing = {source for source, attempt in succeeded.items() if not self._has(source, attempt)}
        if not missing:
            self._sealed = succeeded
        return missing

    def _has(self, source: int, attempt: Attempt) -> bool:
        known = self._inputs.get(source)
        return known is not None and known.attempt == attempt and known.complete


# ---- on a worker -------------------------------------------------------------------------------------


class NotReceived(Exception):
    """An output cannot be assembled: it is incomplete or its shards were released; the message says which."""


@dataclass
class _Received:
    """Hold the received shards of a share.

    ``outputs``: the outputs still to be read. Each maps the incoming shards that have rows of it to the
    section and the position within the section of those rows.
    """

    inputs: Inputs[IncomingShard] = field(default_factory=Inputs)
    outputs: dict[int, dict[IncomingShard, list[tuple[int, int]]]] = field(default_factory=dict)


class Receiver:
    """Hold the shards offered to this worker until their outputs are in memory.

    The shards of an output are released only once the scheduler has accepted the result of the task that
    assembled it, so that a task that fails after reading, or whose result is refused, can be retried.

    ``check``: raises if the run is over.
    ``failed``: called with an accepted shard and the error if its bytes cannot be read.
    """

    def __init__(
        self,
        spec: RunSpec,
        run: RunKey,
        owners: Owners,
        exchange: Exchange,
        check: Callable[[], None],
        failed: Callable[[Shard, Exception], None],
        progress: RunProgress,
    ):
        self.spec = spec
        self.run = run
        self.exchange = exchange
        self._check = check
        self._failed = failed
        self._progress = progress
        self._lock = threading.Lock()
        self._closed = False
        self._shares: dict[int, _Received] = {}
        self._share_of: dict[int, _Received] = {}
        #: For each incoming shard, the number of its outputs still to be read.
        self._unread: dict[IncomingShard, int] = {}
        self._readers: dict[Key, dict[int, _Received]] = {}
        self.renew(owners)

    # ---- shares ----------------------------------------------------------------------

    def renew(self, owners: Owners) -> list[IncomingShard]:
        """Add new shares and drop those that have moved; return the incoming shards no longer needed."""
        mine = {id_: share for id_, share in owners.shares.items() if share.owner == self.exchange.me.address}
        with self._lock:
            finished: list[IncomingShard] = []
            if self._closed:
                return finished
            for id_ in list(self._shares):
                finished += self._keep(id_, mine.get(id_))
            for id_, share in mine.items():
                if id_ not in self._shares:
                    received = _Received(outputs={output: {} for output in share.outputs})
                    self._shares[id_] = received
                    self._share_of |= dict.fromkeys(share.outputs, received)
        return finished

    def _keep(self, id_: int, share: Share | None) -> list[IncomingShard]:
        """Forget outputs that left a share; return the incoming shards no longer needed. Under the lock."""
        received = self._shares[id_]
        kept = () if share is None else share.outputs
        finished = []
        for output in [output for output in received.outputs if output not in kept]:
            finished += self._finish(received, output)
        for output in [o for o, of in self._share_of.items() if of is received and o not in kept]:
            del self._share_of[output]
        if share is None:
            del self._shares[id_]
        return finished

    def _finish(self, received: _Received, output: int) -> list[IncomingShard]:
        """Forget an output; return the incoming shards no longer needed. Under the lock."""
        finished = []
        for incoming in received.outputs.pop(output, ()):
            self._unread[incoming] -= 1
            if not self._unread[incoming]:
                del self._unread[incoming]
                finished.append(incoming)
        return finished

    # ---- offers ----------------------------------------------------------------------

    async def receive(self, offers: Iterable[Shard | Commit]) -> None:
        """Handle the offers of a producer; repeated and stale ones are ignored.

        Raises ExchangeClosed if the run is over.
        """
        for offer in offers:
            self._check()
            if isinstance(offer, Shard):
                outdated = await self._take(offer)
            else:
                outdated = self._commit(offer)
            if outdated:
                self.exchange.metrics.add("shuffle.shards.{answer}", len(outdated), "outdated")
                await self.exchange.offload(self.exchange.discard, outdated)

    def _commit(self, commit: Commit) -> list[IncomingShard]:
        with self._lock:
            if (received := self._shares.get(commit.share)) is None:
                return []
            superseded = received.inputs.commit(commit.source, commit.attempt, commit.parts, commit.empty)
            return self._drop(received, superseded)

    async def _take(self, shard: Shard) -> list[IncomingShard]:
        """Accept a shard if it is new; return the incoming shards that it supersedes."""
        try:
            path = await self.exchange.path(shard)
        except PeerLost:
            path = None
        # During the await above, the same shard may have been offered again, or the run may have ended. There
        # is no await between here and the point where the shard is added.
        with self._lock:
            if self._closed:
                raise ExchangeClosed(f"shuffle {self.run} is over")
            received = self._shares.get(shard.share)
            offered = Offered.STALE
            if received is not None:
                offered = received.inputs.classify(shard.source, shard.attempt, shard.part)
            if received is None or offered is not Offered.NEW:
                self.exchange.metrics.add("shuffle.shards.{answer}", 1, offered.name.lower())
                if offered is Offered.STALE:  # else its block would stay in the producer's pool until the end
                    self.exchange.refuse(shard)
                return []
            incoming = None
            if path is not None:
                with contextlib.suppress(PeerLost):
                    incoming = self.exchange.take(self.run, shard, path, partial(self._failed, shard))
            if incoming is None:  # the barrier reports the input as missing
                # Refuse it nonetheless: if the producer is alive after all, it would keep the block forever.
                self.exchange.refuse(shard)
                return self._drop(received, received.inputs.lose(shard.source, shard.attempt))
            self._progress.received(shard.nbytes)
            outdated = received.inputs.add(shard.source, shard.attempt, shard.part, incoming)
            outdated = self._drop(received, outdated)
            places = {o: where for o, where in shard.places().items() if o in received.outputs}
            for output, where in places.items():
                received.outputs[output][incoming] = where
            if places:
                self._unread[incoming] = len(places)
            else:
                outdated.append(incoming)
        return outdated

    def _drop(self, received: _Received, incoming_shards: Iterable[IncomingShard]) -> list[IncomingShard]:
        """Forget superseded incoming shards; return those that were still held. Under the lock."""
        held = [incoming for incoming in incoming_shards if self._unread.pop(incoming, None) is not None]
        for incoming in held:
            for places in received.outputs.values():
                places.pop(incoming, None)
        return held

    def lose(self, shard: Shard) -> tuple[list[IncomingShard], list[int]]:
        """Handle the loss of a shard.

        Returns the incoming shards that are useless without it, and the outputs that have to be received
        again. The outputs are empty before the seal, since the barrier then reports the input as missing.
        """
        with self._lock:
            if (received := self._shares.get(shard.share)) is None:
                return [], []
            if received.inputs.sealed:
                return [], [output for output in shard.places() if output in received.outputs]
            return self._drop(received, received.inputs.lose(shard.source, shard.attempt)), []

    def seal(self, succeeded: Mapping[int, Attempt]) -> set[int]:
        """Seal all complete shares; return the inputs that the incomplete ones are missing."""
        with self._lock:
            open_ = [received.inputs for received in self._shares.values() if not received.inputs.sealed]
            return {source for inputs in open_ for source in inputs.seal(succeeded)}

    # ---- outputs ---------------------------------------------------------------------

    def assemble(self, partition: int, key: Key) -> Any:
        """Assemble an output from the rows of all inputs, in the order of inputs.

        ``key``: the calling task.
        Raises NotReceived if the share of the output is not sealed, or its shards have been released.
        """
        with self._lock:
            # Read the seal and the shards under one lock: the event loop changes both together when it moves
            # outputs or takes inputs that are transferred again.
            received = self._share_of.get(partition)
            if received is None or not received.inputs.sealed:
                raise NotReceived(f"output {partition} is incomplete")
            if partition not in received.outputs:
                raise NotReceived(f"the shards of output {partition} have been released")
            self._readers.setdefault(key, {})[partition] = received
            places, empty = list(received.outputs[partition].items()), received.inputs.empty
        places.sort(key=lambda place: (place[0].shard.source, place[0].shard.part))
        wanted = [(incoming, which, at) for incoming, mine in places for which, at in mine]
        landing = self.exchange.landing
        sections = [(incoming, which) for incoming, which, _ in wanted]
        read = reading(sections, landing, self._check, key)
        timed = self.exchange.metrics.seconds("shuffle.seconds.assembling", partition)
        with read as found, timed, self._progress.seconds("assembling"):
            parts = [
                _part(incoming.shard.sections[which], at, *bytes_)
                for (incoming, which, at), bytes_ in zip(wanted, found, strict=True)
            ]
            output, packer = self._assembler.assemble(parts, empty)
            fence = packer.fence()
            for incoming, _ in places:
                incoming.read_until(fence)
        self._progress.assembled(
            partition, sum(_rows(incoming.shard.sections[which], at) for incoming, which, at in wanted)
        )
        return output

    @cached_property
    def _assembler(self) -> Assembler:
        # Lazy, since this may import libraries.
        return self.spec.assembler(self.exchange)

    def task_done(self, key: Key) -> list[IncomingShard]:
        """Note that the result of a task is accepted; return the incoming shards no longer needed."""
        if (
            key not in self._readers
        ):  # the common case, checked without the lock: only tasks of this run add themselves
            return []
        with self._lock:
            finished: list[IncomingShard] = []
            for partition, received in self._readers.pop(key, {}).items():
                if self._share_of.get(partition) is received:  # otherwise it is being received again
                    finished += self._finish(received, partition)
            return finished

    @property
    def is_read(self) -> bool:
        """Return whether there is no output left to read."""
        with self._lock:
            return not any(received.outputs for received in self._shares.values())

    def close(self) -> None:
        """Release all shards; those being read, with their last reader. Blocks."""
        with self._lock:
            self._closed = True
            incoming_shards = list(self._unread)
            self._unread.clear()
            self._shares.clear()
            self._share_of.clear()
        self.exchange.discard(incoming_shards)


def _rows(section: Section, at: int) -> int:
    return section.offsets[at + 1] - section.offsets[at]


def _part(section: Section, at: int, buffer: Buffer, memo: dict[str, Any]) -> Part:
    return Part(section.header, buffer, section.offsets, at, memo)
