"""The governor on a worker whose shuffles split, then move in bursts, event by event."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping

import pytest
from curves import CAP4, CAP8, SPLIT, Speeds

from dask_gpurt.observe import Decisions, Metrics
from dask_gpurt.overlap.control import Control
from dask_gpurt.overlap.governor import Decision, Governor
from dask_gpurt.overlap.samples import OFF, PRIORITY, Setting
from dask_gpurt.overlap.statistics import OverlapStatistics

CANDIDATES = {CAP8: 0.5, CAP4: 0.25, SPLIT: 0.44, OFF: 0.5}
#: Seconds of a step on four H200 (``benchmarks/results/overlap-4xh200.json``): of compute and of
#: communication alone, and of both under each setting; of the groupby's rounds the second one.
STEPS: dict[str, tuple[float, float, dict[Setting, float]]] = {
    "groupby": (0.198, 0.200, {OFF: 0.331, PRIORITY: 0.236, CAP8: 0.241, CAP4: 0.241, SPLIT: 0.251}),
    "join": (0.184, 0.176, {OFF: 0.231, PRIORITY: 0.227, CAP8: 0.234, CAP4: 0.237, SPLIT: 0.227}),
    "sort": (0.205, 0.173, {OFF: 0.261, PRIORITY: 0.258, CAP8: 0.261, CAP4: 0.258, SPLIT: 0.261}),
    "string split": (0.199, 0.200, {OFF: 0.290, PRIORITY: 0.314, CAP8: 0.334, CAP4: 0.327, SPLIT: 0.321}),
    "fp32 GEMM": (0.200, 0.166, {OFF: 0.340, PRIORITY: 0.270, CAP8: 0.272, CAP4: 0.279, SPLIT: 0.240}),
}
#: Tasks of a step, bursts that bytes come in, and the share of a run that it splits for.
TASKS, BURSTS, SPLITTING = 7, 12, 0.4
#: Relative standard deviations of a run and of a task.
RUN, TASK = 0.05, 0.03


def speeds(compute: float, communication: float, total: float) -> Speeds:
    """Speeds at which a step takes so long; there are others."""
    for moving in (0.95, 0.9, 0.8, 0.7, 0.6, 0.5):
        computing = 1 - (total - compute) * moving / communication
        if computing > 0 and communication + compute * (1 - moving) / computing <= total:
            break
    return Speeds(computing, moving)


class Worker:
    """One worker: a clock, bytes, and what confines it."""

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

    # ---- what happens ------------------------------------------------------------------

    def leg(self, tasks: int, runs: int) -> None:
        """Tasks one after the other beside runs one after the other, of which the next begins as one ends."""
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
        """Seconds alone that each piece of a run takes, and whether bytes come at the end of it."""
        seconds = self._noisy(self.communication, RUN)
        moving = (1 - SPLITTING) * seconds / BURSTS
        return [(False, SPLITTING * seconds), *BURSTS * [(True, moving)]]

    def _pass(self, task: float, pieces: deque[tuple[bool, float]]) -> tuple[float, bool]:
        """Let time pass until a task or a piece is done: what is left of the task, whether the piece is."""
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


def calibrated(name: str, seed: int, runs: int) -> OverlapStatistics:
    governor = Governor(CANDIDATES, budget=1.0)
    worker = Worker(name, governor, seed)
    for _ in range(runs // 4):
        worker.leg(TASKS, 0)
        worker.leg(4 * TASKS, 4)
    return governor.known


@pytest.mark.parametrize("name", STEPS)
def test_after_forty_shuffles_it_uses_one_of_the_best_settings(name: str) -> None:
    """Within 3 per cent of the best, and within 1 per cent of no control, whatever the noise."""
    totals = STEPS[name][2]
    for seed in range(10):
        used = Governor(CANDIDATES, calibrated(name, seed, 40)).choose(name).setting
        assert totals[used] <= 1.03 * min(totals.values())
        assert totals[used] <= 1.01 * totals[OFF]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("setting", [PRIORITY, CAP4, OFF])
def test_what_a_shuffle_adds_is_measured_however_it_moves(name: str, setting: Setting) -> None:
    compute, communication, totals = STEPS[name]
    governor = Governor({})
    worker = Worker(name, governor, 0)
    governor.choose = lambda kernel: Decision(setting, "the test says so")  # type: ignore[method-assign]
    for _ in range(10):
        worker.leg(TASKS, 0)
        worker.leg(4 * TASKS, 4)
    costs = governor.known.kernels[name].beside[setting].bounds(0.0)
    adds, delays = costs.adds * BURSTS * 1e8, costs.delays or 0.0
    assert max(compute + adds, communication + compute * delays) == pytest.approx(totals[setting], rel=0.05)


def test_what_starves_communication_shows_though_tasks_hardly_notice_it() -> None:
    """The shuffles of a leg are late then, and all wait for the last of them, when no task runs any more."""
    starved = {
        PRIORITY: (0.92, 0.46),
        OFF: (0.95, 0.35),
        SPLIT: (0.79, 0.79),
        CAP8: (0.9, 0.5),
        CAP4: (0.9, 0.5),
    }
    for seed in range(10):
        governor = Governor(CANDIDATES, budget=1.0)
        worker = Worker("fp32 GEMM", governor, seed)
        worker.compute = worker.communication = 0.2
        worker.speeds = {setting: Speeds(*both) for setting, both in starved.items()}
        for _ in range(24):
            worker.leg(TASKS, 0)
            worker.leg(4 * TASKS, 4)
        assert Governor(CANDIDATES, governor.known).choose("fp32 GEMM").setting == SPLIT
