"""Preload the interposer into workers through their nannies, and set residency caps."""

from __future__ import annotations

import os
from typing import Any

from distributed import Nanny

from dask_gpurt import config
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.overlap import CapError, Caps, Interposer, NotLoadedError, Residency
from dask_gpurt.overlap.interposer import library, with_preload

PRELOAD = "LD_PRELOAD"


def preload_into(nanny: Nanny) -> None:
    """Have a nanny start its worker with the interposer, if the settings require it.

    A no-op if the interposer was not built; the worker then reports why.
    """
    if not config.load().overlap.intercepts:
        return
    try:
        path = library()
    except NotLoadedError:
        return
    # A value in Dask's configuration takes precedence over this process's environment.
    given = nanny.pre_spawn_env.get(PRELOAD, os.environ.get(PRELOAD, ""))
    nanny.pre_spawn_env[PRELOAD] = with_preload(given, path)
    if PRELOAD in nanny.env:  # a worker also applies these variables, after it has started
        nanny.env[PRELOAD] = with_preload(nanny.env[PRELOAD], path)


class WorkerResidency:
    """Set the residency caps of a worker.

    Parameters
    ----------
    setting
        ``"off"``; ``"auto"``: caps are set through ``actuator`` only; or a cap for all kernels.
    metrics
        Counts the fallback if caps are not possible.
    """

    def __init__(self, setting: int | str, metrics: Metrics):
        self.setting = setting
        self.actuator: Residency | None = None
        self.reason: str | None = None
        if setting == "off":
            return
        try:
            actuator = Residency(Interposer())
            if isinstance(setting, int):
                actuator.apply(Caps(setting))
            self.actuator = actuator
        except (NotLoadedError, CapError) as error:
            self.reason = str(error)
            metrics.fallback(Fallback.OVERLAP_RESIDENCY, self.reason)

    def close(self) -> None:
        """Remove all caps."""
        if self.actuator is not None:
            self.actuator.clear()

    def counters(self) -> dict[str, int]:
        """Return the counts of kernel launches under caps, as ``residency.*``."""
        counts = self.actuator.counters() if self.actuator is not None else {}
        return {f"residency.{name}": count for name, count in counts.items() if count}

    def describe(self) -> dict[str, Any]:
        """Return the setting, whether caps are possible, and the reason if they are not."""
        return {"setting": self.setting, "ready": self.actuator is not None, "reason": self.reason}
