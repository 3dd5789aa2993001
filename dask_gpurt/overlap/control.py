"""Confines tasks while runs are in flight, and measures what comes of it.

Nothing here knows of Dask or CUDA: tasks and runs are reported, time and progress are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from dask_gpurt.observe import Decisions, Metrics
from dask_gpurt.overlap.actuators import Actuator
from dask_gpurt.overlap.governor import Decision, Governing
from dask_gpurt.overlap.knowledge import PRIORITY, Sample, Setting

#: Seconds below which nothing is measured: bytes count when a whole shard has come.
SHORT = 0.002
#: The share of a task that may be beside runs when it counts as alone, and alone when it counts as beside.
BRIEFLY = 0.02


@dataclass
class _Task:
    """A task that runs, and what there was to read when it began."""

    kernel: str
    work: float
    began: float
    moved: float
    flown: float
    setting: Setting = PRIORITY
    #: Whether nothing has happened so far that makes it no measurement.
    steady: bool = True


class Control:
    """One worker's tasks beside its runs. Not thread-safe: on the event loop.

    Parameters
    ----------
    governing
        What decides.
    actuator
        What confines; without one everything is only measured.
    progress
        Bytes that communication has moved so far.
    clock
        Seconds.
    """

    def __init__(
        self,
        governing: Governing,
        actuator: Actuator | None,
        progress: Callable[[], float],
        clock: Callable[[], float],
        decisions: Decisions,
        metrics: Metrics,
    ):
        self._governing = governing
        self._actuator = actuator
        self._progress = progress
        self._clock = clock
        self._decisions = decisions
        self._metrics = metrics
        self._tasks: dict[Hashable, _Task] = {}
        self._runs = self._pulls = 0
        self._applied = PRIORITY
        #: Seconds for which something was in flight, up to the moment that it was last looked at.
        self._flown = 0.0
        self._looked = clock()
        #: Since when communication is alone, and the bytes at that moment.
        self._alone: tuple[float, float] | None = None

    # ---- what happens ------------------------------------------------------------------

    def in_flight(self, runs: int, pulls: int) -> None:
        """So many runs publish shards, and so many shards are being pulled."""
        self._look()
        if runs > self._runs:
            self._governing.step()
        before = self._flying
        self._runs, self._pulls = runs, pulls
        if not self._flying:
            self._end_alone()
        elif not before:
            for task in self._tasks.values():
                self._decide(task)
        self._settle()

    def begins(self, key: Hashable, kernel: str, work: float) -> None:
        """A task begins.

        Parameters
        ----------
        kernel
            What it runs, or the prefix that stands for it.
        work
            How much it has to do, above 0, in any unit that is the same for all tasks of the kernel.
        """
        self._look()
        self._end_alone()
        task = _Task(kernel, work, self._looked, self._progress(), self._flown)
        if self._tasks:  # who shares the device with another task measures both
            for other in (task, *self._tasks.values()):
                other.steady = False
        self._tasks[key] = task
        if self._flying:
            self._decide(task)
        self._settle()

    def ends(self, key: Hashable, *, done: bool = True) -> None:
        """A task ends; ``done`` is whether it did its work."""
        self._look()
        if (task := self._tasks.pop(key, None)) is not None:
            self._measure(task, done)
        self._settle()

    def close(self) -> None:
        """Confine nothing any more."""
        self._tasks.clear()
        self._runs = self._pulls = 0
        self._settle()

    def counters(self) -> dict[str, Any]:
        """What the actuator did."""
        return dict(self._actuator.counters()) if self._actuator else {}

    # ---- what follows ------------------------------------------------------------------

    @property
    def _flying(self) -> bool:
        return bool(self._runs or self._pulls)

    def _look(self) -> None:
        now = self._clock()
        if self._flying:
            self._flown += now - self._looked
        self._looked = now

    def _decide(self, task: _Task) -> None:
        decision = self._governing.choose(task.kernel)
        task.setting = decision.setting
        self._note(task.kernel, decision)

    def _note(self, kernel: str, decision: Decision) -> None:
        if self._decisions.note(kernel, str(decision.setting), decision.why):
            self._metrics.add("overlap.decisions")

    def _settle(self) -> None:
        """Let what is confined be what the running tasks agree on."""
        wanted = {task.setting for task in self._tasks.values()} if self._flying else set()
        self._apply(wanted.pop() if len(wanted) == 1 else PRIORITY)
        for task in self._tasks.values():
            task.steady &= not self._flying or task.setting == self._applied
        if self._flying and not self._tasks and self._alone is None:
            self._alone = self._looked, self._progress()

    def _apply(self, setting: Setting) -> None:
        if setting == self._applied or self._actuator is None:
            return
        try:
            if setting == PRIORITY:
                self._actuator.clear()
            else:
                self._actuator.apply(setting)
                self._metrics.add("overlap.confined")
        except (OSError, ValueError) as error:
            self._metrics.fallback("compute is not confined", str(error))
            self._actuator.clear()
            self._actuator, setting = None, PRIORITY
        self._applied = setting

    def _measure(self, task: _Task, done: bool) -> None:
        seconds = self._looked - task.began
        if not done or seconds <= 0:
            return
        share = (self._flown - task.flown) / seconds
        steady = task.steady and seconds >= SHORT and not BRIEFLY < share < 1 - BRIEFLY
        moved = self._progress() - task.moved if share > BRIEFLY else None
        self._learn(Sample(seconds, task.kernel, task.work, task.setting, moved, steady))

    def _end_alone(self) -> None:
        if self._alone is None:
            return
        (began, before), self._alone = self._alone, None
        seconds, moved = self._looked - began, self._progress() - before
        # Without progress it waited for peers, and that is no speed.
        if moved > 0:
            self._learn(Sample(seconds, moved=moved, steady=seconds >= SHORT))

    def _learn(self, sample: Sample) -> None:
        if (forgotten := self._governing.learn(sample)) is not None:
            self._decisions.note(forgotten, "forgotten", "it is not what it was before")
            self._metrics.add("overlap.forgotten")
