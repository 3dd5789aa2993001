"""What is known of kernels beside communication: measured, remembered, forgotten once it changed. Pure.

A kernel goes by a name; where kernels cannot be told apart, by that of the task prefix that launches them.

What communication costs is the time that it adds: that of the tasks beside it, less what they take alone, and
that in which nothing else ran. Divided by the bytes that were moved, it is what a setting is judged by. It is
taken over a whole step, from the begin of one run to that of the next: a run first splits, then moves, then
waits for others, and a single task beside it sees only one of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dask_gpurt.overlap.estimate import Estimate

#: What the work of a step counts in the next one: so the last ten steps or so are remembered.
STEPS_KEPT = 0.9
#: Steps after which a setting that was not used meanwhile is forgotten: it may be better now.
STALE = 2000
#: The most kernels that are known; of more, those with the fewest samples are forgotten.
MOST_KERNELS = 500
#: Tasks alone from which it is known how fast that is.
FEW = 5


@dataclass(frozen=True)
class Setting:
    """How compute and communication share a device.

    Parameters
    ----------
    residency
        The most blocks of a kernel on an SM; None for as many as fit.
    sms
        The SMs that compute may use; None for all.
    first
        Whether communication has the higher priority.
    """

    residency: int | None = None
    sms: int | None = None
    first: bool = True

    def __str__(self) -> str:
        parts = [
            f"residency {self.residency}" if self.residency else "",
            f"{self.sms} SMs" if self.sms else "",
            "" if self.first else "no priority",
        ]
        return ", ".join(part for part in parts if part) or "priority only"

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Read what ``str`` has written; ValueError for anything else."""
        found: dict[str, Any] = {}
        for part in text.split(", ") if text != str(PRIORITY) else ():
            words = part.split(" ")
            match words:
                case ["residency", number]:
                    found["residency"] = int(number)
                case [number, "SMs"]:
                    found["sms"] = int(number)
                case ["no", "priority"]:
                    found["first"] = False
                case _:
                    raise ValueError(f"{text!r} is no setting: expected such as 'residency 4' or '116 SMs'")
        return cls(**found)


#: Communication comes first, and compute is not confined.
PRIORITY = Setting()
#: Nothing is done.
OFF = Setting(first=False)


@dataclass(frozen=True)
class Alone:
    """A task without communication beside it.

    Parameters
    ----------
    work
        How much it did, in a unit of its kernel's own, such as bytes of inputs.
    """

    kernel: str
    work: float
    seconds: float


@dataclass(frozen=True)
class Ran:
    """The tasks of a kernel in a step: how much they did, how long they took, what they were confined to."""

    work: float
    seconds: float
    setting: Setting = PRIORITY


@dataclass(frozen=True)
class Step:
    """Communication from the begin of a run to that of the next, and what ran beside it.

    Parameters
    ----------
    idle
        Seconds in flight in which no task ran.
    moved
        Bytes of communication.
    ran
        The tasks that communication was beside, by kernel.
    steady
        Whether each kernel had one setting throughout, and the device to itself; if not, a step only counts
        as work done.
    """

    idle: float
    moved: float
    ran: Mapping[str, Ran] = field(default_factory=dict)
    steady: bool = True

    @property
    def seconds(self) -> float:
        """Of tasks, and in which nothing but communication ran."""
        return self.idle + sum(ran.seconds for ran in self.ran.values())


@dataclass
class Beside:
    """How it is under a setting: work a second of the kernel, and seconds that a byte of communication costs.

    ``at`` is how many steps of the kernel there had been at the last one of this setting.
    """

    compute: Estimate = field(default_factory=Estimate)
    cost: Estimate = field(default_factory=Estimate)
    at: int = 0


@dataclass
class Kernel:
    """What is known of a kernel.

    Its work a second ``alone``, how it was ``beside`` communication, in how many ``steps``, and its ``work``
    in the last ones.
    """

    alone: Estimate = field(default_factory=Estimate)
    beside: dict[Setting, Beside] = field(default_factory=dict)
    steps: int = 0
    work: float = 0.0

    @property
    def samples(self) -> float:
        """Of anything."""
        return self.steps + self.alone.count

    def seconds(self) -> float:
        """What it did in the last steps, in seconds alone."""
        return self.work / speed if (speed := self.speed()) else 0.0

    def speed(self) -> float:
        """Work a second alone; until that is measured, that beside communication with priority only.

        As long as no task is ever alone the value makes no difference between settings.
        """
        if self.alone.count < FEW and PRIORITY in self.beside:
            return self.beside[PRIORITY].compute.mean
        return self.alone.mean

    def add(self, ran: Ran, cost: float | None, seconds: float) -> bool:
        """Take the part of this kernel in a step; whether something of it has changed.

        Parameters
        ----------
        cost, seconds
            That communication cost, and that the step took, for each byte; None if that is not known.
        """
        self.steps += 1
        beside = self.beside.setdefault(ran.setting, Beside())
        beside.at = self.steps
        self.beside = {setting: of for setting, of in self.beside.items() if self.steps - of.at < STALE}
        beside.compute.add(ran.work / ran.seconds)
        return cost is not None and beside.cost.add(cost, seconds)


class Knowledge:
    """All that is known on a device."""

    def __init__(self) -> None:
        self.kernels: dict[str, Kernel] = {}
        #: Bytes of communication of the last steps, and how many steps these were.
        self.moved = self.steps = 0.0

    def compute(self) -> float:
        """What tasks did in the last steps, in seconds alone."""
        return sum(kernel.seconds() for kernel in self.kernels.values())

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
        cost = self.cost(step)
        changed = [
            name
            for name, ran in step.ran.items()
            if of in (None, name) and self.kernels[name].add(ran, cost, step.seconds / step.moved)
        ]
        for name in changed:
            self.kernels[name].beside.clear()
        return ", ".join(changed) or None

    def cost(self, step: Step) -> float | None:
        """Seconds that each byte of a step has added; None until it is known how fast its kernels are."""
        speeds = {name: self.kernels[name].speed() for name in step.ran}
        if not all(speeds.values()):
            return None
        return (step.seconds - sum(ran.work / speeds[name] for name, ran in step.ran.items())) / step.moved

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
        known.kernels = {str(name): _kernel(of) for name, of in values["kernels"].items()}
        return known


def _plain(kernel: Kernel) -> dict[str, Any]:
    return {
        "steps": kernel.steps,
        "work": kernel.work,
        "alone": kernel.alone.plain(),
        "beside": {
            str(setting): [beside.at, beside.compute.plain(), beside.cost.plain()]
            for setting, beside in kernel.beside.items()
        },
    }


def _kernel(values: Mapping[str, Any]) -> Kernel:
    beside = {
        Setting.parse(name): Beside(Estimate.of(compute), Estimate.of(cost), int(at))
        for name, (at, compute, cost) in values["beside"].items()
    }
    return Kernel(Estimate.of(values["alone"]), beside, int(values["steps"]), float(values["work"]))
