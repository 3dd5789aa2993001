"""Define the report of a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Ending(StrEnum):
    """Define the ways in which an operation may end."""

    RIGHT = "right"
    #: An error that a fault of the step explains: Dask itself would have failed too, or memory was refused.
    FAILED = "failed with an error"
    WRONG = "wrong"
    HUNG = "hung"
    #: An error that no fault of the step explains.
    UNEXPLAINED = "unexplained error"


#: Endings that are never allowed.
NEVER = (Ending.WRONG, Ending.HUNG, Ending.UNEXPLAINED)


@dataclass(frozen=True)
class Outcome:
    """Record how an operation ended, or that it hung."""

    step: int
    kind: str
    faults: tuple[str, ...]
    seconds: float
    ending: Ending
    #: The difference, or the error and its causes.
    detail: str = ""
    traceback: str = ""


@dataclass
class Report:
    """Record a run: the operations, the faults, and the outcomes."""

    seed: int
    workers: int
    seconds: float = 0.0
    steps: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    #: Number of faults by kind, and number of messages, processes or allocations that they hit.
    faults: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    #: Number of workers replaced because Dask's nannies failed to restart them.
    given_up: int = 0
    #: Resources that were still held at the end.
    left: list[str] = field(default_factory=list)
    #: Seconds since the start, and mean anonymous memory of a worker between steps, in bytes.
    memory: list[tuple[float, int]] = field(default_factory=list)
    #: Files with descriptions of hangs.
    dumps: list[str] = field(default_factory=list)

    def count(self, ending: Ending, kind: str | None = None) -> int:
        """Count operations with an ending, of one kind or of all kinds."""
        return sum(one.ending is ending and kind in (None, one.kind) for one in self.outcomes)

    @property
    def is_well(self) -> bool:
        """Return whether operations ran, none ended in a way of :data:`NEVER`, and no resource was left."""
        return bool(self.outcomes) and not self.left and not any(map(self.count, NEVER))

    def kinds(self) -> list[str]:
        """Return the kinds of operations that ran."""
        return sorted({one.kind for one in self.outcomes})

    def bad(self) -> list[Outcome]:
        """Return the operations that ended in a way of :data:`NEVER`."""
        return [one for one in self.outcomes if one.ending in NEVER]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-serialisable values; of the outcomes only those that are not right."""
        ended = {kind: {str(one): self.count(one, kind) for one in Ending} for kind in self.kinds()}
        return {
            **vars(self),
            "well": self.is_well,
            "operations": ended,
            "outcomes": [asdict(one) for one in self.outcomes if one.ending is not Ending.RIGHT],
        }
