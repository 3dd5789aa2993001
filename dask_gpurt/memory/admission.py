"""Who may run when memory is short, and what a task will need. Pure.

A task that finds no room for what it will need waits until another one has finished, but
only while another one runs: whoever runs is never waiting here, so it ends, and whoever is
alone runs whatever it needs. What comes from a peer asks like a task; what is sent to one
holds room too, and never waits. A task that has left its thread to wait for tasks of its own
(Dask calls that secede) counts as nobody, since those may be the ones that wait.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

from dask.typing import Key

#: The kinds of holders of memory.
TASK, FETCH, SEND = "task", "fetch", "send"
#: Runs of a prefix that are remembered, and the share of them that would have had enough.
RUNS, ENOUGH = 20, 0.9
#: How many times as much as any run so far a task may be thought to need: a few bytes in and many out,
#: as of a task that reads shards, would otherwise promise everything to one that has inputs.
GROWTH = 2


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
        """Bytes that a task will probably take besides its inputs.

        As long as nothing is known that is a result as large as these, and as much to work with.
        """
        runs = self._runs.get((prefix, inputs > 0))
        if not runs:
            return GROWTH * inputs
        if not inputs:
            return int(_enough([peak for _, peak in runs]))
        most = GROWTH * max(peak for _, peak in runs)
        return int(min(_enough([peak / nbytes for nbytes, peak in runs]) * inputs, most))


def _enough(runs: list[float] | list[int]) -> float:
    """What was enough for most of some runs."""
    return sorted(runs)[min(len(runs) - 1, int(ENOUGH * len(runs)))]


class Holder(NamedTuple):
    """Who holds memory or wants some: a task, or what comes from a peer or goes to one."""

    kind: str
    key: Key


def reservation(task: Key) -> Holder:
    """What the room that is promised to a running task is promised to."""
    return Holder(TASK, task)


class Admission:
    """What one worker runs, fetches and sends, and what of that waits for room. Not thread-safe."""

    def __init__(self) -> None:
        self._running: set[Holder] = set()
        self._waiting: deque[Holder] = deque()

    def ask(self, who: Holder, fits: bool) -> bool:
        """Whether somebody may go on now; if not he waits, and asks again when he is told to.

        Parameters
        ----------
        fits
            Whether there is room for what he needs.
        """
        if self._running and not (fits and self._may_pass(who)):
            if who not in self._waiting:
                self._waiting.append(who)
            return False
        self._withdraw(who)
        self._running.add(who)
        return True

    def _may_pass(self, who: Holder) -> bool:
        """A fetch takes no room from those that have waited longer: there may always be another one."""
        return who.kind != FETCH or self.first in (None, who)

    @property
    def short(self) -> bool:
        """Whether a task waits for nothing but what comes and goes: no more should be sent then."""
        tasks_run = any(who.kind == TASK for who in self._running)
        return not tasks_run and any(who.kind == TASK for who in self._waiting)

    def leave(self, who: Holder) -> Holder | None:
        """Somebody has finished, has seceded, or has given up waiting; who is to ask again, if anybody."""
        self._running.discard(who)
        self._withdraw(who)
        return self.first

    @property
    def first(self) -> Holder | None:
        """Who has waited longest."""
        return self._waiting[0] if self._waiting else None

    def _withdraw(self, who: Holder) -> None:
        if who in self._waiting:
            self._waiting.remove(who)

    @property
    def running(self) -> frozenset[Holder]:
        """Who goes on, apart from tasks that have seceded."""
        return frozenset(self._running)

    @property
    def waiting(self) -> tuple[Holder, ...]:
        """Who waits, longest first."""
        return tuple(self._waiting)
