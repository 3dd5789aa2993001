"""Run the runtime on a worker."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from typing import Any

from dask.typing import Key
from distributed import WorkerPlugin
from distributed.comm.core import CommClosedError
from distributed.core import Status
from distributed.system import MEMORY_LIMIT
from tornado.ioloop import PeriodicCallback

from dask_gpurt import config, dask_hooks, testing
from dask_gpurt._version import __version__
from dask_gpurt.dask_hooks.shuffle import active_runs
from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.dask_hooks.worker import call_soon, is_closing, put_results
from dask_gpurt.device import Device
from dask_gpurt.device.discover import kinds
from dask_gpurt.exchange import Exchange, ExchangeClosed
from dask_gpurt.exchange.exchange import TRIM_INTERVAL_S
from dask_gpurt.exchange.pools import Pools
from dask_gpurt.frames.registry import import_backends, warm_up, warm_up_operators
from dask_gpurt.observe import Fallback, Metrics, prometheus
from dask_gpurt.observe.metrics import Server
from dask_gpurt.plugins.colocation import ALONE
from dask_gpurt.plugins.memory_reports import amounts
from dask_gpurt.plugins.messages import PromptStreams
from dask_gpurt.plugins.overlapping import WorkerOverlap
from dask_gpurt.plugins.progress_reports import ProgressReporter
from dask_gpurt.plugins.reading import WorkerReads, set_reader_threads
from dask_gpurt.plugins.replica_selector import ReplicaSelector
from dask_gpurt.plugins.reports import REPORT, HeartbeatCounters
from dask_gpurt.plugins.residency import WorkerResidency
from dask_gpurt.plugins.run_lookup import RunLookup
from dask_gpurt.plugins.small_results import RESULTS
from dask_gpurt.plugins.switching import JOIN, LEFT, NAME, PAUSE_S, READY, REFUSED, spare_tracebacks
from dask_gpurt.plugins.tiers import WorkerTiers
from dask_gpurt.plugins.topology_reports import HOST, TopologyReporter
from dask_gpurt.plugins.tracing import WORKER_HANDLERS as TRACING
from dask_gpurt.plugins.tracing import WorkerTracing
from dask_gpurt.plugins.waiting import waiting
from dask_gpurt.plugins.worker_data import WorkerData
from dask_gpurt.shuffle.owners import Owners
from dask_gpurt.shuffle.run import RENEW, ShuffleRun

logger = logging.getLogger(__name__)

#: The name by which Dask knows the threads of the exchange.
COMM = "gpurt-comm"
#: The states of a task that a thread is at, and those of one that it has ended.
EXECUTED, ENDED = ("executing", "long-running", "cancelled", "resumed"), ("memory", "error")


class GpurtWorkerPlugin(WorkerPlugin):
    """Give a worker its end of the exchange.

    What is switched on is noted with the way to take it back, which happens in the reverse order and for
    each part whatever has become of the others. Dask may remove the plugin, or hand it over a second time,
    while the first is still being set up: one waits for the other.

    Parameters
    ----------
    settings
        The section ``gpurt`` of the process that switched on. What the worker has set itself
        comes first.
    token
        Of the scheduler's plugin that this one belongs to.

    Attributes
    ----------
    is_on
        Whether all of the runtime is there.
    """

    name = NAME
    idempotent = True

    def __init__(self, settings: Mapping[str, Any], token: str):
        self.given = settings
        self.token = token
        self.is_on = False

    async def setup(self, worker: WorkerServer) -> None:
        self.worker = worker
        self._undo = AsyncExitStack()
        self._switching = asyncio.Lock()
        self._id = uuid.uuid4().hex
        spare_tracebacks()
        async with self._switching:
            try:
                dask_hooks.require()
                devices = await asyncio.to_thread(kinds)
                if not await self._ask_to_join(devices):
                    logger.info("the runtime was switched off before %s joined", worker.address)
                    self._leave()
                    return
                self._undo.callback(self._say, LEFT, plugin=self._id)
                await self._switch_on(worker, config.load_over(self.given))
                self._say(READY)
            except BaseException as error:
                self._leave()
                if isinstance(error, config.ConfigError):
                    self._say(REFUSED, reason=str(error))
                try:
                    await self._undo.aclose()
                except Exception:  # what kept it from going on says more
                    logger.exception("the runtime could not be wholly taken back on %s", worker.address)
                raise

    async def _ask_to_join(self, devices: Collection[str]) -> bool:
        """Ask the scheduler whether to switch on, until it answers: it waits for those it has told yes."""
        while True:
            try:
                joins: bool = await getattr(self.worker.scheduler, JOIN)(
                    worker=self.worker.address, token=self.token, devices=devices, plugin=self._id
                )
                return joins
            except OSError as error:
                if is_closing(self.worker):
                    raise
                logger.warning("%s can not ask the scheduler and tries again: %s", self.worker.address, error)
            await asyncio.sleep(PAUSE_S)

    def _say(self, what: str, **more: str) -> None:
        with contextlib.suppress(CommClosedError):  # then the scheduler forgets this worker
            self.worker.batched_stream.send({"op": what, "token": self.token, **more})

    def _leave(self) -> None:
        """Be no plugin of the worker any more: shuffles look there for the runtime."""
        if self.worker.plugins.get(NAME) is self:
            del self.worker.plugins[NAME]

    async def _switch_on(self, worker: WorkerServer, settings: config.Settings) -> None:
        undo = self._undo
        self.metrics = Metrics()
        if reason := os.environ.get(ALONE):
            self.metrics.fallback(Fallback.DEVICE_NOT_SHARED, reason)
        self.data: WorkerData | None = None
        self._has_frozen = False
        await asyncio.to_thread(self._build, worker, settings)
        self.tiers.start()
        patches = dask_hooks.PatchSet()
        undo.callback(self._ignore_calls)
        undo.callback(patches.restore)
        patches.add_item(worker.handlers, REPORT, self.report)
        patches.add_item(worker.executors, COMM, self.exchange.executor)
        # Hear from the scheduler which workers leave, as Dask's worker does.
        patches.put_item(worker.stream_handlers, "remove-worker", self._watch_removed_workers)
        patches.add_item(worker.stream_handlers, RENEW, self.renew)
        patches.add_item(worker.stream_handlers, RESULTS, self.take_results)
        self.streams = PromptStreams()
        undo.callback(self.streams.restore)
        self.streams.add(worker.batched_stream)
        housekeeping = PeriodicCallback(self.exchange.keep_house, TRIM_INTERVAL_S * 1000)
        housekeeping.start()
        undo.callback(housekeeping.stop)
        self.tracing.install()
        undo.callback(self.tracing.uninstall)
        undo.callback(prometheus.register(worker, Server.WORKER, self.metrics, self._readings))
        undo.callback(HeartbeatCounters(worker, self._counted, self.token).close)
        import_backends(self.exchange.pools.devices)
        await self.exchange.offload(self.exchange.pools.make_all)
        undo.callback(self.topology.close)
        await self.topology.start()
        await self.exchange.offload(self.overlap.prepare)
        undo.callback(self.progress.close)
        self.progress.start()
        undo.push_async_callback(self.overlap.save)
        # The last one comes first: see Layer. What wraps the same as one of these has to come in this order.
        for part in (self.overlap, self.run_lookup, self.replica_selector):
            undo.callback(part.uninstall)
            part.install()
        if settings.memory.tiers:
            await self.exchange.offload(self.tiers.guard)
            self.data = WorkerData(worker, self.tiers, settings.memory, self.metrics, self.reads.is_aside)
            self.data.install()
            undo.push_async_callback(self._give_data_back)
        undo.callback(self.reads.uninstall)
        self.reads.install()
        testing.instrument(self, settings)
        self.tiers.report_now()  # the next question may be for it
        self.is_on = True
        call_soon(worker, self._warm_up)

    async def _warm_up(self) -> None:
        """Load and compile kernels that first programs would wait for, until the runtime is switched off."""
        # Side by side: on a machine that has none of them on disk, compiling takes seconds.
        with contextlib.suppress(ExchangeClosed):
            devices = self.exchange.pools.devices
            loads = (self._load_kernels, warm_up_operators)
            await asyncio.gather(*(self.exchange.offload(load, devices) for load in loads))

    def _load_kernels(self, devices: Mapping[str, Device]) -> None:
        """Load what the first shuffle would wait for, and have it looked through for garbage no more.

        A full collection goes through all that cudf, cupy and Dask consist of and keeps every thread
        waiting meanwhile, the event loop too: 0.16 to 0.22 s, as often as a shuffle makes enough objects.
        What a program has frozen itself, or another worker in this process, is left as it is.
        """
        warm_up(devices)
        if not gc.get_freeze_count():
            gc.collect()  # what is garbage already would stay
            gc.freeze()
            self._has_frozen = True

    def _ignore_calls(self) -> None:
        """Have a worker that closes answer nothing to a scheduler that does not know that yet.

        Dask would log that it knows no such handler, or end the connection.
        """
        if is_closing(self.worker):
            for name in (REPORT, HOST, *TRACING):
                self.worker.handlers[name] = _ignore
            for name in (RENEW, RESULTS):
                self.worker.stream_handlers[name] = _ignore

    def _watch_removed_workers(self, remove_worker: Callable[..., Any]) -> Callable[..., Any]:
        def on_worker_removed(worker: str, **kwargs: Any) -> Any:
            self.exchange.on_worker_removed(worker)
            return remove_worker(worker=worker, **kwargs)

        return on_worker_removed

    def take_results(self, results: Mapping[Key, object]) -> None:
        """Handle results that tasks need which the scheduler sends next."""
        put_results(self.worker, results)

    def renew(self, id: Any, run_id: int, owners: Owners) -> None:
        """Handle new owners of the outputs of a run."""
        if (shuffles := self.worker.plugins.get("shuffle")) is None:
            return
        run = active_runs(shuffles).get(id)
        if isinstance(run, ShuffleRun) and run.run_id == run_id:
            run.renew(owners)

    def _build(self, worker: WorkerServer, settings: config.Settings) -> None:
        memory_limit = worker.memory_manager.memory_limit or MEMORY_LIMIT
        pools = Pools(settings.exchange.pool, memory_limit, self.metrics)
        for device in pools.devices.values():
            device.prioritised &= settings.overlap.mode != "off"
        self.tiers = WorkerTiers(worker, settings, pools, self.metrics)
        self._undo.push_async_callback(self.tiers.close)
        self.exchange = Exchange(worker, pools, self.tiers.tiered_buffer, settings, self.metrics)
        self._undo.push_async_callback(self._close_exchange)
        on_gpu = not pools.device(pools.main).on_host
        if on_gpu:
            self._undo.callback(set_reader_threads(settings.reads.threads))
        self.reads = WorkerReads(worker, settings.reads, self.metrics)
        self.topology = TopologyReporter(worker, self.exchange.traffic, on_gpu, self.metrics)
        self.replica_selector = ReplicaSelector(worker, self.exchange.links, self.metrics)
        self.residency = WorkerResidency(settings.overlap.residency, self.metrics)
        self._undo.callback(self.residency.close)
        self.overlap = WorkerOverlap(worker, self.exchange, settings.overlap, self.residency, self.metrics)
        self.run_lookup = RunLookup(worker, self.metrics)
        self.tracing = WorkerTracing(worker, self.metrics, self.exchange.offload)
        runs, summary = self.exchange.recent_runs, self.overlap.summary
        self.progress = ProgressReporter(worker, runs, summary, self.metrics)

    async def teardown(self, worker: WorkerServer) -> None:
        async with self._switching:
            self.is_on = False
            await self._undo.aclose()  # it is empty afterwards

    async def _give_data_back(self) -> None:
        # The data of a worker that closes go with it: to read them all once more would be in vain.
        if self.data is not None and self.worker.status in (Status.running, Status.paused):
            await self.data.uninstall()

    async def _close_exchange(self) -> None:
        await asyncio.to_thread(self.exchange.close)
        if self._has_frozen:
            gc.unfreeze()  # not before: what warms up on a thread of the exchange has ended now

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        if self.is_on and finish == "executing":
            self.streams.gather(self.worker.batched_stream, bool(self.worker.state.ready))
        if self.is_on and self.metrics.recording is not None and finish in ENDED:
            if start == "flight":
                self.tracing.fetched()
            elif start in EXECUTED:
                self.tracing.task_ended(key)
        if finish == "memory" and (shuffles := self.worker.plugins.get("shuffle")):
            for run in active_runs(shuffles).values():
                if hasattr(run, "task_done"):
                    run.task_done(key)

    def _readings(self) -> list[prometheus.Reading]:
        return [
            *(
                ("memory.held.{tier}.{kind}", (tier, kind), nbytes)
                for tier, kind, nbytes in amounts(self.tiers.ledger)
            ),
            *(
                ("residency.{outcome}", (name.removeprefix("residency."),), launches)
                for name, launches in self.residency.counters().items()
            ),
        ]

    def _counted(self) -> dict[str, Any]:
        known = self.metrics.snapshot()
        return {**known, "counters": known["counters"] | self.residency.counters()}

    def waiting(self) -> dict[str, Any]:
        """Return what waits here, for a look into a cluster that stands still."""
        return waiting(self)

    async def report(self, connect: bool = False) -> dict[str, Any]:
        """Handle a question for what this worker has, did and fell back from."""
        if connect:
            await self.exchange.peers.connect_all()
        return {
            "version": __version__,
            "devices": await self.exchange.offload(self.exchange.pools.describe_devices),
            "paths": self.exchange.peers.describe(self.exchange.pools.main),
            "host_paths": self.exchange.peers.describe("host"),
            "pools": self.exchange.pools.describe(),
            "overlap": self.overlap.report(),
            "residency": self.residency.describe(),
            "reads": self.reads.report(),
            "problems": config.problems(),
            **self._counted(),
        }


async def _ignore(**_: Any) -> None:
    """Handle a call by no answer, as where the runtime is off."""
