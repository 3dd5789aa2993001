"""Define the descriptions that producers send to owners: peers, attempts, shards, commits."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

#: Ids of a shuffle and its run. Shards of one run are never read by another.
RunKey = tuple[str, int]


class ExchangeClosed(Exception):
    """The run or the exchange has ended; the message says which."""


class PeerError(RuntimeError):
    """A peer is unusable, for example because of its version; the message says how to fix it."""


class PeerLost(PeerError):
    """A peer has left, was replaced or cannot be reached; the run may recover or restart without it."""


class Peer(NamedTuple):
    """Identify one incarnation of a worker's exchange.

    The address alone is ambiguous: a worker restarted by its nanny keeps the address, but has a new pool, new
    shards and new ids.
    """

    address: str
    #: Random, new for each exchange.
    incarnation: str

    @classmethod
    def begin(cls, address: str) -> Peer:
        """Create a new incarnation at an address."""
        return cls(address, secrets.token_hex(8))


class Attempt(NamedTuple):
    """Identify one attempt at transferring an input partition.

    Later attempts compare greater, even across workers.

    ``dispatch``: the ``run_id`` of the transfer task, which Dask's scheduler increments each time it sends
    the task to a worker.
    ``retry``: orders the attempts of one dispatch, all of which run on one worker.
    """

    dispatch: int
    retry: int


@dataclass(frozen=True)
class Section:
    """Describe rows that were packed into one block.

    ``partitions``, ``offsets``: the output partitions in it, and the rows at which they start, followed by
    the number of rows.
    ``offset``, ``nbytes``: its place in the pool.
    ``header``: the table backend's description of its layout.
    """

    partitions: tuple[int, ...]
    offsets: tuple[int, ...]
    offset: int
    nbytes: int
    header: bytes

    def filled(self) -> Iterator[tuple[int, int]]:
        """Yield the output partitions that have rows in it, with their indices in ``partitions``."""
        for at, partition in enumerate(self.partitions):
            if self.offsets[at + 1] > self.offsets[at]:
                yield partition, at


@dataclass(frozen=True)
class Shard:
    """Describe the rows of one input partition for one share, or a part of them.

    ``id``: unique within an incarnation of the producer.
    ``producer``: the exchange whose pool holds it.
    ``device``: the kind of device of that pool.
    ``share``: the share that it is offered for, which has some or all of the outputs in its sections.
    ``source``, ``attempt``, ``part``: the input partition, the attempt at it, and the number of the shard
    within the attempt and share. Outputs are assembled in the order of source, part and section.
    ``sections``: usually one; several if outputs are to be read separately.
    """

    id: int
    producer: Peer
    device: str
    share: int
    source: int
    attempt: Attempt
    part: int
    sections: tuple[Section, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all sections."""
        return sum(section.nbytes for section in self.sections)

    @property
    def name(self) -> str:
        """Return a name for traces that is unique in the cluster."""
        return f"{self.producer.incarnation}.{self.device}.{self.id}"

    def places(self) -> dict[int, list[tuple[int, int]]]:
        """Map output partitions to their places: pairs of a section and an index within it."""
        places: dict[int, list[tuple[int, int]]] = {}
        for which, section in enumerate(self.sections):
            for partition, at in section.filled():
                places.setdefault(partition, []).append((which, at))
        return places


@dataclass(frozen=True)
class Commit:
    """Complete an attempt for one share, even if there are no shards for it.

    ``source``, ``attempt``: the input partition, and the attempt that has published all of its shards.
    ``empty``: what an output without rows looks like, pickled, if only inputs know.
    """

    share: int
    source: int
    attempt: Attempt
    parts: int
    empty: bytes | None = None
