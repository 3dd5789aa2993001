"""What compute and communication did side by side, and under which setting. Values only.

A kernel goes by a name; where kernels cannot be told apart, by that of the task prefix that launches them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
class SoloSample:
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
class OverlapSample:
    """The tasks of a kernel in a step: how much they did, how long they took, what they were confined to."""

    work: float
    seconds: float
    setting: Setting = PRIORITY


@dataclass(frozen=True)
class StepSample:
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
    ran: Mapping[str, OverlapSample] = field(default_factory=dict)
    steady: bool = True

    @property
    def seconds(self) -> float:
        """Of tasks, and in which nothing but communication ran."""
        return self.idle + sum(ran.seconds for ran in self.ran.values())
