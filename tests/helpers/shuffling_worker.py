"""Simulate a worker whose shuffles split, then move data in bursts, for the governor."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping

from dask_gpurt.observe import Decisions, Metrics
from dask_gpurt.overlap.control import Control
from dask_gpurt.overlap.governor import Governor
from dask_gpurt.overlap.samples import OFF, PRIORITY, Setting
from tests.helpers.curves import CAP4, CAP8, SPLIT, Speeds

CANDIDATES = {CAP8: 0.5, CAP4: 0.25, SPLIT: 0.44, OFF: 0.5}

#: Seconds of a step on four H200 (an earlier run of ``benchmarks.overlap``): of compute and of
#: communication alone, and of both under each setting. For the groupby, its second round.
STEPS: dict[str, tuple[float, float, dict[Setting, float]]] = {
    "groupby": (0.198, 0.200, {OFF: 0.331, PRIORITY: 0.236, CAP8: 0.241, CAP4: 0.241, SPLIT: 0.251}),
    "join": (0.184, 0.176, {OFF: 0.231, PRIORITY: 0.227, CAP8: 0.234, CAP4: 0.237, SPLIT: 0.227}),
    "sort": (0.205, 0.173, {OFF: 0.261, PRIORITY: 0.258, CAP8: 0.261, CAP4: 0.258, SPLIT: 0.261}),
    "string split": (0.199, 0.200, {OFF: 0.290, PRIORITY: 0.314, CAP8: 0.334, CAP4: 0.327, SPLIT: 0.321}),
    "fp32 GEMM": (0.200, 0.166, {OFF: 0.340, PRIORITY: 0.270, CAP8: 0.272, CAP4: 0.279, SPLIT: 0.240}),
}

#: Tasks of a step, bursts of bytes in a run, and the share of a run spent splitting.
TASKS, BURSTS, SPLITTING = 7, 12, 0.4

#: Relative standard deviations of a run's and a task's duration.
RUN, TASK = 0.05, 0.03


def speeds(compute: float, communication: float, total: float) -> Speeds:
    """Return speeds at which a step takes ``total`` seconds; the solution is not unique."""
    for moving in (0.95, 0.9, 0.8, 0.7, 0.6, 0.5):
        computing = 1 - (total - compute) * moving / communication
        if computing > 0 and communication + compute * (1 - moving) / computing <= total:
            break
    return Speeds(computing, moving)


class Worker:
    """Simulate one worker: a clock, bytes moved, and the setting that confines it."""

    def __init__(self, name: str, governor: Governor, seed: int):
        self.name, self.governor = name, governor
        self.compute, self.communication, totals = STEPS[name]
        self.speeds = {
            setting: speeds(self.compute, self.communication, total) for setting, total in totals.items()
        }
        self.now = self.moved = 0.0
        self.setting = PRIORITY
        self.random = random.Random(seed)

    # ---- an actuator -------------------------------------------------------------------

    def settings(self) -> Mapping[Setting, float]:
        return CANDIDATES

    def apply(self, setting: Setting) -> None:
        self.setting = setting

    def clear(self) -> None:
        self.setting = PRIORITY

    def counters(self) -> Mapping[str, int]:
        return {}

    # ---- events --------------------------------------------------------------------------

    def leg(self, tasks: int, runs: int) -> None:
        """Run tasks one after the other beside runs, each of which begins when the previous one ends."""
        control = Control(
            self.governor, self, lambda: self.moved, lambda: self.now, Decisions(lambda: self.now), Metrics()
        )
        pieces: deque[tuple[bool, float]] = deque()
        task = 0.0
        while tasks or task or runs or pieces:
            if not pieces and runs:
                runs -= 1
                control.in_flight(2, 0)
                control.in_flight(1, 0)
                pieces.extend(self._run())
            if not task and tasks:
                tasks -= 1
                control.begins(tasks, self.name, 1.0)
                task = self._noisy(self.compute / TASKS, TASK)
            task, done = self._pass(task, pieces)
            if done and not pieces and not runs:
                control.in_flight(0, 0)
            if not task:
                control.ends(tasks)
        control.close()

    def _run(self) -> list[tuple[bool, float]]:
        """Return the pieces of a run: whether bytes arrive at its end, and its seconds alone."""
        seconds = self._noisy(self.communication, RUN)
        moving = (1 - SPLITTING) * seconds / BURSTS
        return [(False, SPLITTING * seconds), *BURSTS * [(True, moving)]]

    def _pass(self, task: float, pieces: deque[tuple[bool, float]]) -> tuple[float, bool]:
        """Advance time until a task or a piece is done; returns the task's rest and whether the piece is."""
        at = self.speeds[self.setting] if task and pieces else Speeds(1.0, 1.0)
        ends = ([task / at.compute] if task else []) + ([pieces[0][1] / at.communication] if pieces else [])
        seconds = min(ends)
        self.now += seconds
        left = task - seconds * at.compute
        if not pieces:
            return 0.0, False
        comes, piece = pieces.popleft()
        if (rest := piece - seconds * at.communication) > 1e-12:
            pieces.appendleft((comes, rest))
            return (left if left > 1e-12 else 0.0), False
        self.moved += 1e8 * comes
        return (left if left > 1e-12 else 0.0), True

    def _noisy(self, seconds: float, noise: float) -> float:
        return seconds * self.random.lognormvariate(0, noise)
