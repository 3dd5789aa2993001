"""Who may run when memory is short, and what a task will need. Pure.

A task that finds no room for what it will need waits until another one has finished, but
only while another one runs: whoever runs is never waiting here, so it ends, and whoever is
alone runs whatever it needs. A task that has left its thread to wait for tasks of its own
(Dask calls that secede) counts as nobody, since those may be the ones that wait.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable

#: Runs of a prefix that are remembered, and the share of them that would have had enough.
RUNS, ENOUGH = 20, 0.9


class Needs:
    """What tasks of each prefix needed besides their inputs."""

    def __init__(self) -> None:
        self._ratios: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RUNS))
        self._bytes: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RUNS))

    def learn(self, prefix: str, inputs: int, peak: int) -> None:
        """A task has run.

        Parameters
        ----------
        inputs, peak
            Bytes of its inputs, and the most that it took besides them.
        """
        if inputs:
            self._ratios[prefix].append(peak / inputs)
        else:
            self._bytes[prefix].append(peak)

    def of(self, prefix: str, inputs: int) -> int:
        """Bytes that a task will probably take besides its inputs; 0 as long as nothing is known."""
        if inputs:
            return int(_enough(self._ratios.get(prefix)) * inputs)
        return int(_enough(self._bytes.get(prefix)))


def _enough(runs: deque[float] | None) -> float:
    """What was enough for most of some runs."""
    if not runs:
        return 0.0
    return sorted(runs)[min(len(runs) - 1, int(ENOUGH * len(runs)))]


class Admission:
    """The tasks of one worker that run, and those that wait for room. Not thread-safe."""

    def __init__(self) -> None:
        self._running: set[Hashable] = set()
        self._waiting: deque[Hashable] = deque()

    def ask(self, key: Hashable, fits: bool) -> bool:
        """Whether a task may run now; if not it waits, and asks again when it is told to.

        Parameters
        ----------
        fits
            Whether there is room for what it needs.
        """
        if not fits and self._running:
            if key not in self._waiting:
                self._waiting.append(key)
            return False
        self._withdraw(key)
        self._running.add(key)
        return True

    def leave(self, key: Hashable) -> Hashable | None:
        """A task has finished, has seceded, or has given up waiting; who is to ask again, if anybody."""
        self._running.discard(key)
        self._withdraw(key)
        return self._waiting[0] if self._waiting else None

    def _withdraw(self, key: Hashable) -> None:
        if key in self._waiting:
            self._waiting.remove(key)

    @property
    def running(self) -> frozenset[Hashable]:
        """Who runs, apart from those that have seceded."""
        return frozenset(self._running)

    @property
    def waiting(self) -> tuple[Hashable, ...]:
        """Who waits, longest first."""
        return tuple(self._waiting)
