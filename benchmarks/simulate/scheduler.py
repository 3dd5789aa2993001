"""Run Dask's scheduler in virtual time: its state and decisions, without its server."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import thread_time
from types import SimpleNamespace
from typing import Any

import dask
from dask.order import order
from dask.typing import Key
from distributed.active_memory_manager import ActiveMemoryManagerExtension
from distributed.collections import HeapSet
from distributed.core import Status
from distributed.scheduler import Scheduler, SchedulerState, WorkerState, heartbeat_interval
from distributed.stealing import WorkStealing
from sortedcontainers import SortedDict

from benchmarks.simulate.clock import Clock, Name
from dask_gpurt.dask_hooks.types import GraphNode

#: The name of the only client.
CLIENT = Name("client")
#: The methods that choose a worker.
DECISIONS = (
    "decide_worker_non_rootish",
    "decide_worker_rootish_queuing_disabled",
    "decide_worker_rootish_queuing_enabled",
)

StreamMessage = dict[str, Any]
#: Sends messages to a worker or a client.
Send = Callable[..., None]


class Stopwatch:
    """Measure the CPU time of functions, and count their calls."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.count = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that also measures each call."""

        def timed(*arguments: Any, **named: Any) -> Any:
            start = thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += thread_time() - start
                self.count += 1

        return timed

    @property
    def microseconds(self) -> float:
        """Return the mean CPU time of a call, in microseconds."""
        return 1e6 * self.seconds / self.count if self.count else 0.0


def _stand_in(**attributes: Any) -> Any:
    """Return a stand-in for an object of the server, with the attributes that are used."""
    return SimpleNamespace(**attributes)


def _metrics(memory: int, spilled: int) -> dict[str, Any]:
    """Return the metrics of a worker's heartbeat that the scheduler uses."""
    return {"memory": memory, "spilled_bytes": {"memory": spilled, "disk": spilled}}


