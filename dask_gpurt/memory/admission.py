"""Who may run when memory is short, and what a task will need. Pure.

A task that finds no room for what it will need waits until another one has finished, but
only while another one runs: whoever runs is never waiting here, so it ends, and whoever is
alone runs whatever it needs. A task that has left its thread to wait for tasks of its own
(Dask calls that secede) counts as nobody, since those may be the ones that wait.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable

from dask.typing import Key

#: Runs of a prefix that are remembered, and the share of them that would have had enough.
RUNS, ENOUGH = 20, 0.9
#: How many times as much as any run so far a task may be thought to need: a few bytes in and many out,
#: as of a task that reads shards, would otherwise promise everything to one that has inputs.
GROWTH = 2


def reservation(task: Key) -> tuple[str, Key]:
    """What the room that is promised to a running task is promised to."""
    return "task", task


class Needs:
    """What tasks of each prefix needed besides their inputs."""

    def __init__(self) -> None:
        #: Bytes of inputs and the most that was needed, by prefix and whether there were inputs.
        self._runs: defaultdict[tuple[str, bool], deque[tuple[int, int]]] = defaultdict(
            lambda: deque(maxlen=RUNS)
        )

    def learn(self, prefix: str, inputs: int, peak: int) -> None:
        """A task has run.

        Parameters
        ----------
        inputs, peak
            Bytes of its inputs, and the most that it took besides them.
        """
        self._runs[prefix, inputs > 0].append((inputs, peak))

    def of(self, prefix: str, inputs: int) -> int:
        """Bytes that a task will probably take besides its inputs; 0 as long as nothing is known."""
        runs = self._runs.get((prefix, inputs > 0))
        if not runs:
            return 0
        if not inputs:
            return int(_enough([peak for _, peak in runs]))
        most = GROWTH * max(peak for _, peak in runs)
        return int(min(_enough([peak / nbytes for nbytes, peak in runs]) * inputs, most))


def _enough(runs: list[float] | list[int]) -> float:
    """What was enough for most of some runs."""
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
