"""What is known of kernels beside communication: measured, remembered, forgotten once it changed. Pure.

What a setting is judged by is what each of the two costs the other: the time that a byte of communication
adds to the tasks beside it, and the time for which a second of compute holds communication up. Which of them
counts depends on what a program waits for. Both are taken over a whole step, from the begin of one run to
that of the next: a run first splits, then moves, then waits for others, and a single task beside it sees only
one of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dask_gpurt.overlap.estimate import Estimate
from dask_gpurt.overlap.steps import PRIORITY, Alone, Ran, Setting, Step

#: What the work of a step counts in the next one: so the last ten steps or so are remembered.
STEPS_KEPT = 0.9
#: Steps after which a setting that was not used meanwhile is forgotten: it may be better now.
STALE = 2000
#: The most kernels that are known; of more, those with the fewest samples are forgotten.
MOST_KERNELS = 500
#: The least share of its bytes that communication is taken to have moved beside tasks.
FEWEST = 0.2
#: Tasks alone from which it is known how fast that is, and steps of communication alone.
FEW, FEW_STEPS_ALONE = 5, 3


class Costs(NamedTuple):
    """What compute and communication cost each other.

    Parameters
    ----------
    adds
        Seconds that a byte of communication adds to compute.
    delays
        Seconds that a second of compute delays communication; None until its pace alone is known.
    """

    adds: float
    delays: float | None


@dataclass
class Beside:
    """How it is under a setting: work a second of the kernel, and what both cost each other.

    ``at`` is how many steps of the kernel there had been at the last one of this setting.
    """

    compute: Estimate = field(default_factory=Estimate)
    adds: Estimate = field(default_factory=Estimate)
    delays: Estimate = field(default_factory=Estimate)
    at: int = 0

    def bounds(self, off: float) -> Costs:
        """The costs, so many times as far off as they may be."""
        adds, delays = (
            estimate.mean + off * estimate.uncertainty if estimate.count else None
            for estimate in (self.adds, self.delays)
        )
        return Costs(adds or 0.0, delays)


@dataclass
class Kernel:
    """What is known of a kernel.

    Its work a second ``alone``, how it was ``beside`` communication, in how many ``steps``, and its ``work``
    in the last ones. ``usual`` is the work a second that its costs are against as long as it is never alone.
    """

    alone: Estimate = field(default_factory=Estimate)
    beside: dict[Setting, Beside] = field(default_factory=dict)
    steps: int = 0
    work: float = 0.0
    usual: float = 0.0

    @property
    def samples(self) -> float:
        """Of anything."""
        return self.steps + self.alone.count

    def seconds(self) -> float:
        """What it did in the last steps, in seconds alone."""
        return self.work / speed if (speed := self.speed()) else 0.0

    def speed(self) -> float:
        """Work a second alone; until that is measured, that of its first steps with priority only.

        As long as no task is ever alone the value makes no difference between settings, if it stays.
        """
        if self.alone.count < FEW and PRIORITY in self.beside:
            return self.usual or self.beside[PRIORITY].compute.mean
        return self.alone.mean

    def add(self, ran: Ran, costs: Costs | None, seconds: float, work: float, moved: float) -> bool:
        """Take the part of this kernel in a step; whether something of it has changed.

        Parameters
        ----------
        costs
            Those of the step; None if they are not known.
        seconds, work, moved
            That the step took, those of its tasks alone, and its bytes.
        """
        self.steps += 1
        beside = self.beside.setdefault(ran.setting, Beside())
        beside.at = self.steps
        self.beside = {setting: of for setting, of in self.beside.items() if self.steps - of.at < STALE}
        beside.compute.add(ran.work / ran.seconds)
        if not self.usual and ran.setting == PRIORITY and beside.compute.count >= FEW:
            self.usual = beside.compute.mean
            if self.alone.count < FEW:
                self._begin_again()
                return False
        if costs is None:
            return False
        changed = beside.adds.add(costs.adds, seconds / moved)
        if costs.delays is not None:
            changed |= beside.delays.add(costs.delays, seconds / work)
        return changed

    def _begin_again(self) -> None:
        """Forget costs that are against another speed."""
        for beside in self.beside.values():
            beside.adds, beside.delays = Estimate(), Estimate()

    def forget(self) -> None:
        """Forget how it was beside communication."""
        self.beside.clear()
        self.usual = 0.0


class Knowledge:
    """All that is known on a device."""

    def __init__(self) -> None:
        self.kernels: dict[str, Kernel] = {}
        #: Bytes of communication of the last steps, and how many steps these were.
        self.moved = self.steps = 0.0
        #: Seconds that a byte takes alone.
        self.pace = Estimate()

    def compute(self) -> float:
        """What tasks did in the last steps, in seconds alone."""
        return sum(kernel.seconds() for kernel in self.kernels.values())

    def communication(self) -> float | None:
        """What communication did in the last steps, in seconds alone; None as long as that is not known."""
        return self.moved * self.pace.mean if self.pace.count >= FEW_STEPS_ALONE else None

    def total(self, costs: Costs) -> float:
        """Seconds of the last steps, if compute and communication had cost each other so much.

        As they run side by side until one is done, and the other then goes on alone: the longer of compute
        with what communication adds to it, and of communication with what compute delays it by.
        """
        alone = self.communication()
        total = self.compute() + self.moved * costs.adds
        if alone is None or costs.delays is None:
            return total
        return max(total, alone + self.compute() * costs.delays)

    def add(self, alone: Alone) -> str | None:
        """Take a task; what has changed, so that what was known of it was forgotten."""
        kernel = self._kernel(alone.kernel)
        kernel.work += alone.work
        if not kernel.alone.add(alone.work / alone.seconds):
            if kernel.alone.count == FEW:
                kernel.beside.clear()  # costs so far are against another speed
            return None
        self.kernels[alone.kernel] = Kernel(work=kernel.work)
        return alone.kernel

    def add_step(self, step: Step, of: str | None = None) -> str | None:
        """Take a step; what has changed, so that what was known of it was forgotten.

        Parameters
        ----------
        of
            The only kernel that the step says something of; None for all of it.
        """
        self.moved = self.moved * STEPS_KEPT + step.moved
        self.steps = self.steps * STEPS_KEPT + 1
        for kernel in self.kernels.values():
            kernel.work *= STEPS_KEPT
        for name, ran in step.ran.items():
            self._kernel(name).work += ran.work
        if not step.steady or not step.moved:
            return None
        if not step.ran:
            self._alone(step)
            return None
        costs, work = self.costs(step), self._work(step)
        changed = [
            name
            for name, ran in step.ran.items()
            if of in (None, name) and self.kernels[name].add(ran, costs, step.seconds, work, step.moved)
        ]
        for name in changed:
            self.kernels[name].forget()
        return ", ".join(changed) or None

    def _alone(self, step: Step) -> None:
        self.pace.add(step.idle / step.moved)
        if self.pace.count == FEW_STEPS_ALONE:
            for kernel in self.kernels.values():
                kernel.beside.clear()  # costs so far were told apart in another way

    def costs(self, step: Step) -> Costs | None:
        """What both have cost each other in a step; None until it is known how fast its kernels are."""
        if not (work := self._work(step)):
            return None
        if self.communication() is None:
            return Costs((step.seconds - work) / step.moved, None)
        pace = self.pace.mean
        # In idle seconds communication went on as it does alone.
        beside = max(step.moved - step.idle / pace, FEWEST * step.moved)
        return Costs((step.seconds - step.idle - work) / beside, (step.seconds - step.moved * pace) / work)

    def _work(self, step: Step) -> float:
        """Of the tasks of a step, in seconds alone; 0 until it is known how fast that is."""
        speeds = {name: self.kernels[name].speed() for name in step.ran}
        if not all(speeds.values()):
            return 0.0
        return sum(ran.work / speeds[name] for name, ran in step.ran.items())

    def _kernel(self, name: str) -> Kernel:
        if name not in self.kernels and len(self.kernels) >= MOST_KERNELS:
            del self.kernels[min(self.kernels, key=lambda other: self.kernels[other].samples)]
        return self.kernels.setdefault(name, Kernel())

    # ---- as plain values ---------------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """It all, as values that JSON holds."""
        return {
            "moved": self.moved,
            "steps": self.steps,
            "pace": self.pace.plain(),
            "kernels": {name: _plain(kernel) for name, kernel in self.kernels.items()},
        }

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Knowledge:
        """The knowledge that :meth:`plain` was called of.

        Raises
        ------
        KeyError, TypeError, ValueError
            When the values are none of it.
        """
        known = cls()
        known.moved, known.steps = float(values["moved"]), float(values["steps"])
        known.pace = Estimate.of(values["pace"])
        known.kernels = {str(name): _kernel(of) for name, of in values["kernels"].items()}
        return known


def _plain(kernel: Kernel) -> dict[str, Any]:
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


def _kernel(values: Mapping[str, Any]) -> Kernel:
    beside = {
        Setting.parse(name): Beside(Estimate.of(compute), Estimate.of(adds), Estimate.of(delays), int(at))
        for name, (at, compute, adds, delays) in values["beside"].items()
    }
    numbers = int(values["steps"]), float(values["work"]), float(values["usual"])
    return Kernel(Estimate.of(values["alone"]), beside, *numbers)
