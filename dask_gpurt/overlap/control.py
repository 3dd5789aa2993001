"""Confine tasks while runs are in flight, and measure the effect.

This module is independent of Dask and CUDA: the caller reports tasks and runs, and passes functions that
return the time and the bytes moved.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from dask_gpurt.observe import Decisions, Fallback, Metrics
from dask_gpurt.overlap.actuators import Actuator
from dask_gpurt.overlap.governor import Decision, Policy
from dask_gpurt.overlap.samples import PRIORITY, OverlapSample, Setting, SoloSample, StepSample

#: Shorter tasks are not samples of the speed of their kernel, in seconds.
SHORT_TASK_S = 0.002
#: A task counts as solo if it overlapped with runs for at most this fraction of its time.
SOLO_OVERLAP_SHARE = 0.02


@dataclass
class _MeasuredTask:
    """Hold a running task, with the readings at its start."""

    kernel: str
    work: float
    began: float
    flown: float
    setting: Setting = PRIORITY
    #: False once something has invalidated its time as a measurement.
    steady: bool = True


@dataclass
class _Step:
    """Hold the current step: the readings at its start, and the tasks that have run since."""

    idle: float
    moved: float
    ran: dict[str, OverlapSample] = field(default_factory=dict)
    steady: bool = True

    def add(self, task: _MeasuredTask, seconds: float) -> None:
        """Add a finished task that overlapped with communication."""
        before = self.ran.get(task.kernel, OverlapSample(0.0, 0.0, task.setting))
        self.ran[task.kernel] = OverlapSample(before.work + task.work, before.seconds + seconds, task.setting)
        self.steady &= task.steady and before.setting == task.setting


class Control:
    """Control the tasks of one worker while runs are in flight. Not thread-safe; used on the event loop.

    Parameters
    ----------
    policy
        Chooses the setting of each kernel, and learns from samples.
    actuator
        Applies settings; None to only measure.
    progress
        Returns the bytes that communication has moved so far.
    clock
        Returns the time in seconds.
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
        self._tasks: dict[Hashable, _MeasuredTask] = {}
        self._runs = self._pulls = 0
        self._applied = PRIORITY
        #: Seconds with communication in flight, and the part of them without a running task, as of the last
        #: reading of the clock.
        self._flown = self._idle = 0.0
        self._looked = clock()
        self._step = _Step(0.0, progress())
        #: Whether the step ends as soon as no task is running.
        self._over = False

    # ---- events -------------------------------------------------------------------------

    def in_flight(self, runs: int, pulls: int) -> None:
        """Update the number of runs that publish shards, and of shards that are being pulled."""
        self._add_times()
        before = self._flying
        # A run that begins during another one ends the step too, since some run may be active at all times.
        self._over |= runs > self._runs
        self._runs, self._pulls = runs, pulls
        self._end_step()
        if self._flying and not before:
            for task in self._tasks.values():
                self._decide(task)
        self._settle()

    def begins(self, key: Hashable, kernel: str, work: float) -> None:
        """Note that a task begins.

        Parameters
        ----------
        kernel
            The kernel that it runs, or the task prefix that stands for it.
        work
            Its amount of work, greater than 0, in a unit common to all tasks of the kernel.
        """
        self._add_times()
        task = _MeasuredTask(kernel, work, self._looked, self._flown)
        if self._tasks:  # concurrent tasks slow each other down, so their times are no measurements
            for other in (task, *self._tasks.values()):
                other.steady = False
        self._tasks[key] = task
        if self._flying:
            self._decide(task)
        self._settle()

    def ends(self, key: Hashable, *, done: bool = True) -> None:
        """Note that a task ends; ``done`` is whether it succeeded."""
        self._add_times()
        if (task := self._tasks.pop(key, None)) is not None:
            self._measure(task, done)
        self._end_step()
        self._settle()

    def close(self) -> None:
        """End all tasks and runs, and stop confining."""
        self._add_times()
        self._tasks.clear()
        self._runs = self._pulls = 0
        self._over = True
        self._end_step()
        self._settle()

    def counters(self) -> dict[str, Any]:
        """Return the counters of the actuator."""
        return dict(self._actuator.counters()) if self._actuator else {}

    # ---- reactions ----------------------------------------------------------------------

    @property
    def _flying(self) -> bool:
        return bool(self._runs or self._pulls)

    def _add_times(self) -> None:
        now = self._clock()
        if self._flying:
            self._flown += now - self._looked
            self._idle += 0.0 if self._tasks else now - self._looked
        self._looked = now

    def _decide(self, task: _MeasuredTask) -> None:
        decision = self._policy.choose(task.kernel)
        task.setting = decision.setting
        self._note(task.kernel, decision)

    def _note(self, kernel: str, decision: Decision) -> None:
        if self._decisions.note(kernel, str(decision.setting), decision.why):
            self._metrics.add("overlap.decisions")
            if (recording := self._metrics.recording) is not None:
                recording.mark("overlap", kernel=kernel, decided=str(decision.setting), why=decision.why)

    def _settle(self) -> None:
        """Apply the setting of the running tasks if they agree, else priority only."""
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

    def _measure(self, task: _MeasuredTask, done: bool) -> None:
        seconds, flown = self._looked - task.began, self._flown - task.flown
        if not done or seconds <= 0:
            self._step.steady &= not flown
        elif flown > SOLO_OVERLAP_SHARE * seconds:
            self._step.add(task, seconds)
        elif task.steady and seconds >= SHORT_TASK_S:
            self._note_forgotten(self._policy.learn(SoloSample(task.kernel, task.work, seconds)))

    def _end_step(self) -> None:
        """Finish the step if it is over, unless its tasks are still running."""
        if not self._over or (self._tasks and self._step.steady):
            return
        began, self._over = self._step, False
        self._step = _Step(self._idle, self._progress())
        if self._tasks:
            self._step.steady = False
        idle, moved = self._step.idle - began.idle, self._step.moved - began.moved
        if idle or moved or began.ran:
            self._note_forgotten(self._policy.learn_step(StepSample(idle, moved, began.ran, began.steady)))

    def _note_forgotten(self, forgotten: str | None) -> None:
        """Note the kernels whose statistics were dropped."""
        if forgotten is not None:
            self._decisions.note(forgotten, "forgotten", "its measurements have changed")
            self._metrics.add("overlap.forgotten")
