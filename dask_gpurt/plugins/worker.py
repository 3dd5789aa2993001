"""The runtime on a worker."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping
from functools import partial
from typing import Any

from distributed import WorkerPlugin
from distributed.core import Status
from distributed.system import MEMORY_LIMIT
from tornado.ioloop import PeriodicCallback

import dask_gpurt.shuffle.run  # noqa: F401 - so that the first shuffle does not import it on the event loop
from dask_gpurt import config
from dask_gpurt._version import __version__
from dask_gpurt.device import Device
from dask_gpurt.device.failing import Failures
from dask_gpurt.device.handovers import Handovers
from dask_gpurt.device.protocol import passed
from dask_gpurt.exchange import Exchange
from dask_gpurt.exchange.exchange import IDLE
from dask_gpurt.exchange.pools import Pools
from dask_gpurt.observe import Metrics, prometheus
from dask_gpurt.plugins.finding import RunFinder
from dask_gpurt.plugins.gathering import Gathering
from dask_gpurt.plugins.memory_reports import amounts
from dask_gpurt.plugins.overlapping import WorkerOverlap
from dask_gpurt.plugins.residency import WorkerResidency
from dask_gpurt.plugins.tiers import WorkerTiers
from dask_gpurt.plugins.topology_reports import TopologyReporter
from dask_gpurt.plugins.waiting import waiting
from dask_gpurt.plugins.worker_data import WorkerData
from dask_gpurt.table.protocol import import_backends, warm_up

NAME = "gpurt"
#: The name by which Dask knows the threads of the exchange.
COMM = "gpurt-comm"
#: What is told where memory changes hands while something that was begun still has it.
TOO_EARLY = "memory changes hands too early"


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
        self.data: WorkerData | None = None
        self._unlisten = passed
        await asyncio.to_thread(self._build, worker, settings)
        self.tiers.start()
        worker.handlers["gpurt_report"] = self.report
        worker.executors[COMM] = self.exchange.executor
        self._housekeeping = PeriodicCallback(self.exchange.keep_house, IDLE * 1000)
        self._housekeeping.start()
        prometheus.register(worker.address, self.metrics, self._amounts)
        try:
            import_backends(self.exchange.pools.devices)
            await self.exchange.offload(self.exchange.pools.make_all)
            await self.topology.start()
            await self.exchange.offload(self.overlap.prepare)
            self.overlap.install()
            self.finder.install()
            self._listen(worker)
            self.gathering.install()
            if settings.memory.tiers:
                await self.exchange.offload(self.tiers.guard)
                self.data = WorkerData(worker, self.tiers, settings.memory, self.metrics)
                self.data.install()
            worker._ongoing_background_tasks.call_soon(
                self.exchange.offload, _warm_up, self.exchange.pools.devices
            )
        except Exception:
            await self.teardown(worker)
            raise

    def _listen(self, worker: Any) -> None:
        """Hear from the scheduler which workers leave, as Dask's worker does."""
        remove_worker = worker.stream_handlers["remove-worker"]

        def peer_left(worker: str, **told: Any) -> Any:
            self.exchange.peer_left(worker)
            return remove_worker(worker=worker, **told)

        worker.stream_handlers["remove-worker"] = peer_left
        self._unlisten = partial(worker.stream_handlers.__setitem__, "remove-worker", remove_worker)

    def _build(self, worker: Any, settings: config.Settings) -> None:
        memory_limit = worker.memory_manager.memory_limit or MEMORY_LIMIT
        handovers = self._handovers() if settings.overlap.check else None
        pools = Pools(settings.exchange.pool, memory_limit, self.metrics, handovers)
        for device in pools.devices.values():
            Failures(settings.memory.failures).inject(device)
            device.prioritised &= settings.overlap.mode != "off"
        self.tiers = WorkerTiers(worker, settings, pools, self.metrics)
        if handovers is not None:
            handovers.watch_giving_back(self.tiers.pinned, list)
        self.exchange = Exchange(worker, pools, self.tiers.ladder, settings, self.metrics, handovers)
        on_gpu = not pools.device(pools.main).on_host
        self.topology = TopologyReporter(worker, self.exchange.traffic, on_gpu, self.metrics)
        self.gathering = Gathering(worker, self.exchange.links, self.metrics)
        self.residency = WorkerResidency(settings.overlap.residency, self.metrics)
        self.overlap = WorkerOverlap(worker, self.exchange, settings.overlap, self.residency, self.metrics)
        self.finder = RunFinder(worker, self.metrics)

    def _handovers(self) -> Handovers:
        """What looks at memory that changes hands, and tells of what is too early."""
        return Handovers(
            partial(self.metrics.fallback, TOO_EARLY), partial(self.metrics.add, "overlap.handovers")
        )

    async def teardown(self, worker: Any) -> None:
        self._housekeeping.stop()
        self.topology.close()
        prometheus.unregister(worker.address)
        # The data of a worker that closes go with it: to read them all once more would be in vain.
        if self.data is not None and worker.status in (Status.running, Status.paused):
            await self.data.uninstall()
        worker.handlers.pop("gpurt_report", None)
        worker.executors.pop(COMM, None)
        self.gathering.uninstall()
        self.finder.uninstall()
        self._unlisten()
        self.overlap.uninstall()
        await self.overlap.save()
        self.residency.close()
        await asyncio.to_thread(self.exchange.close)
        gc.unfreeze()  # not before: what warms up on a thread of the exchange has ended now
        await self.tiers.close()

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        if finish == "memory" and (shuffles := self.worker.plugins.get("shuffle")):
            for run in shuffles.shuffle_runs._active_runs.values():
                if hasattr(run, "task_done"):
                    run.task_done(key)

    def _amounts(self) -> list[tuple[str, str, int]]:
        return amounts(self.tiers.ledger)

    def waiting(self) -> dict[str, Any]:
        """Return what waits here, for whoever looks into a cluster that stands still."""
        return waiting(self)

    async def report(self, connect: bool = False) -> dict[str, Any]:
        """Handler: what this worker has, did and fell back from."""
        if connect:
            await self.exchange.peers.connect_all()
        known = self.metrics.snapshot()
        return {
            "version": __version__,
            "devices": await self.exchange.offload(self.exchange.pools.describe_devices),
            "paths": self.exchange.peers.describe(self.exchange.pools.main),
            "host_paths": self.exchange.peers.describe("host"),
            "pools": self.exchange.pools.describe(),
            "overlap": self.overlap.report(),
            "residency": self.residency.describe(),
            "problems": config.problems(),
            **known,
            "counters": known["counters"] | self.residency.counters(),
        }


def _warm_up(devices: Mapping[str, Device]) -> None:
    """Load what the first shuffle would wait for, and have it looked through for garbage no more.

    A full collection goes through all that cudf, cupy and Dask consist of and keeps every thread
    waiting meanwhile, the event loop too: 0.16 to 0.22 s, as often as a shuffle makes enough objects.
    """
    warm_up(devices)
    gc.collect()  # what is garbage already would stay
    gc.freeze()
