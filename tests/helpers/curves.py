"""Simulated kernels beside communication, whose response to each setting is known."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from dask_gpurt.overlap.governor import Policy
from dask_gpurt.overlap.samples import OFF, PRIORITY, OverlapSample, Setting, SoloSample, StepSample

CAP8, CAP6, CAP4, SPLIT = Setting(residency=8), Setting(residency=6), Setting(residency=4), Setting(sms=116)
#: What a step keeps of its speed at worst: a cap of 16 blocks, SMs of 132, one after the other.
CANDIDATES = {SPLIT: 116 / 132 / 2, CAP8: 8 / 16, CAP6: 6 / 16, CAP4: 4 / 16, OFF: 0.5}
#: Tasks of a step, and bytes a second of communication alone.
TASKS, LINK = 20, 1e9


@dataclass(frozen=True)
class Work:
    """Say what is to be done in a step, in seconds that each would take alone."""

    compute: float
    communication: float


@dataclass(frozen=True)
class Speeds:
    """Say how fast both progress together, each as a share of its speed alone, above 0 and at most 1."""

    compute: float
    communication: float


@dataclass(frozen=True)
class Course:
    """Say how long a step takes at some speeds, and for how much of it both run, in seconds."""

    speeds: Speeds
    total: float
    together: float


def side_by_side(work: Work, speeds: Speeds) -> Course:
    """Do a step: both run until the first one is done, and the other goes on alone.

    For speeds that add up to more than 1 the total is the larger of
    ``K + C (1 - c) / m`` and ``C + K (1 - m) / c``, with K, C the work and c, m the speeds: in the first case
    compute is waited for, and pays for the communication beside it; in the second it is the other way round.
    """
    together = min(work.compute / speeds.compute, work.communication / speeds.communication)
    left = work.compute + work.communication - together * (speeds.compute + speeds.communication)
    return Course(speeds, together + left, together)


Curve = Mapping[Setting, Speeds]


def measured(f: float, communication: float = 0.9) -> Speeds:
    """Return speeds that hide a share ``f`` of what could be hidden, with equal work on both sides."""
    return Speeds(1 - communication * (1 - f), communication)


def plain(f: float) -> Speeds:
    """Return the same without priority: both are slowed alike."""
    return Speeds(1 / (2 - f), 1 / (2 - f))


#: f without control and under each setting, as measured on four H200: the first three beside copies to
#: another GPU, the next two beside an all-reduce, the last two beside shuffles of the runtime. A cap of 8 was
#: not measured for the first ones, nor the cap of 6 for the last: they are taken to lie between the others.
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
    """Steps of some tasks of one kernel beside communication, under a governor.

    Parameters
    ----------
    communication
        Seconds of communication alone in a step, as a share of those of compute.
    noise
        The relative standard deviation of what a step takes.
    lumps
        Pieces that communication counts in.
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
        #: Seconds in flight under each setting, without the noise.
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
        """Return the seconds that so many steps take, without the noise."""
        return sum(self._step() for _ in range(steps))

    def _step(self) -> float:
        setting = self.governor.choose(self.kernel).setting
        course = side_by_side(self.work, speeds := self.curve[setting])
        beside = min(TASKS, math.ceil(course.together / self.task * speeds.compute))
        # What the tasks take that communication was beside, of which the last one is longer than it.
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
        """Return the bytes that count in a step: whole lumps, of which one may count in the next one."""
        lump = self.work.communication * LINK / self.lumps
        owed, self._owed = self._owed, lump * self._random.random() if self.noise else 0.0
        return self.lumps * lump + owed - self._owed

    def _noisy(self) -> float:
        return self._random.lognormvariate(0, self.noise) if self.noise else 1.0
