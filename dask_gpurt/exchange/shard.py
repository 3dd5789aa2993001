"""Describe to owners the bytes that wait for them: peers, attempts, shards, commits."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

#: The shuffle and its run; what is published under an old run is never read under a new one.
RunKey = tuple[str, int]


class ExchangeClosed(Exception):
    """The run that a caller waited for is over; the message says why."""


class PeerError(RuntimeError):
    """A peer cannot be worked with; the message says what would be right."""


class PeerLost(PeerError):
    """A peer has left, was replaced, or cannot be reached: a run that begins again may do without it."""


class Peer(NamedTuple):
    """Identify one incarnation of one worker's exchange.

    The address alone does not identify it: a worker that is restarted by its nanny has the address of the
    one before, and another pool, other shards and other ids.
    """

    address: str
    #: Made anew with each exchange.
    incarnation: str

    @classmethod
    def begin(cls, address: str) -> Peer:
        """Begin a life at an address."""
        return cls(address, secrets.token_hex(8))


class Attempt(NamedTuple):
    """Identify one try to transfer an input partition.

    Later tries compare greater, on whichever worker they run.

    Attributes
    ----------
    dispatch
        The ``run_id`` of the transfer task. Dask's scheduler counts it up each time that it sends a task to a
        worker.
    retry
        Orders the tries of one dispatch, all of which run on one worker.
    """

    dispatch: int
    retry: int


@dataclass(frozen=True)
class Section:
    """Describe rows that were packed into one block.

    Attributes
    ----------
    partitions, offsets
        The output partitions in it and the rows at which they begin; the number of rows
        last.
    offset, nbytes
        Where it lies in the pool.
    header
        What the table backend needs to read it.
    """

    partitions: tuple[int, ...]
    offsets: tuple[int, ...]
    offset: int
    nbytes: int
    header: bytes

    def filled(self) -> Iterator[tuple[int, int]]:
        """Yield the output partitions that have rows in it, and where they stand in ``partitions``."""
        for at, partition in enumerate(self.partitions):
            if self.offsets[at + 1] > self.offsets[at]:
                yield partition, at


@dataclass(frozen=True)
class Shard:
    """Describe the rows of one input partition that one share gets, or a part of them.

    Attributes
    ----------
    id
        Unique within the producer's life.
    producer
        The exchange whose pool holds it.
    device
        Kind of that pool.
    share
        The outputs that it was offered for, some or all of those in its sections.
    source, attempt, part
        The input partition it was cut from, in which attempt, and which of several shards for its share it
        is: outputs are put together by source, part and section.
    sections
        Usually one; many when outputs are to be read one by one.
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
        """Return a name that no other shard of a cluster has, for traces."""
        return f"{self.producer.incarnation}.{self.device}.{self.id}"

    def places(self) -> dict[int, list[tuple[int, int]]]:
        """Return where output partitions have rows: in which sections, and where they stand in each."""
        places: dict[int, list[tuple[int, int]]] = {}
        for which, section in enumerate(self.sections):
            for partition, at in section.filled():
                places.setdefault(partition, []).append((which, at))
        return places


@dataclass(frozen=True)
class Commit:
    """End an attempt for one share, which may get no shard of it at all.

    Attributes
    ----------
    share
        The outputs that it is about.
    source, attempt
        The input partition, and the attempt that has published all of it.
    parts
        How many shards there are.
    """

    share: int
    source: int
    attempt: Attempt
    parts: int
