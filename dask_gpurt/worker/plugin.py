"""Run the runtime on a worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from dask.typing import Key
from distributed import WorkerPlugin
from distributed.comm.core import CommClosedError
from distributed.core import Status
from distributed.system import MEMORY_LIMIT
from tornado.ioloop import PeriodicCallback

from dask_gpurt import config, dask_hooks
from dask_gpurt._version import __version__
from dask_gpurt.dask_hooks.expression_threads import sharing_expressions
from dask_gpurt.dask_hooks.parquet_files import renew_files
from dask_gpurt.dask_hooks.shuffle import ShuffleId, active_runs
from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.dask_hooks.worker import PromptStreams, call_scheduler, call_soon, is_closing, put_results
from dask_gpurt.device import Streams
from dask_gpurt.device.discover import kinds
from dask_gpurt.exchange import Exchange, ExchangeClosed
from dask_gpurt.exchange.calls import in_thread, is_exiting
from dask_gpurt.exchange.exchange import TRIM_INTERVAL_S
from dask_gpurt.exchange.pools import Pools
from dask_gpurt.frames.registry import import_backends, warm_up, warm_up_operators
from dask_gpurt.memory.budget import most_in_flight
from dask_gpurt.memory.ledger import KINDS
from dask_gpurt.memory.peer_copies import PeerCopies
from dask_gpurt.observe import Fallback, Metrics, prometheus
from dask_gpurt.observe.metrics import Server
from dask_gpurt.protocol import (
    ACCEPTED_OP,
    ASK_STATUS_OP,
    CONFIRM_RESULTS_OP,
    EVACUATE_HANDLER,
    HEARTBEAT_METRIC,
    JOIN_HANDLER,
    LEFT_OP,
    MEMORY_HANDLER,
    NAME,
    NEW_OWNERS_OP,
    READY_OP,
    REFUSED_OP,
    SEND_RESULTS_OP,
    STATUS_OP,
    TOKEN_HANDLER,
    WORKER_REPORT_HANDLER,
    JoinReply,
    is_off,
)
from dask_gpurt.shuffle.owners import Owners
from dask_gpurt.shuffle.run import ShuffleRun
from dask_gpurt.worker import Layer
from dask_gpurt.worker.data import WorkerData
from dask_gpurt.worker.kept_reads import KeptColumns, KeptRanges
from dask_gpurt.worker.overlap import WorkerOverlap
from dask_gpurt.worker.programs import WorkerPrograms
from dask_gpurt.worker.reading import WorkerReads, set_reader_threads
from dask_gpurt.worker.tasks import RunLookup
from dask_gpurt.worker.tiers import WorkerTiers
from dask_gpurt.worker.tracing import WorkerTracing

logger = logging.getLogger(__name__)

#: The name of the exchange's thread pool among Dask's executors.
COMM = "gpurt-comm"
#: By worker, the lock for switching on and off.
_switching: WeakKeyDictionary[WorkerServer, asyncio.Lock] = WeakKeyDictionary()
#: How long to wait for tasks of shuffles that use the exchange's memory, when it is closed, in seconds.
CLOSE_TIMEOUT_S = 5.0
#: Heartbeats between two questions to the scheduler which runtime is on.
HEARTBEATS_PER_CHECK = 10
#: The states of a task that may occupy a thread, and those in which it has ended.
EXECUTED, ENDED = ("executing", "long-running", "cancelled", "resumed"), ("memory", "error")
#: The pause between calls to a scheduler that does not answer, in seconds.
JOIN_PAUSE_S = 0.2
#: Called with each runtime that has been switched on in this process; tests add faults and checks.
INSTRUMENTS: list[Callable[[GpurtWorkerPlugin], None]] = []


class GpurtWorkerPlugin(WorkerPlugin):
    """Run the runtime's parts on a worker: exchange, tiers, overlap, reads and reports.

    Each part pushes a callback that switches it off. The callbacks run in reverse order, all of them even if
    one fails. Dask may remove the plugin or add it again while setup or teardown is still running; a lock of
    the worker serializes them.

    ``settings``: the section ``gpurt`` of the process that switched the runtime on. The worker's own settings
    take precedence.
    ``token``: identifies the scheduler plugin that this one belongs to.
    """

    name = NAME
    idempotent = True

    def __init__(self, settings: Mapping[str, Any], token: str):
        self.given = settings
        self.token = token
        self.version = __version__
        self.is_on = False

    async def setup(self, worker: WorkerServer) -> None:
        self.worker = worker
        self._undo = AsyncExitStack()
        self._switching = _switching.setdefault(worker, asyncio.Lock())
        self._id = uuid.uuid4().hex
        spare_tracebacks()
        async with self._switching:
            try:
                self._require_version()
                dask_hooks.require()
                devices = await asyncio.to_thread(kinds)
                reply = await self._ask_to_join(devices)
                if reply is JoinReply.STAY_OFF:
                    logger.info("the runtime was switched off before %s joined", worker.address)
                    self._leave()
                    return
                self._undo.callback(self._tell_off)
                await self._switch_on(worker, config.load_over(self.given), reply)
                self._send(READY_OP, token=self.token)
            except BaseException as error:
                self._leave()
                if isinstance(error, (config.ConfigError, dask_hooks.UnsupportedError)):
                    self._send(REFUSED_OP, token=self.token, reason=str(error))
                try:
                    await self._undo.aclose()
                except Exception:  # logged only: the error that is raised below is the cause
                    logger.exception("%s failed to switch the runtime on, and to undo it", worker.address)
                raise

    def _require_version(self) -> None:
        if self.version != __version__:
            raise dask_hooks.UnsupportedError(
                f"the scheduler has dask-gpurt {self.version}, {self.worker.address} has {__version__}: "
                "install the same version everywhere"
            )

    async def _ask_to_join(self, devices: Collection[str]) -> JoinReply:
        """Ask the scheduler whether and how to switch on, and retry until it answers.

        Once the scheduler has said yes, it waits for this plugin when it switches off. So a plugin whose
        connection broke must ask again.
        """
        reply: int | None = await call_scheduler(
            self.worker,
            JOIN_HANDLER,
            subject=self.worker.address,
            pause_s=JOIN_PAUSE_S,
            wanted=lambda: not is_closing(self.worker),
            worker=self.worker.address,
            token=self.token,
            devices=devices,
            plugin=self._id,
        )
        # A scheduler on which the runtime has been switched off replies None.
        return JoinReply.STAY_OFF if reply is None else JoinReply(reply)

    def _tell_off(self) -> None:
        """Tell the scheduler that this plugin is off; the last message of the plugin."""
        self._send(LEFT_OP, token=self.token, plugin=self._id)

    def _send(self, what: str, **message: Any) -> None:
        with contextlib.suppress(CommClosedError):  # then the scheduler forgets this worker
            self.worker.batched_stream.send({"op": what, **message})

    def _leave(self) -> None:
        """Unregister from the worker's plugins, where shuffles look for the runtime."""
        if self.worker.plugins.get(NAME) is self:
            del self.worker.plugins[NAME]

    async def _switch_on(self, worker: WorkerServer, settings: config.Settings, reply: JoinReply) -> None:
        undo = self._undo
        undo.enter_context(sharing_expressions())  # tasks may plan dataframes
        self.metrics = Metrics()
        self.data: WorkerData | None = None
        self._checked = 0.0
        await asyncio.to_thread(self._build, worker, settings, reply)
        self.tiers.start()
        patches = dask_hooks.PatchSet()
        undo.callback(patches.restore)
        undo.callback((of_files := dask_hooks.PatchSet(Layer.READS)).restore)
        renew_files(of_files)
        self._listen(patches)
        patches.add_item(worker.executors, COMM, self.exchange.executor)
        # Wrap the operation by which the scheduler announces workers that have left.
        patches.put_item(worker.stream_handlers, "remove-worker", self._watch_removed_workers)
        self.streams = PromptStreams()
        undo.callback(self.streams.restore)
        self.streams.add(worker.batched_stream)
        housekeeping = PeriodicCallback(self._run_housekeeping, TRIM_INTERVAL_S * 1000)
        housekeeping.start()
        undo.callback(housekeeping.stop)
        self.tracing.install()
        undo.callback(self.tracing.uninstall)
        undo.callback(prometheus.register(worker, Server.WORKER, self.metrics, self._readings))
        undo.callback(self._stop_beats)
        # A copy, as in the undo: a heartbeat may be iterating over the old dict.
        worker.metrics = {**worker.metrics, HEARTBEAT_METRIC: self._beat}
        import_backends(self.exchange.pools.devices)
        await self.exchange.offload(self.exchange.pools.make_all)
        await self.exchange.offload(self.overlap.prepare)
        # Parts that wrap the same method are installed in the order of Layer: the last one is called first.
        for part in (self.overlap, self.run_lookup):
            undo.callback(part.uninstall)
            part.install()
        if settings.memory.tiers:
            await self.exchange.offload(self.tiers.guard)
            copies = PeerCopies(self.tiers.device, self.tiers.limits.device, self.exchange.lend, self.metrics)
            undo.callback(copies.close)
            self.data = WorkerData(
                worker, self.tiers, settings.memory, self.metrics, self.reads.is_aside, copies
            )
            self.data.install()
            undo.push_async_callback(self._give_data_back)
        if settings.cache != 0:
            columns = self.tiers.columns if self.tiers.device.on_host else None
            kept = KeptRanges(worker, self.tiers.ranges, self.metrics, columns)
            undo.callback(kept.uninstall)
            kept.install()
        undo.callback(self.reads.uninstall)
        self.reads.install()
        undo.callback(self.programs.uninstall)
        self.programs.install()
        for instrument in INSTRUMENTS:
            instrument(self)
        self.is_on = True
        call_soon(worker, self._warm_up)

    def _listen(self, patches: dask_hooks.PatchSet) -> None:
        worker = self.worker
        handlers = {
            WORKER_REPORT_HANDLER: self.exchange.until_closed(self.report),
            EVACUATE_HANDLER: self.evacuate,
            MEMORY_HANDLER: self.tiers.report,
        }
        operations = {NEW_OWNERS_OP: self.renew, ACCEPTED_OP: self.accepted, ASK_STATUS_OP: self.tell_status}
        results = {SEND_RESULTS_OP: self.take_results}
        patches.add_handlers(worker.handlers, handlers, off=is_off)
        patches.add_handlers(worker.stream_handlers, operations, off=is_off)
        patches.add_handlers(worker.stream_handlers, results, off=_storing(worker))

    async def _run_housekeeping(self) -> None:
        """Free idle memory, and switch off if the scheduler has done so while this worker was silent."""
        if await self._is_outdated():
            await self._remove_outdated()
        else:
            await self.exchange.run_housekeeping()

    async def _is_outdated(self) -> bool:
        """Ask the scheduler, at intervals, whether this plugin's runtime is not on any more."""
        # Dask's interval between heartbeats grows with the number of workers.
        pause_s = HEARTBEATS_PER_CHECK * self.worker.periodic_callbacks["heartbeat"].callback_time / 1000
        if not self.is_on or time.monotonic() - self._checked < pause_s:
            return False
        self._checked = time.monotonic()
        try:
            token: str | None = await getattr(self.worker.scheduler, TOKEN_HANDLER)()
        except OSError:  # it asks again, or closes without its scheduler
            return False
        return token != self.token

    async def _remove_outdated(self) -> None:
        """Remove this plugin, unless the plugin of another runtime has replaced it already."""
        if self.worker.plugins.get(NAME) is self:
            address = self.worker.address
            logger.warning("%s was silent while the runtime was switched off, and does so now", address)
            await self.worker.plugin_remove(name=NAME)

    async def _warm_up(self) -> None:
        """Load and compile kernels that the first programs would otherwise wait for.

        Both run concurrently: on a machine without cached kernels on disk, compiling takes seconds.
        """
        devices, offload = self.exchange.pools.devices, self.exchange.offload
        with contextlib.suppress(ExchangeClosed):
            await asyncio.gather(
                offload(warm_up, devices),
                # A close waits for the threads of the exchange.
                offload(warm_up_operators, devices, lambda: self.exchange.closed),
            )

    def _watch_removed_workers(self, remove_worker: Callable[..., Any]) -> Callable[..., Any]:
        def on_worker_removed(worker: str, **kwargs: Any) -> Any:
            self.exchange.on_worker_removed(worker)
            return remove_worker(worker=worker, **kwargs)

        return on_worker_removed

    def take_results(self, results: Mapping[Key, object]) -> None:
        """Store results sent ahead of the tasks that need them, and confirm them (stream handler)."""
        put_results(self.worker, results)
        self._send(CONFIRM_RESULTS_OP, keys=list(results))

    def tell_status(self) -> None:
        """Tell the scheduler that this worker is heard again, and its status (stream handler)."""
        self._send(STATUS_OP, status=self.worker.status.name)

    def renew(self, id: ShuffleId, run_id: int, owners: Owners) -> None:
        """Apply new owners of a run's outputs (stream handler)."""
        if (run := self._run(id, run_id)) is not None:
            run.renew(owners)

    def accepted(self, key: Key) -> None:
        """Release the shards that a task has read, since the scheduler has its result (stream handler).

        The key suffices to identify the dispatch: the stream keeps the order of messages, so this one
        comes before any later dispatch, and a process that replaces this worker has another stream.
        """
        for run in self._runs().values():
            if isinstance(run, ShuffleRun):
                run.task_done(key)

    async def evacuate(self, runs: Iterable[tuple[Any, int, int]]) -> dict[Any, int]:
        """Have the shards of runs copied by their owners, for some seconds (handler).

        ``runs``: the shuffle, the run id and the epoch of each run.
        Returns the number of shards that are yet to be copied, by shuffle; without runs that are not active
        here.
        """
        mine = {id: (run, epoch) for id, run_id, epoch in runs if (run := self._run(id, run_id)) is not None}
        left = await asyncio.gather(*(run.evacuate(epoch) for run, epoch in mine.values()))
        return {id: each for id, each in zip(mine, left, strict=True) if each is not None}

    def _runs(self) -> Mapping[ShuffleId, Any]:
        shuffles: Any = self.worker.plugins.get("shuffle")
        return {} if shuffles is None else active_runs(shuffles)

    def _run(self, id: ShuffleId, run_id: int) -> ShuffleRun | None:
        """Return this worker's part of a run; None if it is not active, or not the runtime's."""
        run = self._runs().get(id)
        return run if isinstance(run, ShuffleRun) and run.run_id == run_id and run.is_open else None

    def _build(self, worker: WorkerServer, settings: config.Settings, reply: JoinReply) -> None:
        memory_limit = worker.memory_manager.memory_limit or MEMORY_LIMIT
        pools = Pools(settings.exchange.pool, memory_limit, self.metrics)
        for device in pools.devices.values():
            if isinstance(device, Streams):
                device.prioritised &= settings.overlap.mode != "off"
        self.tiers = self._tiers(worker, settings, pools, reply)
        self._undo.push_async_callback(self.tiers.close)
        most = most_in_flight(settings.exchange.inflight, self.tiers.host)
        settings = replace(settings, exchange=replace(settings.exchange, inflight=most))
        self.exchange = Exchange(worker, pools, self.tiers.tiered_buffer, settings, self.metrics)
        self._undo.push_async_callback(self._close_exchange)
        on_gpu = not pools.device(pools.main).on_host
        if on_gpu:
            self._undo.callback(set_reader_threads(settings.reads.threads))
        tiers = self.tiers
        columns = KeptColumns(tiers.columns, tiers.tables, tiers.sparing, self.metrics)
        kept = columns if on_gpu and settings.cache != 0 else None
        self.reads = WorkerReads(worker, pools.device(pools.main), settings.reads, self.metrics, kept)
        self.programs = WorkerPrograms(settings.compute, pools.device(pools.main), self.metrics)
        self.overlap = WorkerOverlap(self.exchange, settings.overlap, self.metrics)
        self.run_lookup = RunLookup(worker, self.metrics)
        self.tracing = WorkerTracing(worker, self.metrics, self.exchange)

    def _tiers(
        self, worker: WorkerServer, settings: config.Settings, pools: Pools, reply: JoinReply
    ) -> WorkerTiers:
        """Return the tiers; with default limits if the set ones do not fit a worker that joins later."""
        try:
            return WorkerTiers(worker, settings, pools, self.metrics)
        except config.ConfigError as error:
            if reply is not JoinReply.AS_FITS:
                raise
            self.metrics.fallback(Fallback.MEMORY_DEFAULT_LIMITS, str(error))
            memory = replace(settings.memory, device=None, pinned=None, host=None, disk=None)
            pools.use_automatic_size()
            return WorkerTiers(worker, replace(settings, memory=memory), pools, self.metrics)

    async def teardown(self, worker: WorkerServer) -> None:
        async with self._switching:
            self.is_on = False
            await self._undo.aclose()  # a second call is a no-op

    async def _give_data_back(self) -> None:
        # A closing worker loses its data anyway; do not read spilled data back.
        if self.data is not None and self.worker.status in (Status.running, Status.paused):
            await self.data.uninstall()

    async def _close_exchange(self) -> None:
        # At exit a task that waits for the event loop would wait for this call.
        stopped = await in_thread(self.exchange.stop, 0.0 if is_exiting() else CLOSE_TIMEOUT_S)
        await self.exchange.calls.close()
        if stopped:
            await in_thread(self.exchange.close)
        elif not is_exiting():
            logger.error(
                "tasks of shuffles still use the exchange's memory %s s after the runtime was switched "
                "off, so it stays allocated until this worker ends",
                CLOSE_TIMEOUT_S,
            )

    def transition(self, key: Key, start: str, finish: str, **kwargs: Any) -> None:
        if self.is_on and finish == "executing":
            self.streams.gather(self.worker.batched_stream, bool(self.worker.state.ready))
        if self.is_on and self.metrics.recording is not None and finish in ENDED:
            if start == "flight":
                self.tracing.fetched()
            elif start in EXECUTED:
                self.tracing.task_ended(key)

    def _beat(self, worker: WorkerServer) -> dict[str, Any]:
        """Return what each heartbeat tells the scheduler."""
        memory, runs = self.tiers.ledger.snapshot(), self.exchange.recent_runs.snapshot()
        return {**self._counted(), "token": self.token, "memory": memory, "runs": runs}

    def _stop_beats(self) -> None:
        metrics = self.worker.metrics
        if metrics.get(HEARTBEAT_METRIC) == self._beat:  # and not that of a later plugin
            self.worker.metrics = {name: metrics[name] for name in metrics if name != HEARTBEAT_METRIC}

    def _readings(self) -> list[prometheus.Reading]:
        ledger = self.tiers.ledger
        return [
            *(
                ("memory.held.{tier}.{kind}", (str(tier), kind), ledger.cell(tier, kind))
                for tier in ledger.capacity
                for kind in KINDS
            ),
            *(
                ("memory.held.{tier}.{kind}", (str(tier), "capacity"), nbytes)
                for tier, nbytes in ledger.capacity.items()
            ),
            *(
                ("residency.{outcome}", (name.removeprefix("residency."),), launches)
                for name, launches in self.overlap.counters().items()
            ),
        ]

    def _counted(self) -> dict[str, Any]:
        known = self.metrics.snapshot()
        return {**known, "counters": known["counters"] | self.overlap.counters()}

    async def report(self, connect: bool = False) -> dict[str, Any]:
        """Return this worker's devices, paths, pools, counters and fallbacks (handler)."""
        if connect:
            await self.exchange.peers.connect_all()
        return {
            "version": __version__,
            "devices": await self.exchange.offload(self.exchange.pools.describe_devices),
            "paths": self.exchange.peers.describe(self.exchange.pools.main),
            "host_paths": self.exchange.peers.describe("host"),
            "pools": self.exchange.pools.describe(),
            "overlap": self.overlap.report(),
            "reads": self.reads.report(),
            "problems": config.problems(),
            **self._counted(),
        }


def _storing(worker: WorkerServer) -> Callable[..., None]:
    """Return a handler that stores results, since the scheduler counts replicas here, without confirming."""

    def off(results: Mapping[Key, object]) -> None:
        if not is_closing(worker):
            put_results(worker, results)

    return off


# ---- logs --------------------------------------------------------------------------------------------


class _WithoutTraceback(logging.Filter):
    """Drop Dask's log records, with a traceback for each worker, of errors that are reported elsewhere.

    A wrong setting, or a version that is not supported, is raised by the call that switches the runtime on,
    or logged in one line if there is no such call. Dask also logs an error when it removes the plugin from a
    worker that does not have it, mostly since it has failed to switch on.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        is_removal = isinstance(error, KeyError) and error.args == (NAME,)
        return not is_removal and not isinstance(error, (config.ConfigError, dask_hooks.UnsupportedError))


_without_traceback = _WithoutTraceback()


def spare_tracebacks() -> None:
    """Keep such tracebacks out of the logs of this process. Idempotent, and never undone: others stay."""
    for name in ("distributed.worker", "distributed.core"):
        logging.getLogger(name).addFilter(_without_traceback)
