"""Sum transfers between the workers of a cluster, or between its hosts. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

#: Maximum number of workers or hosts shown separately, and the name of the rest.
MAX_ENDS, OTHERS = 32, "(others)"


@dataclass
class Flow:
    """Sum the transfers from one worker or host to another.

    Attributes
    ----------
    by_path
        Bytes by path.
    copied, seconds
        Bytes copied, and the seconds that took; shards read in place are not included.
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
        """Return the mean rate of copies in bytes per second; None if nothing was copied."""
        return self.copied / self.seconds if self.seconds > 0 else None


class TrafficMatrix:
    """Keep the flow between each pair of ends (workers or hosts), up to a number of ends."""

    def __init__(self, max_ends: int = MAX_ENDS) -> None:
        self._max_ends = max_ends
        #: Whether each end has left, in the order of their first transfers.
        self._ends: dict[str, bool] = {}
        self._flows: dict[tuple[str, str], Flow] = {}

    def add(self, source: str, target: str, path: str, nbytes: int, seconds: float) -> None:
        """Add completed transfers."""
        flow = self._flows.setdefault((self._end(source), self._end(target)), Flow())
        flow.add(Flow({path: nbytes}, nbytes if seconds > 0 else 0, seconds))

    def _end(self, name: str) -> str:
        if name not in self._ends and len(self._ends) >= self._max_ends and not self._make_room():
            return OTHERS
        self._ends[name] = False
        return name

    def left(self, name: str) -> None:
        """Mark a worker as left; it is merged into :data:`OTHERS` when its place is needed."""
        if name in self._ends:
            self._ends[name] = True

    def _make_room(self) -> bool:
        """Merge an end that has left into :data:`OTHERS`; return False if there is none."""
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
        """Return the workers or hosts, in the order of their first transfers."""
        beyond = any(OTHERS in pair for pair in self._flows)
        return [*self._ends, *([OTHERS] if beyond else [])]

    def flows(self) -> Iterable[tuple[str, str, Flow]]:
        """Return source, target and flow of each pair with transfers."""
        return [(source, target, flow) for (source, target), flow in self._flows.items()]
