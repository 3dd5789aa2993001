"""Estimate the interference of kernels and communication, and average the estimates over workers.

Settings are compared by two costs: the seconds that a byte of communication adds to overlapping tasks, and
the seconds by which a second of compute delays communication. Which of them matters depends on what is on the
critical path of a program. Both are measured over a whole step, from the start of one run to the start of the
next: a run first splits, then moves, then waits for other workers, and a single task overlaps with only one
of these phases.

Workers of the same run wait for the slowest one, so a setting only pays once all of them use it. They
therefore decide from the average of their statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from dask_gpurt.observe.estimators import MeanEstimate, pooled
from dask_gpurt.overlap.samples import PRIORITY, OverlapSample, Setting, SoloSample, StepSample

#: The decay of a step's work with each further step: about ten steps are remembered.
STEP_DECAY = 0.9
#: Samples of a setting are stale after this many steps without use, and dropped, since it may be better now.
STALE_STEPS = 2000
#: The most kernels with statistics. Beyond that, the one that has not run for the longest time is dropped.
MAX_KERNELS = 500
#: The smallest fraction of its bytes that communication is assumed to have moved during tasks.
MIN_BESIDE_SHARE = 0.2
#: The fewest samples of solo tasks, and of steps with communication only, for their speeds to be known.
MIN_SOLO_SAMPLES, MIN_SOLO_STEPS = 5, 3
#: Kernels with less than this fraction of all compute are not shared with other workers.
MINOR_COMPUTE_SHARE = 0.01


class Costs(NamedTuple):
    """Hold the costs of compute and communication to each other.

    Parameters
    ----------
    adds
        Seconds that a byte of communication adds to compute.
    delays
        Seconds that a second of compute delays communication; None until the latter's solo speed is known.
    """

    adds: float
    delays: float | None


@dataclass
class InterferenceStats:
    """Estimate the interference under a setting: the kernel's work per second, and both costs.

    ``at`` is the kernel's step count when the setting was last used.
    """

    compute: MeanEstimate = field(default_factory=MeanEstimate)
    adds: MeanEstimate = field(default_factory=MeanEstimate)
    delays: MeanEstimate = field(default_factory=MeanEstimate)
    at: int = 0

    def bounds(self, off: float) -> Costs:
        """Return the costs, shifted by ``off`` times their uncertainty."""
        adds, delays = (
            estimate.mean + off * estimate.uncertainty if estimate.count else None
            for estimate in (self.adds, self.delays)
        )
        return Costs(adds or 0.0, delays)


@dataclass
class KernelStatistics:
    """Hold the statistics of a kernel.

    ``alone`` is its solo work per second, ``beside`` the interference with communication by setting,
    ``steps`` the number of its steps, and ``work`` its work in the last steps. ``usual`` is the work per
    second to which costs are relative as long as the kernel has never run alone.
    """

    alone: MeanEstimate = field(default_factory=MeanEstimate)
    beside: dict[Setting, InterferenceStats] = field(default_factory=dict)
    steps: int = 0
    work: float = 0.0
    usual: float = 0.0

    @property
    def samples(self) -> float:
        """Return the number of samples, of steps and of solo tasks."""
        return self.steps + self.alone.count

    def seconds(self) -> float:
        """Return the solo time of the work of the last steps, in seconds."""
        return self.work / speed if (speed := self.speed()) else 0.0

    def speed(self) -> float:
        """Return the solo work per second, or that of the first steps until the former is measured.

        If no task ever runs alone, the choice of this value favours no setting, provided that it stays the
        same.
        """
        if self.alone.count < MIN_SOLO_SAMPLES and PRIORITY in self.beside:
            return self.usual or self.beside[PRIORITY].compute.mean
        return self.alone.mean

    def add(self, ran: OverlapSample, costs: Costs | None, seconds: float, work: float, moved: float) -> bool:
        """Learn from this kernel's part of a step; return whether its costs have changed.

        Parameters
        ----------
        costs
            The costs of the step; None if unknown.
        seconds, work, moved
            The time of the step and the solo time of its tasks, in seconds, and its bytes.
        """
        self.steps += 1
        beside = self.beside.setdefault(ran.setting, InterferenceStats())
        beside.at = self.steps
        self.beside = {setting: of for setting, of in self.beside.items() if self.steps - of.at < STALE_STEPS}
        beside.compute.add(ran.work / ran.seconds)
        if not self.usual and ran.setting == PRIORITY and beside.compute.count >= MIN_SOLO_SAMPLES:
            self.usual = beside.compute.mean
            if self.alone.count < MIN_SOLO_SAMPLES:
                self._begin_again()
                return False
        if costs is None:
            return False
        changed = beside.adds.add(costs.adds, seconds / moved)
        if costs.delays is not None:
            changed |= beside.delays.add(costs.delays, seconds / work)
        return changed

    def _begin_again(self) -> None:
        """Drop costs that are relative to a previous speed."""
        for beside in self.beside.values():
            beside.adds, beside.delays = MeanEstimate(), MeanEstimate()

    def forget(self) -> None:
        """Drop all measurements with communication."""
        self.beside.clear()
        self.usual = 0.0


class OverlapStatistics:
    """Keep the statistics of all kernels on a device."""

    def __init__(self) -> None:
        #: The statistics of each kernel; the one that has run last comes last.
        self.kernels: dict[str, KernelStatistics] = {}
        #: Bytes of communication in the last steps, and the number of these steps; both decay.
        self.moved = self.steps = 0.0
        #: Solo time of a byte of communication, in seconds.
        self.seconds_per_byte = MeanEstimate()

    def compute(self) -> float:
        """Return the solo time of all tasks in the last steps, in seconds."""
        return sum(kernel.seconds() for kernel in self.kernels.values())

    def communication(self) -> float | None:
        """Return the solo time of communication in the last steps, in seconds; None if not known yet."""
        return (
            self.moved * self.seconds_per_byte.mean if self.seconds_per_byte.count >= MIN_SOLO_STEPS else None
        )

    def total(self, costs: Costs) -> float:
        """Return the time of the last steps under the given costs, in seconds.

        Compute and communication overlap until one of them is done, then the other continues alone. So the
        total is the longer of compute plus the time that communication adds, and communication plus its delay
        by compute.
        """
        alone = self.communication()
        total = self.compute() + self.moved * costs.adds
        if alone is None or costs.delays is None:
            return total
        return max(total, alone + self.compute() * costs.delays)

    def add(self, alone: SoloSample) -> str | None:
        """Learn from a task without communication; return its kernel if it changed and was dropped."""
        kernel = self._kernel(alone.kernel)
        kernel.work += alone.work
        self._limit()
        if not kernel.alone.add(alone.work / alone.seconds):
            if kernel.alone.count == MIN_SOLO_SAMPLES:
                kernel.beside.clear()  # earlier costs are relative to another speed
            return None
        self.kernels[alone.kernel] = KernelStatistics(work=kernel.work)
        return alone.kernel

    def add_step(self, step: StepSample, of: str | None = None) -> str | None:
        """Learn from a step; return the kernels that changed and were dropped.

        Parameters
        ----------
        of
            The only kernel to learn about from the step; None for all.
        """
        changed = self._learn(step, of)
        for name in changed:
            self.kernels[name].forget()
        self._limit()  # only now: a step may have many kernels that are new
        return ", ".join(changed) or None

    def _learn(self, step: StepSample, of: str | None) -> list[str]:
        self.moved = self.moved * STEP_DECAY + step.moved
        self.steps = self.steps * STEP_DECAY + 1
        for kernel in self.kernels.values():
            kernel.work *= STEP_DECAY
        for name, ran in step.ran.items():
            self._kernel(name).work += ran.work
        if not step.steady or not step.moved:
            return []
        if not step.ran:
            self._alone(step)
            return []
        costs, work = self.costs(step), self._work(step)
        return [
            name
            for name, ran in step.ran.items()
            if of in (None, name) and self.kernels[name].add(ran, costs, step.seconds, work, step.moved)
        ]

    def _alone(self, step: StepSample) -> None:
        self.seconds_per_byte.add(step.idle / step.moved)
        if self.seconds_per_byte.count == MIN_SOLO_STEPS:
            for kernel in self.kernels.values():
                kernel.beside.clear()  # earlier costs were attributed without this speed

    def costs(self, step: StepSample) -> Costs | None:
        """Return the costs in a step; None until the speeds of its kernels are known."""
        if not (work := self._work(step)):
            return None
        if self.communication() is None:
            return Costs((step.seconds - work) / step.moved, None)
        seconds_per_byte = self.seconds_per_byte.mean
        # While no task runs, communication proceeds at its solo speed.
        beside = max(step.moved - step.idle / seconds_per_byte, MIN_BESIDE_SHARE * step.moved)
        return Costs(
            (step.seconds - step.idle - work) / beside, (step.seconds - step.moved * seconds_per_byte) / work
        )

    def _work(self, step: StepSample) -> float:
        """Return the solo time of the tasks of a step, in seconds; 0 until their speeds are known."""
        kernels = {name: self.kernels.get(name) for name in step.ran}
        speeds = {name: kernel.speed() for name, kernel in kernels.items() if kernel is not None}
        if len(speeds) < len(step.ran) or not all(speeds.values()):
            return 0.0
        return sum(ran.work / speeds[name] for name, ran in step.ran.items())

    def _kernel(self, name: str) -> KernelStatistics:
        """Return the statistics of a kernel that has run."""
        kernel = self.kernels.pop(name, None) or KernelStatistics()
        self.kernels[name] = kernel
        return kernel

    def _limit(self) -> None:
        while len(self.kernels) > MAX_KERNELS:
            del self.kernels[next(iter(self.kernels))]

    # ---- as plain values ---------------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """Return everything as JSON-compatible values."""
        return {
            "moved": self.moved,
            "steps": self.steps,
            "pace": self.seconds_per_byte.plain(),
            "kernels": {name: _plain(kernel) for name, kernel in self.kernels.items()},
        }

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> OverlapStatistics:
        """Restore the statistics from the result of :meth:`plain`.

        Raises
        ------
        KeyError, TypeError, ValueError
            If the values are malformed.
        """
        known = cls()
        known.moved, known.steps = float(values["moved"]), float(values["steps"])
        known.seconds_per_byte = MeanEstimate.of(values["pace"])
        known.kernels = {str(name): _kernel(of) for name, of in values["kernels"].items()}
        return known


def _plain(kernel: KernelStatistics) -> dict[str, Any]:
    return {
        "steps": kernel.steps,
        "work": kernel.work,
        "usual": kernel.usual,
        "alone": kernel.alone.plain(),
        "beside": {
            str(setting): [beside.at, *(one.plain() for one in (beside.compute, beside.adds, beside.delays))]
            for setting, beside in kernel.beside.items()
        },
    }


def _kernel(values: Mapping[str, Any]) -> KernelStatistics:
    beside = {
        Setting.parse(name): InterferenceStats(
            MeanEstimate.of(compute), MeanEstimate.of(adds), MeanEstimate.of(delays), int(at)
        )
        for name, (at, compute, adds, delays) in values["beside"].items()
    }
    numbers = int(values["steps"]), float(values["work"]), float(values["usual"])
    return KernelStatistics(MeanEstimate.of(values["alone"]), beside, *numbers)


# ---- several workers -------------------------------------------------------------------


def significant(known: OverlapStatistics) -> OverlapStatistics:
    """Return the statistics of a worker without kernels that hardly ran in its last steps."""
    least = MINOR_COMPUTE_SHARE * known.compute()
    kernels = {name: kernel for name, kernel in known.kernels.items() if kernel.seconds() > least}
    return _with_kernels(known, kernels)


def average(several: Sequence[OverlapStatistics]) -> OverlapStatistics:
    """Average the statistics of workers, for all kernels that any worker has.

    Sample counts are averaged, not summed: workers wait for each other within a step, so their samples of a
    step are correlated.
    """
    found = OverlapStatistics()
    if several:
        found.moved, found.steps = fmean(one.moved for one in several), fmean(one.steps for one in several)
    found.seconds_per_byte = pooled(one.seconds_per_byte for one in several)
    names = dict.fromkeys(name for one in several for name in one.kernels)
    found.kernels = {
        name: _common([one.kernels[name] for one in several if name in one.kernels]) for name in names
    }
    return found


def overlaid(agreed: OverlapStatistics, own: OverlapStatistics) -> OverlapStatistics:
    """Return the average, completed by a worker's own statistics of kernels that it lacks."""
    return _with_kernels(agreed, {**own.kernels, **agreed.kernels})


def _with_kernels(known: OverlapStatistics, kernels: dict[str, KernelStatistics]) -> OverlapStatistics:
    found = OverlapStatistics()
    found.moved, found.steps, found.seconds_per_byte, found.kernels = (
        known.moved,
        known.steps,
        known.seconds_per_byte,
        kernels,
    )
    return found


def _common(kernels: Sequence[KernelStatistics]) -> KernelStatistics:
    settings = dict.fromkeys(setting for kernel in kernels for setting in kernel.beside)
    usual = [kernel.usual for kernel in kernels if kernel.usual]  # 0 means unknown
    return KernelStatistics(
        pooled(kernel.alone for kernel in kernels),
        {
            setting: _beside(kernel.beside[setting] for kernel in kernels if setting in kernel.beside)
            for setting in settings
        },
        round(fmean(kernel.steps for kernel in kernels)),
        fmean(kernel.work for kernel in kernels),
        fmean(usual) if usual else 0.0,
    )


def _beside(several: Iterable[InterferenceStats]) -> InterferenceStats:
    found = list(several)
    compute, adds, delays = (
        pooled(getattr(one, name) for one in found) for name in ("compute", "adds", "delays")
    )
    return InterferenceStats(compute, adds, delays, max(one.at for one in found))
