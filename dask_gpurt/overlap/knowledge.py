"""What is known of kernels beside communication: measured, remembered, forgotten once it changed. Pure.

A kernel goes by a name; where kernels cannot be told apart, by that of the task prefix that launches them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dask_gpurt.overlap.estimate import Estimate
from dask_gpurt.overlap.objective import Work

#: What the work of a step counts in the next one: so the last ten steps or so are remembered.
STEPS_KEPT = 0.9
#: Samples of a kernel after which a setting that was not used meanwhile is forgotten: it may be better now.
STALE = 4000
#: The most kernels that are known; of more, those with the fewest samples are forgotten.
MOST_KERNELS = 500


@dataclass(frozen=True)
class Setting:
    """What confines compute while communication runs. Communication has the higher priority in any case.

    Parameters
    ----------
    residency
        The most blocks of a kernel on an SM; None for as many as fit.
    sms
        The SMs that compute may use; None for all.
    """

    residency: int | None = None
    sms: int | None = None

    def __str__(self) -> str:
        parts = [
            f"residency {self.residency}" if self.residency else "",
            f"{self.sms} SMs" if self.sms else "",
        ]
        return ", ".join(part for part in parts if part) or "priority only"

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Read what ``str`` has written; ValueError for anything else."""
        found: dict[str, int] = {}
        for part in text.split(", ") if text != str(PRIORITY) else ():
            words = part.split(" ")
            match words:
                case ["residency", number]:
                    found["residency"] = int(number)
                case [number, "SMs"]:
                    found["sms"] = int(number)
                case _:
                    raise ValueError(f"{text!r} is no setting: expected such as 'residency 4' or '116 SMs'")
        return cls(**found)


#: Compute is not confined.
PRIORITY = Setting()


@dataclass(frozen=True)
class Sample:
    """Something that was measured under one setting.

    Parameters
    ----------
    seconds
        How long it took.
    kernel
        What ran; None for communication alone.
    work
        How much the kernel did, in a unit of its own, such as bytes of inputs.
    setting
        What confined it.
    moved
        Bytes of communication meanwhile; None if there was none.
    steady
        Whether communication and setting were the same throughout; if not, it only counts as work done.
    """

    seconds: float
    kernel: str | None = None
    work: float = 0.0
    setting: Setting = PRIORITY
    moved: float | None = None
    steady: bool = True


@dataclass
class Beside:
    """How fast a kernel and communication were together under a setting: work and bytes a second.

    ``at`` is how many samples of the kernel there had been at the last one of this setting.
    """

    compute: Estimate = field(default_factory=Estimate)
    communication: Estimate = field(default_factory=Estimate)
    at: int = 0


@dataclass
class Kernel:
    """What is known of a kernel.

    Its work a second ``alone`` and each time (``task``), how it was ``beside`` communication, and its
    ``work`` in the last steps.
    """

    alone: Estimate = field(default_factory=Estimate)
    task: Estimate = field(default_factory=Estimate)
    beside: dict[Setting, Beside] = field(default_factory=dict)
    samples: int = 0
    work: float = 0.0

    def seconds(self) -> float:
        """What it did in the last steps, in seconds alone."""
        return self.work / speed if (speed := self.speed()) else 0.0

    def speed(self) -> float:
        """Work a second alone; until that is measured, the most that was seen beside communication."""
        return self.alone.mean or max((beside.compute.mean for beside in self.beside.values()), default=0.0)

    def add(self, sample: Sample) -> bool:
        """Take a sample of this kernel; whether something of it has changed."""
        self.samples += 1
        self.task.add(sample.work)
        speed = sample.work / sample.seconds
        if sample.moved is None:
            return self.alone.add(speed)
        beside = self.beside.setdefault(sample.setting, Beside())
        beside.at = self.samples
        self.beside = {setting: of for setting, of in self.beside.items() if self.samples - of.at < STALE}
        return any([beside.compute.add(speed), beside.communication.add(sample.moved / sample.seconds)])


class Knowledge:
    """All that is known on a device."""

    def __init__(self) -> None:
        self.kernels: dict[str, Kernel] = {}
        #: Bytes a second of communication alone.
        self.link = Estimate()
        #: Bytes of communication of the last steps.
        self.moved = 0.0

    def work(self) -> Work:
        """What steps consist of; only the ratio means something."""
        compute = sum(kernel.seconds() for kernel in self.kernels.values())
        return Work(compute, self.moved / speed if (speed := self.link_speed()) else 0.0)

    def link_speed(self) -> float:
        """Bytes a second of communication alone; until that is measured, the most seen beside a kernel.

        As long as it is never alone it is never waited for, and the value makes no difference.
        """
        beside = (one for kernel in self.kernels.values() for one in kernel.beside.values())
        together = (one.communication.mean for one in beside)
        return self.link.mean or max(together, default=0.0)

    def step(self) -> None:
        """Another step begins."""
        self.moved *= STEPS_KEPT
        for kernel in self.kernels.values():
            kernel.work *= STEPS_KEPT

    def add(self, sample: Sample) -> str | None:
        """Take a sample; what has changed, so that what was known of it was forgotten."""
        forgotten = None
        if sample.steady and sample.seconds > 0:
            forgotten = self._add_link(sample) if sample.kernel is None else self._add_kernel(sample)
        self.moved += sample.moved or 0.0
        if kernel := self.kernels.get(sample.kernel or ""):
            kernel.work += sample.work
        return forgotten

    def _add_link(self, sample: Sample) -> str | None:
        if not self.link.add((sample.moved or 0.0) / sample.seconds):
            return None
        self.link = Estimate()
        for kernel in self.kernels.values():
            kernel.beside.clear()
        return "communication alone"

    def _add_kernel(self, sample: Sample) -> str | None:
        name = sample.kernel or ""
        kernel = self.kernels.setdefault(name, Kernel())
        changed = kernel.add(sample)
        if changed and sample.moved is None:
            self.kernels[name] = Kernel(work=kernel.work)
        elif changed:
            kernel.beside.clear()
        if len(self.kernels) > MOST_KERNELS:
            others = (other for other in self.kernels if other != name)
            del self.kernels[min(others, key=lambda other: self.kernels[other].samples)]
        return name if changed else None

    # ---- as plain values ---------------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """It all, as values that JSON holds."""
        return {
            "link": self.link.plain(),
            "moved": self.moved,
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
        known.link = Estimate.of(values["link"])
        known.moved = float(values["moved"])
        known.kernels = {str(name): _kernel(of) for name, of in values["kernels"].items()}
        return known


def _plain(kernel: Kernel) -> dict[str, Any]:
    return {
        "samples": kernel.samples,
        "work": kernel.work,
        "alone": kernel.alone.plain(),
        "task": kernel.task.plain(),
        "beside": {
            str(setting): [beside.at, beside.compute.plain(), beside.communication.plain()]
            for setting, beside in kernel.beside.items()
        },
    }


def _kernel(values: Mapping[str, Any]) -> Kernel:
    beside = {
        Setting.parse(name): Beside(Estimate.of(compute), Estimate.of(communication), int(at))
        for name, (at, compute, communication) in values["beside"].items()
    }
    alone, task = Estimate.of(values["alone"]), Estimate.of(values["task"])
    return Kernel(alone, task, beside, int(values["samples"]), float(values["work"]))
