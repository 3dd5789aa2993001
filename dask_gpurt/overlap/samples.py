"""Define the samples that are taken of compute beside communication, and the settings that both run under.

A kernel is identified by a name; where kernels can not be told apart, by the prefix of the tasks that launch
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Setting:
    """Describe how compute and communication share a device.

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
        """Read the text that ``str`` has written; raise ValueError for any other."""
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
                    raise ValueError(f"{text!r} is not a setting: expected e.g. 'residency 4' or '116 SMs'")
        return cls(**found)


#: Communication has the higher priority, and compute is not confined.
PRIORITY = Setting()
#: Communication and compute have the same priority, and compute is not confined.
OFF = Setting(first=False)


@dataclass(frozen=True)
class SoloSample:
    """Hold the time of a task without communication beside it.

    Parameters
    ----------
    work
        The amount of work, in a unit of its kernel's own, such as bytes of inputs.
    """

    kernel: str
    work: float
    seconds: float


@dataclass(frozen=True)
class OverlapSample:
    """Hold the tasks of a kernel in a step: their work, the seconds they took, and their setting."""

    work: float
    seconds: float
    setting: Setting = PRIORITY


@dataclass(frozen=True)
class StepSample:
    """Hold the communication from the begin of a run to that of the next, and the tasks beside it.

    Parameters
    ----------
    idle
        Seconds in flight in which no task ran.
    moved
        Bytes of communication.
    ran
        By kernel, the tasks that communication was beside.
    steady
        Whether each kernel had one setting throughout, and the device to itself. If not, the step counts as
        work done, and not as a sample.
    """

    idle: float
    moved: float
    ran: Mapping[str, OverlapSample] = field(default_factory=dict)
    steady: bool = True

    @property
    def seconds(self) -> float:
        """Return the seconds of tasks plus those in which only communication ran."""
        return self.idle + sum(ran.seconds for ran in self.ran.values())
