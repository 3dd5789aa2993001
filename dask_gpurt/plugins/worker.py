"""The runtime on a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from distributed import WorkerPlugin
from tornado.ioloop import PeriodicCallback

from dask_gpurt import config
from dask_gpurt._version import __version__
from dask_gpurt.exchange import Exchange
from dask_gpurt.exchange.exchange import IDLE
from dask_gpurt.observe import Metrics, prometheus

NAME = "gpurt"


class GpurtWorkerPlugin(WorkerPlugin):
    """Gives a worker its end of the exchange.

    Parameters
    ----------
    settings
        The section ``gpurt`` of the process that switched on. What the worker has set itself
        comes first.
    """

    name = NAME
    idempotent = True

    def __init__(self, settings: Mapping[str, Any]):
        self.given = settings

    async def setup(self, worker: Any) -> None:
        settings = config.load_over(self.given)
        self.worker = worker
        self.metrics = Metrics()
        self.exchange = await asyncio.to_thread(Exchange, worker, settings, self.metrics)
        worker.handlers["gpurt_report"] = self.report
        worker.stream_handlers["gpurt-peer-left"] = self.exchange.forget_peer
        self._trim = PeriodicCallback(self._give_back_idle_memory, IDLE * 1000)
        self._trim.start()
        prometheus.register(worker.address, self.metrics)
        try:
            await self.exchange.warm_up()
        except Exception:
            await self.teardown(worker)
            raise

    async def teardown(self, worker: Any) -> None:
        self._trim.stop()
        prometheus.unregister(worker.address)
        worker.handlers.pop("gpurt_report", None)
        worker.stream_handlers.pop("gpurt-peer-left", None)
        await asyncio.to_thread(self.exchange.close)

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        if finish == "memory" and (shuffles := self.worker.plugins.get("shuffle")):
            for run in shuffles.shuffle_runs._active_runs.values():
                if hasattr(run, "task_done"):
                    run.task_done(key)

    async def report(self, connect: bool = False) -> dict[str, Any]:
        """Handler: what this worker has, did and fell back from."""
        if connect:
            await self.exchange.connect_all()
        return {
            "version": __version__,
            "devices": {kind: device.describe() for kind, device in self.exchange.devices.items()},
            "paths": self.exchange.describe_paths(),
            "pools": self.exchange.describe_pools(),
            "problems": config.problems(),
            **self.metrics.snapshot(),
        }

    async def _give_back_idle_memory(self) -> None:
        await self.exchange.offload(self.exchange.trim)
