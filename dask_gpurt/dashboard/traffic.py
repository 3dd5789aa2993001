"""Sum transfers between the workers of a cluster, or between its hosts. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

#: Workers or hosts that are told apart, and the name of all others together.
MAX_ENDS, OTHERS = 32, "(others)"


@dataclass
class Flow:
    """Hold the transfers from one end to another.

    Attributes
    ----------
    by_path
        Bytes by path.
    copied, seconds
        Bytes that were copied, and the seconds of that; what is read in place takes no time.
    """

    by_path: dict[str, int] = field(default_factory=dict)
    copied: int = 0
    seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        """Return the bytes over all paths."""
        return sum(self.by_path.values())

    @property
    def bandwidth(self) -> float | None:
        """Return the bytes per second while they are copied, None if nothing was."""
        return self.copied / self.seconds if self.seconds > 0 else None


class TrafficMatrix:
    """Keep the flow between each two ends, up to a number of ends."""

    def __init__(self, max_ends: int = MAX_ENDS) -> None:
        self._max_ends = max_ends
        self._ends: dict[str, None] = {}
        self._flows: dict[tuple[str, str], Flow] = {}

    def add(self, source: str, target: str, path: str, nbytes: int, seconds: float) -> None:
        """Add transfers that are over."""
        flow = self._flows.setdefault((self._end(source), self._end(target)), Flow())
        flow.by_path[path] = flow.by_path.get(path, 0) + nbytes
        if seconds > 0:
            flow.copied += nbytes
            flow.seconds += seconds

    def _end(self, name: str) -> str:
        if name not in self._ends:
            if len(self._ends) >= self._max_ends:
                return OTHERS
            self._ends[name] = None
        return name

    @property
    def ends(self) -> list[str]:
        """Return the workers or hosts, those that moved bytes first in front."""
        beyond = any(OTHERS in pair for pair in self._flows)
        return [*self._ends, *([OTHERS] if beyond else [])]

    def flows(self) -> Iterable[tuple[str, str, Flow]]:
        """Return source, target and flow of each pair with transfers."""
        return [(source, target, flow) for (source, target), flow in self._flows.items()]