class VirtualScheduler(Scheduler):
    """Run a ``Scheduler`` without its server: only its state exists, and messages arrive in virtual time.

    Messages are handled sequentially.

    ``cost``: virtual seconds to handle a message, constant so that results are the same on any machine.
    ``decision``: additional virtual seconds to choose a worker, constant for the same reason.
    """

    def __init__(self, clock: Clock, cost: float, report: Send, decision: float = 0.0):
        SchedulerState.__init__(
            self,
            aliases={},
            clients={},
            workers=SortedDict(),
            host_info={},
            resources={},
            tasks={},
            unrunnable={},
            queued=HeapSet(key=lambda task: task.priority),
            validate=False,
        )
        self._clock = clock
        self._cost = cost
        self._decision = decision
        self._free_at = 0.0
        #: Virtual seconds of the decisions for the current message so far, and the time at which the
        #: decisions for the last message are complete.
        self.decided_s = 0.0
        self._decided_at = 0.0
        self.messages = 0
        self.busy = Stopwatch()
        self.deciding = Stopwatch()
        self._stand_ins(report)
        self.stealing = self._steal()
        self._manage_memory()
        self._handle = self.busy.around(self._handle)  # type: ignore[method-assign]

    def _stand_ins(self, report: Send) -> None:
        """Create the attributes that the server would have created and that the used methods need."""
        self._status = Status.running
        self._last_time = self.generation = 0
        self._workers_removed_total = 0
        self._no_workers_since = None
        self._ongoing_background_tasks = _stand_in(call_later=lambda *arguments: None)
        self.rpc = _stand_in(remove=lambda address: None)
        self.allowed_failures = dask.config.get("distributed.scheduler.allowed-failures")
        self.bandwidth_workers = defaultdict(float)
        self.digests = None
        self.periodic_callbacks = {}
        self.client_comms = {CLIENT: _stand_in(send=report)}
        self.stream_comms = {}
        self.stream_handlers = {
            "task-finished": self.handle_task_finished,
            "task-erred": self.handle_task_erred,
            "release-worker-data": self.release_worker_data,
            "add-keys": self.add_keys,
            "reschedule": self._reschedule,
            "request-refresh-who-has": self.handle_request_refresh_who_has,
        }

    def _steal(self) -> WorkStealing | None:
        if not dask.config.get("distributed.scheduler.work-stealing"):
            return None
        stealing = WorkStealing(self)
        self.extensions["stealing"] = stealing
        balance = self.busy.around(stealing.balance)
        self._clock.every(lambda: float(stealing._callback_time), balance)
        return stealing

    def _manage_memory(self) -> None:
        """Run Dask's active memory manager, which drops replicas that no task needs."""
        if not dask.config.get("distributed.scheduler.active-memory-manager.start"):
            return
        manager = ActiveMemoryManagerExtension(self, register=False, start=False)
        self.extensions["amm"] = manager
        self._clock.every(lambda: manager.interval, self.busy.around(manager.run_once))

    def time_decisions(self) -> None:
        """Time each choice of a worker, including overrides bound so far."""
        for name in DECISIONS:
            setattr(self, name, self._charged(self.deciding.around(getattr(self, name))))

    def _charged(self, decide: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a choice of a worker so that it takes virtual time."""
        if not self._decision:
            return decide

        def charged(*arguments: Any, **named: Any) -> Any:
            self.decided_s += self._decision
            return decide(*arguments, **named)

        return charged

    # ---- in place of the server ------------------------------------------------------

    def log_event(self, topic: Any, msg: Any) -> None:
        """Drop the entry, since nothing reads the log."""

    def coerce_address(self, addr: Any, resolve: bool = True) -> str:
        """Return an address with a stable hash."""
        return addr if isinstance(addr, Name) else Name(addr)

    def receive(self, worker: str, message: StreamMessage) -> None:
        """Receive a message from a worker, and handle it after all earlier messages."""
        self._free_at = max(self._clock.now, self._free_at) + self._cost
        self._clock.at(self._free_at, self._handle, worker, message)

    def _handle(self, worker: str, message: StreamMessage) -> None:
        if worker not in self.workers:
            return
        if self._clock.now < self._decided_at:  # the scheduler is still busy with earlier decisions
            self._clock.at(self._decided_at, self._handle, worker, message)
            return
        self.messages += 1
        handler = self.stream_handlers[message.pop("op")]
        with self._charging():
            handler(worker=worker, **message)

    @contextmanager
    def _charging(self) -> Iterator[None]:
        """Delay the next message by the decisions made in the body."""
        self.decided_s = 0.0
        try:
            yield
        finally:
            self._decided_at = max(self._clock.now, self._decided_at) + self.decided_s
            self.decided_s = 0.0

    # ---- workers ---------------------------------------------------------------------

    def join(self, worker: str, threads: int, memory: int, send: Send) -> None:
        """Register a worker: the part of ``Scheduler.add_worker`` that concerns state."""
        self.workers[worker] = ws = WorkerState(
            address=worker,
            status=Status.running,
            pid=0,
            name=worker,
            nthreads=threads,
            memory_limit=memory,
            local_directory="",
            nanny=None,
            server_id=worker,
            scheduler=self,
        )
        ws.metrics = _metrics(0, 0)
        self.running.add(ws)
        known = self.host_info.setdefault(ws.host, {"addresses": set(), "nthreads": 0})
        known["addresses"].add(worker)
        known["nthreads"] += threads
        self.total_memory += memory
        self.total_nthreads += threads
        self.aliases[worker] = worker
        self.stream_comms[worker] = _stand_in(send=send)
        self.check_idle_saturated(ws)
        for plugin in list(self.plugins.values()):
            plugin.add_worker(self, worker)
        self.transitions(self.bulk_schedule_unrunnable_after_adding_worker(ws), "join")
        self.stimulus_queue_slots_maybe_opened(stimulus_id="join")

    def heartbeat(self, worker: str, bandwidth: float, executing: Mapping[str, float], spilled: int) -> None:
        """Handle a heartbeat: the part of ``Scheduler.heartbeat_worker`` that affects decisions."""
        ws = self.workers.get(worker)
        if ws is None:
            return
        part = 1 / len(self.workers)
        self.bandwidth = self.bandwidth * (1 - part) + bandwidth * part  # type: ignore[assignment]
        for key, seconds in executing.items():
            if ts := self.tasks.get(key):
                ts.prefix.add_exec_time(seconds)
        ws.metrics = _metrics(ws.nbytes - spilled, spilled)

    @property
    def heartbeat_interval(self) -> float:
        """Return the interval between two heartbeats of a worker, in seconds."""
        return float(heartbeat_interval(len(self.workers)))

    # ---- the client ------------------------------------------------------------------

    def submit(
        self, graph: Mapping[Key, GraphNode], wanted: Iterable[Key], workers: Mapping[Key, str] | None = None
    ) -> None:
        """Submit a graph on behalf of the client, which wants some of its keys.

        ``workers``: the only worker that may run a task, by key; missing tasks may run anywhere.
        """
        with self._charging():
            self._submit(graph, wanted, workers or {})

    def _submit(
        self, graph: Mapping[Key, GraphNode], wanted: Iterable[Key], workers: Mapping[Key, str]
    ) -> None:
        self._create_taskstate_from_graph(
            start=0.0,
            dsk=dict(graph),
            keys=set(wanted),
            ordered=order(graph),
            client=CLIENT,
            annotations_by_type={"workers": dict(workers)} if workers else {},
            global_annotations=None,
            stimulus_id="submit",
            submitting_task=None,
            span_metadata={"collections": []},
        )
        self.stimulus_queue_slots_maybe_opened(stimulus_id="submit")

    def release(self, keys: Iterable[Key]) -> None:
        """Release keys that the client wanted."""
        self.client_releases_keys(list(keys), client=CLIENT, stimulus_id="release")
