"""Run the runtime on the scheduler."""

from __future__ import annotations

import asyncio
import logging
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from dask.typing import Key
from distributed import SchedulerPlugin
from distributed.metrics import time
from distributed.protocol.pickle import dumps

from dask_gpurt import config, dask_hooks
from dask_gpurt.dask_hooks.expression_threads import sharing_expressions
from dask_gpurt.dask_hooks.types import SchedulerServer
from dask_gpurt.dask_hooks.worker import CLOSING, PromptStreams
from dask_gpurt.memory.ledger import LedgerMessage
from dask_gpurt.observe import Fallback, MethodChoice, Metrics, prometheus
from dask_gpurt.observe.counting import METHOD_TOPIC
from dask_gpurt.observe.metrics import Server
from dask_gpurt.protocol import (
    CLIENTS_TOPIC,
    CLUSTER_REPORT_HANDLER,
    CONFIRM_RESULTS_OP,
    GONE_HANDLER,
    HOST_ROOM_HANDLER,
    JOIN_HANDLER,
    LEFT_OP,
    LOST_KEYS_OP,
    MEMORY_HANDLER,
    NAME,
    OWNERS_HANDLER,
    PLANS_TOPIC,
    READY_OP,
    RECOVER_HANDLER,
    REFUSED_OP,
    SEALED_OP,
    SILENT_HANDLER,
    STATUS_OP,
    TOKEN_HANDLER,
    is_off,
)
from dask_gpurt.scheduler.clients import Clients, Computations
from dask_gpurt.scheduler.read_places import ReadPlaces
from dask_gpurt.scheduler.reports import ClusterReports, SchedulerTracing
from dask_gpurt.scheduler.shuffles import SchedulerShuffles
from dask_gpurt.scheduler.switching import Switch, Workers
from dask_gpurt.scheduler.worker_calls import SilentWorkers, ask_all, heartbeat_of, make_room
from dask_gpurt.worker.plugin import GpurtWorkerPlugin, spare_tracebacks

logger = logging.getLogger(__name__)

#: Starts observing a plugin that is on, and returns a function that stops it.
Observer = Callable[["GpurtSchedulerPlugin"], Callable[[], None]]
#: The plugin's name until it is on: Dask considers a plugin registered as soon as its name is known.
STARTING = "gpurt-starting"
#: How long a memory query waits for each worker, in seconds; then its last heartbeat has to do.
MEMORY_TIMEOUT_S = 2.0


