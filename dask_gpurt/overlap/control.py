"""Confines tasks while runs are in flight, and measures what comes of it.

Nothing here knows of Dask or CUDA: tasks and runs are reported, time and progress are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from dask_gpurt.observe import Decisions, Fallback, Metrics
from dask_gpurt.overlap.actuators import Actuator
from dask_gpurt.overlap.governor import Decision, Policy
from dask_gpurt.overlap.samples import PRIORITY, OverlapSample, Setting, SoloSample, StepSample

#: Seconds below which a task says nothing of how fast its kernel is.
SHORT_TASK_S = 0.002
#: The share of a task that may be beside runs when it counts as alone.
SOLO_OVERLAP_SHARE = 0.02


@dataclass
class _Task:
    """A task that runs, and what there was to read when it began."""

    kernel: str
    work: float
    began: float
    flown: float
    setting: Setting = PRIORITY
    #: Whether nothing has happened so far that makes it no measurement.
    steady: bool = True


@dataclass
class _Step:
    """The step that goes on: what there was to read when it began, and what ran since."""

    idle: float
    moved: float
    ran: dict[str, OverlapSample] = field(default_factory=dict)
    steady: bool = True

    def add(self, task: _Task, seconds: float) -> None:
        """A task has ended that communication was beside."""
        before = self.ran.get(task.kernel, OverlapSample(0.0, 0.0, task.setting))
        self.ran[task.kernel] = OverlapSample(before.work + task.work, before.seconds + seconds, task.setting)
        self.steady &= task.steady and before.setting == task.setting


class Control:
    """One worker's tasks beside its runs. Not thread-safe: on the event loop.

    Parameters
    ----------
    policy
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
        policy: Policy,
        actuator: Actuator | None,
        progress: Callable[[], float],
        clock: Callable[[], float],
        decisions: Decisions,
        metrics: Metrics,
    ):
        self._policy = policy
        self._actuator = actuator
        self._progress = progress
        self._clock = clock
        self._decisions = decisions
        self._metrics = metrics
        self._tasks: dict[Hashable, _Task] = {}
        self._runs = self._pulls = 0
        self._applied = PRIORITY
        #: Seconds for which something was in flight, and those of them in which no task ran, up to the
        #: moment that it was last looked at.
        self._flown = self._idle = 0.0
        self._looked = clock()
        self._step = _Step(0.0, progress())
        #: Whether the step is over as soon as no task runs.
        self._over = False

    # ---- what happens ------------------------------------------------------------------

    def in_flight(self, runs: int, pulls: int) -> None:
        """So many runs publish shards, and so many shards are being pulled."""
        self._look()
        before = self._flying
        # A run that begins while another one goes on ends a step too: there may always be one.
        self._over |= runs > self._runs
        self._runs, self._pulls = runs, pulls
        self._end_step()
        if self._flying and not before:
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
        task = _Task(kernel, work, self._looked, self._flown)
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
        self._end_step()
        self._settle()

    def close(self) -> None:
        """Confine nothing any more."""
        self._look()
        self._tasks.clear()
        self._runs = self._pulls = 0
        self._over = True
        self._end_step()
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
            self._idle += 0.0 if self._tasks else now - self._looked
        self._looked = now

    def _decide(self, task: _Task) -> None:
        decision = self._policy.choose(task.kernel)
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
            self._metrics.fallback(Fallback.OVERLAP_UNCONFINED, str(error))
            self._actuator.clear()
            self._actuator, setting = None, PRIORITY
        self._applied = setting

    def _measure(self, task: _Task, done: bool) -> None:
        seconds, flown = self._looked - task.began, self._flown - task.flown
        if not done or seconds <= 0:
            self._step.steady &= not flown
        elif flown > SOLO_OVERLAP_SHARE * seconds:
            self._step.add(task, seconds)
        elif task.steady and seconds >= SHORT_TASK_S:
            self._tell(self._policy.learn(SoloSample(task.kernel, task.work, seconds)))

    def _end_step(self) -> None:
        """End the step that is over, unless tasks of it still run."""
        if not self._over or (self._tasks and self._step.steady):
            return
        began, self._over = self._step, False
        self._step = _Step(self._idle, self._progress())
        if self._tasks:
            self._step.steady = False
        idle, moved = self._step.idle - began.idle, self._step.moved - began.moved
        if idle or moved or began.ran:
            self._tell(self._policy.learn_step(StepSample(idle, moved, began.ran, began.steady)))

    def _tell(self, forgotten: str | None) -> None:
        """Enter what was forgotten."""
        if forgotten is not None:
            self._decisions.note(forgotten, "forgotten", "it is not what it was before")
            self._metrics.add("overlap.forgotten")
