"""Apply settings: confine the compute of this process, and set the priority of its communication."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from dask_gpurt.device import Device, SmContexts, SmsError
from dask_gpurt.overlap.occupancy import Caps, Residency
from dask_gpurt.overlap.samples import OFF, PRIORITY, Setting

#: Residency caps worth trying, in blocks per SM: the measured ones, and a mild one.
CAPS_BLOCKS = (8, 6, 4)
#: The usual number of blocks of a kernel on an SM: 2048 threads in blocks of 128.
USUAL_BLOCKS = 16
#: The fraction of its speed that a step keeps at worst without priority. At worst compute and communication
#: run one after the other, which takes at most twice as long as both together.
SERIAL_SPEED_SHARE = 0.5

T = TypeVar("T")


class UnfitSetting(ValueError):
    """A setting is not possible in this process; the message says why."""


class Actuator(Protocol):
    """Set how compute and communication of this process share the device."""

    def settings(self) -> Mapping[Setting, float]:
        """Return the settings worth trying, with the fraction of its speed that a step keeps at worst."""
        ...

    def apply(self, setting: Setting) -> None:
        """Apply a setting to all later launches.

        Raises
        ------
        ValueError
            If the setting is not possible; the message says why.
        """
        ...

    def clear(self) -> None:
        """Stop confining compute, and give communication the higher priority."""
        ...

    def counters(self) -> Mapping[str, int]:
        """Return counts of launches by what was done to them."""
        ...


class ResidencyCaps:
    """Cap the residency of all kernels.

    Parameters
    ----------
    residency
        The caps of this process.
    """

    def __init__(self, residency: Residency):
        self._residency = residency

    def settings(self) -> Mapping[Setting, float]:
        # The throughput of a kernel is concave in its residency, so the speed drops at most in proportion.
        return {Setting(residency=cap): cap / USUAL_BLOCKS for cap in CAPS_BLOCKS}

    def apply(self, setting: Setting) -> None:
        if setting.sms is not None:
            raise UnfitSetting(f"residency caps cannot confine compute to SMs, so {setting} is not possible")
        self._residency.apply(Caps(setting.residency))

    def clear(self) -> None:
        self._residency.clear()

    def counters(self) -> Mapping[str, int]:
        return self._residency.counters()


class SmShare:
    """Confine compute to some of the SMs, by the context of the launching thread.

    Parameters
    ----------
    contexts
        The contexts of the device.
    failed
        Called with the reason if a task could not be confined and ran unconfined.
    offered
        The numbers of SMs that may be tried. Empty by default: code that makes the usual context current in
        a confined task, such as UDFs compiled by numba, fails or is not ordered with the task.
    """

    def __init__(self, contexts: SmContexts, failed: Callable[[str], None], offered: Sequence[int] = ()):
        self._contexts = contexts
        self._failed = failed
        self._offered = offered
        self._sms: int | None = None
        self._lock = threading.Lock()
        self._entered = 0

    def settings(self) -> Mapping[Setting, float]:
        # At worst a kernel is a single wave of blocks, and with fewer SMs a few of them need a second wave.
        return {Setting(sms=sms): sms / self._contexts.total / 2 for sms in self._offered}

    def apply(self, setting: Setting) -> None:
        if setting.residency is not None:
            raise UnfitSetting(f"contexts cannot cap residency, so {setting} is not possible")
        if setting.sms is not None:
            self._check(setting.sms)
        self._sms = setting.sms

    def _check(self, sms: int) -> None:
        total, unit = self._contexts.total, self._contexts.unit
        if not 0 < sms < total or (total - sms) % unit:
            nearest = max(total % unit or unit, total - max(1, round((total - sms) / unit)) * unit)
            raise UnfitSetting(
                f"compute cannot be confined to {sms} of {total} SMs: SMs are taken from it in units of "
                f"{unit}; the nearest possible number is {nearest}"
            )

    def clear(self) -> None:
        self._sms = None

    def counters(self) -> Mapping[str, int]:
        return {"confined to SMs": self._entered}

    def run(self, function: Callable[..., T], *args: Any, **arguments: Any) -> T:
        """Call a function on this thread, confined by the setting that is applied when it starts."""
        with ExitStack() as stack:
            if (sms := self._sms) is not None:
                try:
                    stack.enter_context(self._contexts.entered(sms))
                    with self._lock:
                        self._entered += 1
                except SmsError as error:
                    self._failed(str(error))
            return function(*args, **arguments)


class StreamPriority:
    """Set whether the streams of communication have the higher priority.

    Parameters
    ----------
    device
        The device of the streams. It must support changing the priority of a stream.
    """

    def __init__(self, device: Device):
        self._device = device
        self._yielded = 0

    def settings(self) -> Mapping[Setting, float]:
        return {OFF: SERIAL_SPEED_SHARE}

    def apply(self, setting: Setting) -> None:
        self._device.prioritised = setting.first
        self._yielded += not setting.first

    def clear(self) -> None:
        self._device.prioritised = True

    def counters(self) -> Mapping[str, int]:
        return {"without priority": self._yielded}


class CompositeActuator:
    """Combine several actuators, each for one part of a setting.

    Parameters
    ----------
    caps, share, priority
        The actuators of residency, SMs and priority; None for each that is not possible.
    """

    def __init__(
        self, caps: Actuator | None = None, share: Actuator | None = None, priority: Actuator | None = None
    ):
        self._parts = {"residency": caps, "sms": share, "first": priority}

    def settings(self) -> Mapping[Setting, float]:
        return {setting: keeps for one in self._all() for setting, keeps in one.settings().items()}

    def apply(self, setting: Setting) -> None:
        for name, actuator in self._parts.items():
            part = replace(PRIORITY, **{name: getattr(setting, name)})
            if part == PRIORITY and actuator is not None:
                actuator.clear()
            elif actuator is not None:
                actuator.apply(part)
            elif part != PRIORITY:
                raise UnfitSetting(f"{part} is not possible here: there is no actuator for it")

    def clear(self) -> None:
        for actuator in self._all():
            actuator.clear()

    def counters(self) -> Mapping[str, int]:
        return {name: count for one in self._all() for name, count in one.counters().items()}

    def _all(self) -> list[Actuator]:
        return [actuator for actuator in self._parts.values() if actuator is not None]