class GpurtSchedulerPlugin(SchedulerPlugin):
    """Switch the runtime on for a cluster, including workers that join later.

    Parts are switched on in the order listeners, workers, shuffles, so that no shuffle reaches a
    worker without the runtime. Each part pushes a callback that switches it off. The callbacks run in reverse
    order, all of them even if one fails.

    ``settings``: the section ``gpurt`` of the process that switches the runtime on. Settings of the
    scheduler's or a worker's own configuration take precedence.
    ``observer``: called once the runtime is on; its result is called when the runtime is switched off.
    """

    name = NAME
    idempotent = True

    def __init__(self, settings: Mapping[str, Any], observer: Observer | None = None):
        self.given = settings
        self.observer = observer

    async def start(self, scheduler: SchedulerServer) -> None:
        # Several clients or nannies may register the plugin at once, or while another client switches it off.
        while (other := scheduler.extensions.get(NAME)) is not None:
            if await other.switch.settled():
                return  # the other one is on; Dask drops this idempotent plugin
        scheduler.extensions[NAME] = self
        self.scheduler = scheduler
        spare_tracebacks()
        self.switch = Switch(self._switch_on, self._switch_off)
        await self.switch.on()

    async def close(self) -> None:
        # The registry of metrics is global to the process and would keep the closed scheduler alive, and the
        # process may go on, as that of a notebook.
        self._hide()

    async def stop(self) -> None:
        """Switch the runtime off and restore Dask, on the scheduler and on all workers."""
        await self.switch.off()

    # ---- on and off ----------------------------------------------------------------------

    async def _switch_on(self) -> None:
        self._undo = AsyncExitStack()
        self._undo.callback(self._end)
        try:
            dask_hooks.require()
            self._prepare(config.load_over(self.given))
            await self.workers.require()
            self._undo.enter_context(sharing_expressions())
            self._show()
            self._listen()
            self._register(STARTING)
            self._undo.callback(self._unregister, STARTING)
            self.clients.begin()
            if self.settings.cache != 0:
                self._undo.callback(self.read_places.unbind)
            self._undo.callback(self.workers.silent.close)
            self._undo.push_async_callback(self.workers.off)
            await self.workers.on()
            self.shuffles.install()
            self._undo.callback(self.shuffles.uninstall)
            # Dask considers the plugin registered only under NAME, that is while all parts are on.
            self._rename(STARTING, NAME)
            self._undo.callback(self._rename, NAME, STARTING)
            if self.observer is not None:
                self._undo.callback(self.observer(self))
            self.clients.tell(on=True)
            self._undo.callback(self.clients.tell, False)
        except BaseException:
            try:
                await self._switch_off()
            except Exception:  # logged only: the error that is raised below is the cause
                logger.exception("switching the runtime on failed, and so did undoing it")
            raise

    async def _switch_off(self) -> None:
        await self._undo.aclose()

    def _prepare(self, settings: config.Settings) -> None:
        self.settings, self.began = settings, time()
        self.metrics = Metrics()
        self.clients = Clients(self.scheduler, self.metrics)
        self.computations = Computations(self.scheduler, self.began)
        self.tracing = SchedulerTracing(self.scheduler, self.metrics)
        token = uuid.uuid4().hex
        self.reports = ClusterReports(self.scheduler, self.metrics, token)
        silent = SilentWorkers(self.scheduler, self.metrics)
        self.workers = Workers(self.scheduler, dumps(GpurtWorkerPlugin(self.given, token)), token, silent)
        self.read_places = ReadPlaces(
            self.scheduler,
            self.workers.with_gpu,
            lambda name, why: self.metrics.fallback(Fallback.READ_PLACES, f"{name}: {why}"),
        )
        self.shuffles = SchedulerShuffles(self.scheduler, settings, self.metrics, self.workers)

    def _listen(self) -> None:
        handlers = {
            CLUSTER_REPORT_HANDLER: self.report,
            HOST_ROOM_HANDLER: lambda host: make_room(self.scheduler, host),
            **self.tracing.handlers(),
            GONE_HANDLER: self.gone,
            MEMORY_HANDLER: self.memory,
            JOIN_HANDLER: self.workers.join,
            TOKEN_HANDLER: lambda: self.workers.token,
            OWNERS_HANDLER: self.shuffles.recovery.owners,
            RECOVER_HANDLER: self.shuffles.recovery.recover,
            SILENT_HANDLER: self.shuffles.abandoning.continues_without,
        }
        operations = {
            LOST_KEYS_OP: self.lost,
            READY_OP: self.is_ready,
            LEFT_OP: self.workers.has_left,
            REFUSED_OP: self.refused,
            SEALED_OP: self.shuffles.recovery.sealed,
            STATUS_OP: self.workers.silent.is_back,
            CONFIRM_RESULTS_OP: self.shuffles.results.confirmed,
        }
        self._undo.callback(self.tracing.close)
        patches = dask_hooks.PatchSet()
        self._undo.callback(patches.restore)
        patches.add_handlers(self.scheduler.handlers, handlers, off=is_off)
        patches.add_handlers(self.scheduler.stream_handlers, operations, off=is_off)
        self.streams = PromptStreams()
        self._undo.callback(self.streams.restore)
        for stream in self.scheduler.stream_comms.values():
            self.streams.add(stream)

    def _end(self) -> None:
        _forget_plans()
        self._unregister(NAME)
        if self.scheduler.extensions.get(NAME) is self:
            del self.scheduler.extensions[NAME]

    def _register(self, name: str) -> None:
        self.scheduler.add_plugin(self, name=name)

    def _unregister(self, name: str) -> None:
        if self.scheduler.plugins.get(name) is self:
            del self.scheduler.plugins[name]

    def _rename(self, before: str, after: str) -> None:
        self._unregister(before)
        self._register(after)

    def is_ready(self, worker: str, token: str) -> None:
        """Note that a worker has switched on (stream handler)."""
        self.workers.is_ready(worker, token)
        if worker in self.workers.ready:
            self.shuffles.recovery.joined(worker)

    def refused(self, worker: str, token: str, reason: str) -> None:
        """Note that a worker that joined later rejects its settings (stream handler).

        If no worker has the runtime on, it is switched off, so that programs continue with plain Dask.
        Workers that were present when the runtime was switched on reply with the error instead.
        """
        if token != self.workers.token or not self.switch.is_on:
            return
        if not self.workers.ready:
            config.say_once(logger, reason)
            self._stopping = asyncio.create_task(self.stop())
        else:
            logger.error("the runtime is not on at %s, and shuffles that reach it fail: %s", worker, reason)

    def restart(self, scheduler: SchedulerServer) -> None:
        self.shuffles.recovery.restart()

    # ---- memory ------------------------------------------------------------------------

    def beats(self) -> dict[str, Mapping[str, Any]]:
        """Return what the last heartbeat of each worker has told of this runtime."""
        workers, token = self.scheduler.workers.items(), self.workers.token
        told = ((worker, heartbeat_of(state, token)) for worker, state in workers)
        return {worker: beat for worker, beat in told if beat is not None}

    async def memory(self) -> dict[str, LedgerMessage]:
        """Return the ledger of each worker at this moment; of those that do not answer, their last one."""
        replies = await ask_all(self.scheduler, self.workers.ready, MEMORY_HANDLER, MEMORY_TIMEOUT_S)
        known = {worker: beat["memory"] for worker, beat in self.beats().items()}
        return known | {worker: each for worker, each in replies.items() if isinstance(each, dict)}

    def lost(self, worker: str, keys: list[Key]) -> None:
        """Remove a worker's replicas of keys that it can no longer read, and recompute the keys if needed."""
        state = self.scheduler.workers.get(worker)
        recommendations: dict[Key, Any] = {}
        for task in map(self.scheduler.tasks.get, keys):
            if task is not None and state is not None and state in (task.who_has or ()):
                self.scheduler.remove_replica(task, state)
                if not task.who_has:
                    recommendations[task.key] = "released" if task.run_spec else "forgotten"
        self.scheduler.transitions(recommendations, stimulus_id=f"gpurt-lost-{time()}")

    def add_worker(self, scheduler: SchedulerServer, worker: str) -> None:
        self.streams.add(scheduler.stream_comms[worker])
        self.reports.add(worker)

    def remove_worker(self, scheduler: SchedulerServer, worker: str, **_: Any) -> None:
        self.reports.remove(worker)
        self.workers.remove(worker)

    # ---- tasks ---------------------------------------------------------------------------

    def update_graph(self, scheduler: SchedulerServer, *, client: str, tasks: list[Key], **_: Any) -> None:
        self.clients.computes(client, tasks)
        if self.settings.cache != 0:
            self.read_places.on_graph(tasks)

    def transition(self, key: Key, start: str, finish: str, *_: Any, **kwargs: Any) -> None:
        self.read_places.transition(key, finish, kwargs.get("worker"))
        self.shuffles.transition(key, finish, kwargs.get("worker"), kwargs.get("metadata"))

    # ---- metrics -------------------------------------------------------------------------

    def _show(self) -> None:
        """Register metrics."""
        self._hide = prometheus.register(self.scheduler, Server.SCHEDULER, self.metrics, self._readings)
        self._undo.callback(self._hide)

    def _readings(self) -> list[prometheus.Reading]:
        return [
            ("workers.ready", (), len(self.workers.ready)),
            ("shuffles.active", (), len(self.shuffles.runs.all())),
        ]

    # ---- calls from workers and clients ----------------------------------------------

    def log_event(self, topic: str, msg: Any) -> None:
        """Take what a client says of itself, and count the choice of a shuffle method that it reports."""
        if topic == CLIENTS_TOPIC:
            self.clients.heard(msg)
        elif topic == PLANS_TOPIC:
            self.computations.told(msg)
        # A client of another version may report choices that are unknown here.
        elif topic == METHOD_TOPIC and msg in MethodChoice.__members__:
            MethodChoice[msg].count(self.metrics)

    def remove_client(self, scheduler: SchedulerServer, client: str) -> None:
        self.clients.remove(client)

    def gone(self, peers: list[str], closing: bool = False) -> list[str]:
        """Return which of these workers have left.

        ``closing``: include workers that are closing.
        """
        workers = self.scheduler.workers
        return [
            peer for peer in peers if peer not in workers or (closing and workers[peer].status in CLOSING)
        ]

    async def report(self, connect: bool = False) -> dict[str, Any]:
        """Return a report on the whole cluster, for ``dask gpurt doctor`` and users.

        ``connect``: have the workers detect the paths to all of their peers first.
        """
        return {
            "takeover": self.settings.takeover,
            **await self.reports.collect(connect),
            "queries": self.computations.rows(),
        }


def _forget_plans() -> None:
    """Drop the plans that this process keeps. A scheduler that has received none need not import planning."""
    if (packed := sys.modules.get("dask_gpurt.client.planning.packed")) is not None:
        packed.forget_plans()
