"""Simulated kernels beside communication, whose response to each setting is known."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dask_gpurt.overlap.governor import Governing
from dask_gpurt.overlap.knowledge import PRIORITY, Sample, Setting
from dask_gpurt.overlap.objective import Speeds, Work, side_by_side

CAP8, CAP6, CAP4, SPLIT = Setting(residency=8), Setting(residency=6), Setting(residency=4), Setting(sms=116)
#: What a kernel keeps of its speed at worst: a cap of 16 blocks, SMs of 132.
CANDIDATES = {SPLIT: 116 / 132, CAP8: 8 / 16, CAP6: 6 / 16, CAP4: 4 / 16}
#: Tasks of a step, and bytes a second of communication alone.
TASKS, LINK = 20, 1e9

Curve = Mapping[Setting, Speeds]


def measured(f: float, communication: float = 0.9) -> Speeds:
    """Speeds that hide a share ``f`` of what could be hidden, with equal work on both sides."""
    return Speeds(1 - communication * (1 - f), communication)


def plain(f: float) -> Speeds:
    """The same without priority: both are slowed alike."""
    return Speeds(1 / (2 - f), 1 / (2 - f))


#: f without control and under each setting, as measured on four H200: the first three beside a shuffle, the
#: others beside an all-reduce. A cap of 8 was not measured, nor the caps of 6 and the split of the last two:
#: they are taken to lie between the others.
MEASURED: dict[str, tuple[float, dict[Setting, float]]] = {
    "join": (0.33, {PRIORITY: 0.59, SPLIT: 0.58, CAP8: 0.42, CAP6: 0.25, CAP4: 0.18}),
    "groupby": (0.20, {PRIORITY: 0.37, SPLIT: 0.27, CAP8: 0.35, CAP6: 0.32, CAP4: 0.33}),
    "gemm": (0.07, {PRIORITY: 0.30, SPLIT: 0.44, CAP8: 0.28, CAP6: 0.26, CAP4: 0.30}),
    "bf16-gemm": (0.73, {PRIORITY: 0.73, SPLIT: 0.70, CAP8: 0.71, CAP6: 0.68, CAP4: 0.63}),
    "elementwise": (0.39, {PRIORITY: 0.40, SPLIT: 0.40, CAP8: 0.50, CAP6: 0.60, CAP4: 0.80}),
}
CURVES: dict[str, Curve] = {
    name: {setting: measured(f) for setting, f in responses.items()}
    for name, (_, responses) in MEASURED.items()
}
UNCONTROLLED = {name: plain(f) for name, (f, _) in MEASURED.items()}


@dataclass
class Steps:
    """Steps of some tasks of one kernel beside communication, under a governor.

    Parameters
    ----------
    communication
        Seconds of communication alone in a step, as a share of those of compute.
    noise
        The relative standard deviation of what is measured.
    """

    governor: Governing
    kernel: str
    curve: Curve
    communication: float = 1.0
    noise: float = 0.05
    seed: int = 0
    #: Seconds that a task takes alone.
    task: float = 1.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        #: Seconds under each setting, without the noise; None is alone.
        self.seconds: dict[Setting | None, float] = {}

    @property
    def work(self) -> Work:
        compute = TASKS * self.task
        return Work(compute, compute * self.communication)

    def best(self) -> float:
        """Seconds of a step under the best fixed setting."""
        return min(side_by_side(self.work, speeds).total for speeds in self.curve.values())

    def under(self, speeds: Speeds) -> float:
        """Seconds of a step at fixed speeds."""
        return side_by_side(self.work, speeds).total

    def run(self, steps: int) -> float:
        """Seconds that so many steps take, without the noise."""
        return sum(sum(self._step()) for _ in range(steps))

    def _step(self) -> Iterator[float]:
        self.governor.step()
        left = self.work.communication
        for _ in range(TASKS):
            setting = self.governor.choose(self.kernel).setting if left > 0 else None
            seconds, done = self._task(setting, left)
            left -= done
            self.seconds[setting] = self.seconds.get(setting, 0.0) + seconds
            yield seconds
        if left > 1e-9:
            self._learn(left, None, moved=left)  # alone
            yield left

    def _task(self, setting: Setting | None, left: float) -> tuple[float, float]:
        """Seconds of a task, and of the communication alone that was done meanwhile."""
        if setting is None:
            self._learn(self.task, self.kernel)
            return self.task, 0.0
        speeds = self.curve[setting]
        seconds = self.task / speeds.compute
        if seconds * speeds.communication <= left:
            self._learn(seconds, self.kernel, setting, moved=seconds * speeds.communication)
            return seconds, seconds * speeds.communication
        course = side_by_side(Work(self.task, left), speeds)
        self._learn(course.total, self.kernel, setting, moved=left, steady=False)
        return course.total, left

    def _learn(
        self,
        seconds: float,
        kernel: str | None,
        setting: Setting = PRIORITY,
        *,
        moved: float | None = None,
        steady: bool = True,
    ) -> None:
        nbytes = None if moved is None else moved * LINK * self._noisy()
        work = 1.0 if kernel else 0.0
        self.governor.learn(Sample(seconds * self._noisy(), kernel, work, setting, nbytes, steady))

    def _noisy(self) -> float:
        return self._random.lognormvariate(0, self.noise) if self.noise else 1.0
