"""Confine the compute of this process, and set the priority of its communication, as a setting says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from dask_gpurt.device import Device, SmContexts, SmsError
from dask_gpurt.overlap.occupancy import Caps, Residency
from dask_gpurt.overlap.samples import OFF, PRIORITY, Setting

#: Residency caps worth trying, in blocks on an SM: those that were measured, and a mild one.
CAPS_BLOCKS = (8, 6, 4)
#: Blocks of a kernel that fit on an SM in most cases: 2048 threads in blocks of 128.
USUAL_BLOCKS = 16
#: The share of its speed that a step keeps at worst without priority: compute and communication then run one
#: after the other, which takes at most twice as long as both together.
SERIAL_SPEED_SHARE = 0.5

T = TypeVar("T")


class UnfitSetting(ValueError):
    """Refuse a setting that this process can not be confined to; the message says why."""


class Actuator(Protocol):
    """Set how compute and communication of this process share the device."""

    def settings(self) -> Mapping[Setting, float]:
        """Return the settings worth trying, each with the share of its speed that a step keeps at worst."""
        ...

    def apply(self, setting: Setting) -> None:
        """Apply a setting to everything that is launched from now on.

        Raises
        ------
        ValueError
            When that is not possible; the message says why.
        """
        ...

    def clear(self) -> None:
        """Confine nothing, and let communication come first."""
        ...

    def counters(self) -> Mapping[str, int]:
        """Count what was done to launches."""
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
        # The throughput of a kernel is concave in its residency, so a cap costs no more than its share.
        return {Setting(residency=cap): cap / USUAL_BLOCKS for cap in CAPS_BLOCKS}

    def apply(self, setting: Setting) -> None:
        if setting.sms is not None:
            raise UnfitSetting(f"caps confine nothing to SMs, so {setting} is not possible")
        self._residency.apply(Caps(setting.residency))

    def clear(self) -> None:
        self._residency.clear()

    def counters(self) -> Mapping[str, int]:
        return self._residency.counters()


class SmShare:
    """Confine compute to some of the SMs, on the threads that it is launched from.

    Parameters
    ----------
    contexts
        The contexts of the device.
    failed
        Called with the reason when a thread could not be confined and went on as it was.
    offered
        Numbers of SMs that may be tried. Empty by default: code that makes the usual context current in a
        confined task, such as UDFs that numba compiles, fails there or is not ordered.
    """

    def __init__(self, contexts: SmContexts, failed: Callable[[str], None], offered: Sequence[int] = ()):
        self._contexts = contexts
        self._failed = failed
        self._offered = offered
        self._sms: int | None = None
        self._lock = threading.Lock()
        self._entered = 0

    def settings(self) -> Mapping[Setting, float]:
        # At worst a kernel is one wave of blocks, of which a few have to wait for another one.
        return {Setting(sms=sms): sms / self._contexts.total / 2 for sms in self._offered}

    def apply(self, setting: Setting) -> None:
        if setting.residency is not None:
            raise UnfitSetting(f"contexts cap no residency, so {setting} is not possible")
        if setting.sms is not None:
            self._check(setting.sms)
        self._sms = setting.sms

    def _check(self, sms: int) -> None:
        total, unit = self._contexts.total, self._contexts.unit
        if not 0 < sms < total or (total - sms) % unit:
            nearest = max(total % unit or unit, total - max(1, round((total - sms) / unit)) * unit)
            raise UnfitSetting(
                f"compute can not be confined to {sms} of {total} SMs: they are taken from it {unit} at a "
                f"time; the nearest number is {nearest}"
            )

    def clear(self) -> None:
        self._sms = None

    def counters(self) -> Mapping[str, int]:
        return {"confined to SMs": self._entered}

    def run(self, function: Callable[..., T], *args: Any, **arguments: Any) -> T:
        """Call a function on this thread, confined to the setting that is applied when it begins."""
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
    """Set whether communication has the higher priority on its streams.

    Parameters
    ----------
    device
        The device of the streams; it has to be able to change the priority of one.
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
    """Combine several actuators, each for its part of a setting.

    Parameters
    ----------
    caps, share, priority
        The actuators of residency, of SMs and of priority; None where one is not possible.
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
                raise UnfitSetting(f"{part} is not possible here: nothing sets it")

    def clear(self) -> None:
        for actuator in self._all():
            actuator.clear()

    def counters(self) -> Mapping[str, int]:
        return {name: count for one in self._all() for name, count in one.counters().items()}

    def _all(self) -> list[Actuator]:
        return [actuator for actuator in self._parts.values() if actuator is not None]
