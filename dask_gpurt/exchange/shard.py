"""What producers tell owners about the bytes that wait for them."""

from __future__ import annotations

from dataclasses import dataclass

#: The shuffle and its run; what is published under an old run is never read under a new one.
RunKey = tuple[str, int]


class ExchangeClosed(Exception):
    """The run that a caller waited for is over; the message says why."""


@dataclass(frozen=True)
class Shard:
    """Where a packed piece lies, and what is in it.

    Attributes
    ----------
    id
        Unique within the producer.
    producer
        Address of the worker whose pool holds it.
    device
        Kind of that pool.
    source, attempt, part
        The input partition it was cut from, in which attempt of the producer, and which of
        several pieces it is: outputs are put together by source and part.
    offset, nbytes
        Where it lies in the pool.
    header
        What the table backend needs to read it.
    partitions, offsets
        The output partitions in it and the rows at which they begin; the number of rows
        last.
    """

    id: int
    producer: str
    device: str
    source: int
    attempt: int
    part: int
    offset: int
    nbytes: int
    header: bytes
    partitions: tuple[int, ...]
    offsets: tuple[int, ...]

    def filled(self) -> set[int]:
        """The output partitions that have rows in it."""
        ends = self.offsets[1:]
        return {
            p for p, start, stop in zip(self.partitions, self.offsets, ends, strict=False) if stop > start
        }
