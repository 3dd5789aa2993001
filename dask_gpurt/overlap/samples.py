"""Define settings, and samples of compute with and without communication.

A kernel is identified by its name, or by the prefix of the tasks that launch it if kernels cannot be
distinguished.
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
        The most blocks of a kernel on an SM; None for no cap.
    sms
        The number of SMs that compute may use; None for all.
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
        """Parse the result of ``str``; raises ValueError for any other text."""
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
    """Hold the time of a task that did not overlap with communication.

    Parameters
    ----------
    work
        The amount of work, in a unit specific to its kernel, such as bytes of inputs.
    """

    kernel: str
    work: float
    seconds: float


@dataclass(frozen=True)
class OverlapSample:
    """Hold the total work and time of a kernel's tasks in a step, and their setting."""

    work: float
    seconds: float
    setting: Setting = PRIORITY


@dataclass(frozen=True)
class StepSample:
    """Hold the communication from the start of one run to the start of the next, and the overlapping tasks.

    Parameters
    ----------
    idle
        Time with communication in flight and no running task, in seconds.
    moved
        Bytes of communication.
    ran
        The overlapping tasks, by kernel.
    steady
        Whether each kernel had a single setting and the device to itself throughout. If not, the step counts
        as work but not as a sample.
    """

    idle: float
    moved: float
    ran: Mapping[str, OverlapSample] = field(default_factory=dict)
    steady: bool = True

    @property
    def seconds(self) -> float:
        """Return the time of tasks plus the time with communication only, in seconds."""
        return self.idle + sum(ran.seconds for ran in self.ran.values())
