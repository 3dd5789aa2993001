"""Fake the actuators that confine compute, and a process whose launches are capped."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from dask_gpurt.device import SmsError
from dask_gpurt.overlap.occupancy import DeviceLimits, LaunchedKernel
from dask_gpurt.overlap.samples import PRIORITY, Setting
from tests.helpers.curves import CAP4, CAP8


class Hand:
    """Record the settings that an actuator is asked to apply."""

    def __init__(self, refuses: Setting | None = None):
        self.confined = PRIORITY
        self.refuses = refuses
        self.calls = 0

    def settings(self) -> Mapping[Setting, float]:
        return {CAP8: 0.5, CAP4: 0.25}

    def apply(self, setting: Setting) -> None:
        self.calls += 1
        if setting == self.refuses:
            raise ValueError(f"{setting} is too much for this device")
        self.confined = setting

    def clear(self) -> None:
        self.calls += 1
        self.confined = PRIORITY

    def counters(self) -> Mapping[str, int]:
        return {"seen": self.calls}


class Launches:
    """Fake the launches of a process with an H200 that launches nothing."""

    def __init__(self) -> None:
        self.on, self.cap = False, 0

    def switch(self, on: bool) -> None:
        self.on = on

    def write(self, default: int, kernels: Mapping[str, int]) -> None:
        self.cap = default

    def limits(self, device: int) -> DeviceLimits | None:
        return DeviceLimits(132, 32, 2048, 65536, 233472, 1024, 232448)

    def counters(self) -> dict[str, int]:
        return {"seen": 0}

    def kernels(self) -> list[LaunchedKernel]:
        return []


class Contexts:
    """Fake the contexts of a device of 132 SMs, which are partitioned in units of eight."""

    total, unit = 132, 8
    entries = 0

    def __init__(self, refuse: bool = False):
        self.refuse = refuse
        self.confined = threading.local()

    @contextmanager
    def entered(self, sms: int) -> Iterator[None]:
        if self.refuse:
            raise SmsError("the driver does not want to")
        type(self).entries += 1
        self.confined.sms = sms
        try:
            yield
        finally:
            self.confined.sms = None

    def try_out(self, sms: int) -> None:
        with self.entered(sms):
            pass

    def here(self) -> int | None:
        return getattr(self.confined, "sms", None)
