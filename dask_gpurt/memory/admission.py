"""Decide what may run when memory is short, and estimate what a task will need. Pure: time is passed in.

A request for room comes from a task that is about to run or from data that are about to be fetched from
a peer. What is sent to a peer holds room too, but never waits. A request is admitted

1. when there is room for it (a fetch has to be the oldest request, too: there may always be another one), or
2. when nothing runs, whatever it needs, or
3. when it has been the oldest request for ``ADMISSION_PATIENCE_S``, with or without room.

Why nothing waits here for ever. Requests wait in the order of their arrival. While the oldest one waits,
either nothing runs, and rule 2 admits it as soon as it asks again, or its time runs out, and rule 3 does. It
asks again when something leaves, and anyhow every ``LOOK_AGAIN`` seconds (``plugins/turns.py``). Then the
next request is the oldest one. So the k-th request in the queue is admitted after k times the patience at
most, whatever runs does: tasks may wait for each other (an Event, a Queue, a Lock, the ranks of NCCL), and a
peer that data are sent to may have stopped. Without rule 3 there are deadlocks: of two tasks that wait for
each other one runs, and the other one waits here for it to end.

An admitted task has a thread: Dask executes at most as many tasks at a time as the worker has threads, and
those that wait here count among them. A task that has seceded has left its slot to another one, so it is left
out of what runs; it may wait for tasks of its own.

Rule 3 has a price: memory may go above its limit by one request for each patience. It is paid without need
where tasks take longer than that while memory is short, so the patience is long, and each case is counted.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

from dask.typing import Key

#: The kinds of holders of memory.
TASK, FETCH, SEND = "task", "fetch", "send"
#: Seconds for which the oldest request waits for room before it is admitted without.
ADMISSION_PATIENCE_S = 30.0
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
    """Keep what one worker runs, fetches and sends, and which requests wait for room. Not thread-safe.

    Times are seconds by any clock that does not go back.

    Parameters
    ----------
    patience
        Seconds for which the oldest request waits before it is admitted without room.
    """

    def __init__(self, patience: float = ADMISSION_PATIENCE_S) -> None:
        self._patience = patience
        self._running: set[Holder] = set()
        self._waiting: deque[Holder] = deque()
        #: Since when the oldest request has been the oldest one.
        self._oldest_since = 0.0
        #: How many requests were admitted because their time had run out.
        self.overdue = 0

    def ask(self, who: Holder, fits: bool, now: float) -> bool:
        """Admit a request if that is possible; otherwise queue it, to ask again later.

        Parameters
        ----------
        fits
            Whether there is room for what it needs.
        """
        if self._running and not (fits and self._may_pass(who)):
            if not self._is_overdue(who, now):
                self._queue(who, now)
                return False
            self.overdue += 1
        self._withdraw(who, now)
        self._running.add(who)
        return True

    def _may_pass(self, who: Holder) -> bool:
        """Keep fetches from taking room from older requests: there may always be another fetch."""
        return who.kind != FETCH or self.first in (None, who)

    def _is_overdue(self, who: Holder, now: float) -> bool:
        return who == self.first and now - self._oldest_since >= self._patience

    @property
    def short(self) -> bool:
        """Whether a task waits for nothing but what comes and goes: no more should be sent then."""
        tasks_run = any(who.kind == TASK for who in self._running)
        return not tasks_run and any(who.kind == TASK for who in self._waiting)

    def leave(self, who: Holder, now: float) -> Holder | None:
        """Note that something has ended, seceded or given up; return the request that is to ask again."""
        self._running.discard(who)
        self._withdraw(who, now)
        return self.first

    @property
    def first(self) -> Holder | None:
        """The oldest request."""
        return self._waiting[0] if self._waiting else None

    def _queue(self, who: Holder, now: float) -> None:
        if not self._waiting:
            self._oldest_since = now
        if who not in self._waiting:
            self._waiting.append(who)

    def _withdraw(self, who: Holder, now: float) -> None:
        if who == self.first:
            self._oldest_since = now
        if who in self._waiting:
            self._waiting.remove(who)

    @property
    def running(self) -> frozenset[Holder]:
        """What goes on, apart from tasks that have seceded."""
        return frozenset(self._running)

    @property
    def waiting(self) -> tuple[Holder, ...]:
        """The requests that wait, oldest first."""
        return tuple(self._waiting)
