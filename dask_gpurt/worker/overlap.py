"""Cap the residency of kernels on a worker while a shuffle runs, through an interposer that its nanny loads.

The interposer judges each launch by itself, so tasks are not wrapped: the worker only switches its caps on as
the first run or transfer begins, and off as the last one ends.

Decisions and their figures: ``docs/decisions/overlap.md``.
"""

from __future__ import annotations

import os
from typing import Any

from distributed import Nanny

from dask_gpurt import config
from dask_gpurt.exchange import Exchange
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.overlap import CapError, Caps, Interposer, NotLoadedError, Residency
from dask_gpurt.overlap.interposer import library, with_preload
from dask_gpurt.overlap.table import TableError, path_of, read

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


class WorkerOverlap:
    """Cap kernels while runs are in flight, in the mode ``calibrated`` or with a number as mode.

    ``exchange``: the exchange of the runs, which tells when some are in flight.
    """

    def __init__(self, exchange: Exchange, settings: config.OverlapSettings, metrics: Metrics):
        self._exchange = exchange
        self._settings = settings
        self._metrics = metrics
        #: Sets caps in this process; None if it cannot, or the mode sets none.
        self.residency: Residency | None = None
        self._caps = Caps()
        self._reason: str | None = None
        self._in_flight = self._always = False

    def prepare(self) -> None:
        """Determine the caps, from the table of the device or the settings. Blocks."""
        if not self._settings.intercepts:
            return
        try:
            residency = Residency(Interposer())
            caps = self._wanted()
            residency.apply(caps)  # an impossible cap must fail here
            residency.clear()
        except (NotLoadedError, CapError, TableError) as error:
            self._reason = str(error)
            self._metrics.fallback(Fallback.OVERLAP_UNCAPPED, f"{error}. The shuffle keeps its priority")
            return
        self.residency, self._caps = residency, caps

    def _wanted(self) -> Caps:
        if isinstance(self._settings.mode, int):
            return Caps(self._settings.mode)
        return read(path_of(self.model())).caps()

    def model(self) -> str:
        """Return the model of the worker's device."""
        device = self._exchange.pools.device(self._exchange.pools.main).describe()
        return str(device.get("name", device["kind"]))

    def install(self) -> None:
        """Start capping kernels while runs are in flight. On the event loop."""
        if self.residency is not None:
            self._exchange.in_flight = self.in_flight

    def uninstall(self) -> None:
        """Stop capping kernels."""
        if self.residency is not None:
            self._exchange.in_flight = lambda runs, pulls: None
            self.residency.clear()

    def in_flight(self, runs: int, pulls: int) -> None:
        """Switch caps by the number of runs that publish shards, and of shards that are being pulled."""
        before, self._in_flight = self._in_flight, bool(runs or pulls)
        if self._in_flight != before:
            self._settle()

    def use(self, caps: Caps, *, always: bool = False) -> None:
        """Set other caps from now on, for a calibration. On the event loop.

        ``always``: whether they also apply while no run is in flight.
        """
        assert self.residency is not None
        self.residency.apply(caps)
        self._caps, self._always = caps, always
        self._settle()

    def _settle(self) -> None:
        assert self.residency is not None
        if self._in_flight or self._always:
            self.residency.resume()
            self._metrics.add("overlap.confined")
        else:
            self.residency.clear()

    def counters(self) -> dict[str, int]:
        """Return the counts of kernel launches under caps, as ``residency.*``."""
        counts = self.residency.counters() if self.residency is not None else {}
        return {f"residency.{name}": count for name, count in counts.items() if count}

    def report(self) -> dict[str, Any]:
        """Return the mode in effect, ``priority`` without caps, the caps, and why there are none."""
        on_host = self._exchange.pools.device(self._exchange.pools.main).on_host
        mode = "off" if on_host and self.residency is None else str(self._settings.mode)
        return {
            "mode": mode if self._reason is None else "priority",
            "caps": {"default": self._caps.default, "kernels": len(self._caps.kernels)},
            "reason": self._reason,
        }
