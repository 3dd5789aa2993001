"""Track the received shards of each input partition, so that each row counts exactly once. Pure.

A transfer task splits an input partition in one or more attempts, which the scheduler orders. Each attempt
publishes parts 0, 1, … for each share, and ends with a commit that has their number. Messages may be
duplicated, delayed or lost, and an attempt may fail halfway and be retried on another worker. Therefore

- of two attempts only the later one counts, and supersedes the parts of the earlier one;
- parts and commits are idempotent;
- an input is complete once its commit and all of its parts have been received;
- the barrier seals the run with the successful attempts. A seal either reports the incomplete inputs, or
  fixes the list of shards for good.

Missing parts are transferred again, so no row is lost silently. docs/design/exactly-once.md describes the
protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from dask_gpurt.exchange.shard import Attempt

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
