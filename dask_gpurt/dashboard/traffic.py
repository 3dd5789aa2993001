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

    def add(self, other: Flow) -> None:
        """Add another flow."""
        for path, nbytes in other.by_path.items():
            self.by_path[path] = self.by_path.get(path, 0) + nbytes
        self.copied += other.copied
        self.seconds += other.seconds

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
        #: Whether each has left; in the order of their first transfers.
        self._ends: dict[str, bool] = {}
        self._flows: dict[tuple[str, str], Flow] = {}

    def add(self, source: str, target: str, path: str, nbytes: int, seconds: float) -> None:
        """Add transfers that are over."""
        flow = self._flows.setdefault((self._end(source), self._end(target)), Flow())
        flow.add(Flow({path: nbytes}, nbytes if seconds > 0 else 0, seconds))

    def _end(self, name: str) -> str:
        if name not in self._ends and len(self._ends) >= self._max_ends and not self._make_room():
            return OTHERS
        self._ends[name] = False
        return name

    def left(self, name: str) -> None:
        """Note that a worker has left; once its place is needed, it goes as one of the others."""
        if name in self._ends:
            self._ends[name] = True

    def _make_room(self) -> bool:
        """Put an end that has left with the others; False if there is none."""
        gone = next((end for end, has_left in self._ends.items() if has_left), None)
        if gone is None:
            return False
        del self._ends[gone]
        for pair in [pair for pair in self._flows if gone in pair]:
            flow = self._flows.pop(pair)
            source, target = (OTHERS if end == gone else end for end in pair)
            self._flows.setdefault((source, target), Flow()).add(flow)
        return True

    @property
    def ends(self) -> list[str]:
        """Return the workers or hosts, those that moved bytes first in front."""
        beyond = any(OTHERS in pair for pair in self._flows)
        return [*self._ends, *([OTHERS] if beyond else [])]

    def flows(self) -> Iterable[tuple[str, str, Flow]]:
        """Return source, target and flow of each pair with transfers."""
        return [(source, target, flow) for (source, target), flow in self._flows.items()]
