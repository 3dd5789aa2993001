"""Fake a process whose launches can be capped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from dask_gpurt.overlap.interposer import DeviceLimits, LaunchedKernel


class Launches:
    """Fake the launches of a process with an H200; what is launched is listed while it is switched on."""

    #: All that were made since the list was cleared.
    made: ClassVar[list[Launches]] = []

    def __init__(self) -> None:
        self.made.append(self)
        self.on, self.cap = False, 0
        self.caps: dict[str | int, int] = {}
        self._launched: dict[int, LaunchedKernel] = {}

    def launch(self, name: str) -> None:
        """Launch a kernel."""
        if self.on:
            id = hash(name)
            before = self._launched[id].launches if id in self._launched else 0
            self._launched[id] = LaunchedKernel(name, 32, 0, before + 1, 0, False, id)

    def switch(self, on: bool) -> None:
        self.on = on

    def write(self, default: int, kernels: Mapping[str | int, int]) -> None:
        self.cap, self.caps = default, dict(kernels)

    def limits(self, device: int) -> DeviceLimits | None:
        return DeviceLimits(132, 32, 2048, 65536, 233472, 1024, 232448)

    def counters(self) -> dict[str, int]:
        return {"seen": 0}

    def kernels(self) -> list[LaunchedKernel]:
        return list(self._launched.values())
