"""Simulate kernels beside communication, with a known response to each setting."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from dask_gpurt.overlap.governor import Policy
from dask_gpurt.overlap.samples import OFF, PRIORITY, OverlapSample, Setting, SoloSample, StepSample

CAP8, CAP6, CAP4, SPLIT = Setting(residency=8), Setting(residency=6), Setting(residency=4), Setting(sms=116)
#: Worst-case share of its speed that a step keeps: a cap of 16 blocks, SMs of 132, one after the other.
CANDIDATES = {SPLIT: 116 / 132 / 2, CAP8: 8 / 16, CAP6: 6 / 16, CAP4: 4 / 16, OFF: 0.5}
#: Tasks in a step, and bandwidth of communication alone in bytes per second.
TASKS, LINK = 20, 1e9


@dataclass(frozen=True)
class Work:
    """Describe the work of a step, in seconds that each part takes alone."""

    compute: float
    communication: float


@dataclass(frozen=True)
class Speeds:
    """Describe the speeds of overlapping compute and communication, as shares in (0, 1] of those alone."""

    compute: float
    communication: float


@dataclass(frozen=True)
class Course:
    """Describe the duration of a step at some speeds, and for how much of it both run, in seconds."""

    speeds: Speeds
    total: float
    together: float


def side_by_side(work: Work, speeds: Speeds) -> Course:
    """Simulate a step: both run until the first is done; the other continues alone.

    For speeds that add up to more than 1 the total is the larger of
    ``K + C (1 - c) / m`` and ``C + K (1 - m) / c``, with K, C the work and c, m the speeds: in the first case
    compute is on the critical path and slowed by the communication beside it; in the second communication is.
    """
    together = min(work.compute / speeds.compute, work.communication / speeds.communication)
    left = work.compute + work.communication - together * (speeds.compute + speeds.communication)
    return Course(speeds, together + left, together)


Curve = Mapping[Setting, Speeds]


def measured(f: float, communication: float = 0.9) -> Speeds:
    """Return the speeds at which a share ``f`` of equal work on both sides is hidden."""
    return Speeds(1 - communication * (1 - f), communication)


def plain(f: float) -> Speeds:
    """Return the speeds without priority: both sides are slowed alike."""
    return Speeds(1 / (2 - f), 1 / (2 - f))


#: f without control and under each setting, as measured on four H200: the first three beside copies to
#: another GPU, the next two beside an all-reduce, the last two beside shuffles of the runtime. A cap of 8 was
#: not measured for the first three, nor a cap of 6 for the last two: these are interpolated.
MEASURED: dict[str, tuple[float, dict[Setting, float]]] = {
    "join": (0.33, {PRIORITY: 0.59, SPLIT: 0.58, CAP8: 0.42, CAP6: 0.25, CAP4: 0.18}),
    "groupby": (0.20, {PRIORITY: 0.37, SPLIT: 0.27, CAP8: 0.35, CAP6: 0.32, CAP4: 0.33}),
    "gemm": (0.07, {PRIORITY: 0.30, SPLIT: 0.44, CAP8: 0.28, CAP6: 0.26, CAP4: 0.30}),
    "bf16-gemm": (0.73, {PRIORITY: 0.73, SPLIT: 0.70, CAP8: 0.71, CAP6: 0.68, CAP4: 0.63}),
    "elementwise": (0.39, {PRIORITY: 0.40, SPLIT: 0.40, CAP8: 0.50, CAP6: 0.60, CAP4: 0.80}),
    "strings": (0.61, {PRIORITY: 0.44, SPLIT: 0.46, CAP8: 0.52, CAP6: 0.46, CAP4: 0.40}),
    "fp32-gemm": (0.18, {PRIORITY: 0.56, SPLIT: 0.74, CAP8: 0.60, CAP6: 0.57, CAP4: 0.55}),
}
UNCONTROLLED = {name: plain(f) for name, (f, _) in MEASURED.items()}
CURVES: dict[str, Curve] = {
    name: {OFF: UNCONTROLLED[name], **{setting: measured(f) for setting, f in responses.items()}}
    for name, (_, responses) in MEASURED.items()
}


@dataclass
class Steps:
    """Simulate steps of tasks of one kernel beside communication, under a governor.

    Parameters
    ----------
    communication
        Seconds of communication alone in a step, relative to those of compute.
    noise
        Relative standard deviation of durations.
    lumps
        Number of pieces in which the bytes of a step are counted.
    """

    governor: Policy
    kernel: str
    curve: Curve
    communication: float = 1.0
    noise: float = 0.05
    seed: int = 0
    #: Seconds that a task takes alone.
    task: float = 1.0
    lumps: int = 16

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        #: Seconds in flight under each setting, without noise.
        self.seconds: dict[Setting, float] = {}
        self._owed = 0.0

    @property
    def work(self) -> Work:
        compute = TASKS * self.task
        return Work(compute, compute * self.communication)

    def best(self) -> float:
        """Return the seconds of a step under the best fixed setting."""
        return min(side_by_side(self.work, speeds).total for speeds in self.curve.values())

    def under(self, speeds: Speeds) -> float:
        """Return the seconds of a step at fixed speeds."""
        return side_by_side(self.work, speeds).total

    def run(self, steps: int) -> float:
        """Run steps; returns their seconds, without noise."""
        return sum(self._step() for _ in range(steps))

    def _step(self) -> float:
        setting = self.governor.choose(self.kernel).setting
        course = side_by_side(self.work, speeds := self.curve[setting])
        beside = min(TASKS, math.ceil(course.together / self.task * speeds.compute))
        # Duration of the tasks that overlap communication; the last of them outlasts it.
        seconds = course.together + beside * self.task - course.together * speeds.compute
        idle = course.total - TASKS * self.task - (seconds - beside * self.task)
        noise = self._noisy()
        ran = OverlapSample(float(beside), seconds * noise, setting)
        for _ in range(TASKS - beside):
            self.governor.learn(SoloSample(self.kernel, 1.0, self.task * self._noisy()))
        self.governor.learn_step(StepSample(max(0.0, idle) * noise, self._moved(), {self.kernel: ran}))
        self.seconds[setting] = self.seconds.get(setting, 0.0) + course.together
        return course.total

    def _moved(self) -> float:
        """Return the bytes counted in a step: whole lumps, one of which may be counted in the next step."""
        lump = self.work.communication * LINK / self.lumps
        owed, self._owed = self._owed, lump * self._random.random() if self.noise else 0.0
        return self.lumps * lump + owed - self._owed

    def _noisy(self) -> float:
        return self._random.lognormvariate(0, self.noise) if self.noise else 1.0
