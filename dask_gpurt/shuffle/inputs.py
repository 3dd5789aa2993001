"""Track which shards of each input partition a share has, so that each row counts exactly once. Pure.

An input partition is cut by a transfer task, in attempts that the scheduler orders. Each attempt publishes
parts 0, 1, … for each share, and ends with a commit that says how many. A message may come twice, late or
not at all, and an attempt may end in the middle, its task to be run again elsewhere. Therefore

- of two attempts only the later one counts: what the earlier one has published is outdated;
- a part that is known is ignored, and so is a commit;
- an input is complete once its commit and all of its parts are there;
- the barrier seals the run with the attempts that have succeeded. From then on nothing changes, and what
  is missing is told.

Missing parts are transferred again: no row is lost silently. docs/design/exactly-once.md
has the whole protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from dask_gpurt.exchange.shard import Attempt

T = TypeVar("T")


class Offered(Enum):
    """Name what an offer is to an owner."""

    NEW = "to be taken"
    REPEATED = "known already"
    STALE = "of an attempt that does not count"


@dataclass
class Input(Generic[T]):
    """Keep the parts of one attempt at an input partition."""

    attempt: Attempt
    parts: dict[int, T] = field(default_factory=dict)
    #: The number of parts, None before the commit.
    expected: int | None = None
    #: Whether a part can not be had.
    lost: bool = False

    @property
    def complete(self) -> bool:
        return not self.lost and len(self.parts) == self.expected


class Inputs(Generic[T]):
    """Track the input partitions of a run, as the owner of a share knows them. Not thread-safe."""

    def __init__(self) -> None:
        self._inputs: dict[int, Input[T]] = {}
        #: The attempts that count, once the barrier has said so.
        self._sealed: Mapping[int, Attempt] | None = None

    def classify(self, source: int, attempt: Attempt, part: int) -> Offered:
        """Classify an offered part, without a change."""
        known = self._inputs.get(source)
        if self._sealed is not None and self._sealed.get(source) != attempt:
            return Offered.STALE
        if known is None or known.attempt < attempt:
            return Offered.NEW
        if known.attempt > attempt or known.lost:
            return Offered.STALE
        return Offered.REPEATED if part in known.parts else Offered.NEW

    def add(self, source: int, attempt: Attempt, part: int, shard: T) -> list[T]:
        """Add a part that is new; returns what it outdates."""
        assert self.classify(source, attempt, part) is Offered.NEW
        outdated = self._advance(source, attempt)
        self._inputs[source].parts[part] = shard
        return outdated

    def commit(self, source: int, attempt: Attempt, parts: int) -> list[T]:
        """Note the end of an attempt; returns what it outdates. A stale or repeated one changes nothing."""
        if self._sealed is not None and self._sealed.get(source) != attempt:
            return []
        outdated = self._advance(source, attempt)
        known = self._inputs[source]
        if known.attempt == attempt:
            known.expected = parts
        return outdated

    def _advance(self, source: int, attempt: Attempt) -> list[T]:
        """Begin an attempt if it is later than the known one."""
        known = self._inputs.get(source)
        if known is not None and known.attempt >= attempt:
            return []
        self._inputs[source] = Input(attempt)
        return [] if known is None else list(known.parts.values())

    def lose(self, source: int, attempt: Attempt) -> list[T]:
        """Note that a part of an attempt can not be had: only a later one counts. Return the other parts.

        A shard that was released is never taken again, even if it is offered once more: its producer may
        reuse the block as soon as the first release arrives.
        """
        known = self._inputs.get(source)
        if known is not None and known.attempt > attempt:
            return []
        self._inputs[source] = Input(attempt, lost=True)
        return [] if known is None else list(known.parts.values())

    @property
    def sealed(self) -> bool:
        """Return whether the barrier has found all of them complete."""
        return self._sealed is not None

    def seal(self, succeeded: Mapping[int, Attempt]) -> set[int]:
        """Close the list of shards, unless something is missing; return the inputs that it is missing of.

        Parameters
        ----------
        succeeded
            The attempt that has succeeded at each input.
        """
        missing = {source for source, attempt in succeeded.items() if not self._has(source, attempt)}
        if not missing:
            self._sealed = succeeded
        return missing

    def _has(self, source: int, attempt: Attempt) -> bool:
        known = self._inputs.get(source)
        return known is not None and known.attempt == attempt and known.complete
