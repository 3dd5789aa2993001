"""Run workers under Dask's own scheduler in one process, on a network that the test controls.

Real, in addition to what `tests/helpers/exchanges.py` runs: the scheduler's state and transitions, its
handling of workers that leave and retire, its p2p extension with the runtime's replacements, recovery and
kept results; the state machines of workers, and the runtime's hooks in them.
Faked: servers and connections; threads (see `tests/helpers/turns.py`); time; the bodies of tasks.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from distributed.active_memory_manager import ActiveMemoryManagerExtension, RetireWorker
from distributed.core import Status
from distributed.exceptions import Reschedule
from distributed.protocol.serialize import ToPickle
from distributed.shuffle._scheduler_plugin import ShuffleSchedulerPlugin
from distributed.worker_state_machine import (
    BaseWorker,
    ExecuteFailureEvent,
    ExecuteSuccessEvent,
    FindMissingEvent,
    GatherDepNetworkFailureEvent,
    GatherDepSuccessEvent,
    PauseEvent,
    RescheduleEvent,
    StateMachineEvent,
    TaskState,
    UnpauseEvent,
    WorkerState,
)

from benchmarks.simulate.clock import Clock
from benchmarks.simulate.scheduler import VirtualScheduler
from benchmarks.simulate.worker import EVENTS
from dask_gpurt import config
from dask_gpurt.exchange.incoming import IncomingShard
from dask_gpurt.observe import Metrics
from dask_gpurt.protocol import (
    ACCEPTED_OP,
    CONFIRM_RESULTS_OP,
    NEW_OWNERS_OP,
    OWNERS_HANDLER,
    READY_OP,
    RECOVER_HANDLER,
    SEALED_OP,
    SEND_RESULTS_OP,
)
from dask_gpurt.scheduler.plugin import GpurtSchedulerPlugin
from dask_gpurt.scheduler.read_places import ReadPlaces
from dask_gpurt.scheduler.recovery import SHUFFLE_TOPIC
from dask_gpurt.scheduler.shuffles import SchedulerShuffles
from dask_gpurt.scheduler.switching import Workers
from dask_gpurt.scheduler.worker_calls import SilentWorkers
from dask_gpurt.worker.plugin import GpurtWorkerPlugin
from tests.helpers.exchange_processes import Network, Process
from tests.helpers.turns import Turns

#: The scheduler's name on the network.
SCHEDULER = "scheduler"
#: Calls to the scheduler that are answered at once, and those that are never lost, since Dask makes them and
#: would fail the task.
DIRECT, RELIABLE = (
    ("gpurt_gone",),
    ("shuffle_get", "shuffle_get_or_create", "shuffle_restrict_task"),
)
STATUS = "worker-status-change"
TOKEN = "the only one"


class Wire(Network):
    """Carry the messages between workers and a scheduler too.

    Messages on the streams to and from the scheduler arrive in order, and are not lost while it lists the
    worker.
    """

    def __init__(self, turns: Turns):
        super().__init__()
        self.turns = turns
        self.scheduler: DaskScheduler
        #: Messages to the scheduler, and batches of messages from it.
        self.up: defaultdict[Process, deque[dict[str, Any]]] = defaultdict(deque)
        self.down: defaultdict[Process, deque[list[dict[str, Any]]]] = defaultdict(deque)

    async def _handle(self, address: str, op: str, content: dict[str, Any]) -> Any:
        if address != SCHEDULER:
            return await super()._handle(address, op, content)
        answer = self.scheduler.handlers[op](**pickle.loads(pickle.dumps(content)))
        answer = await answer if inspect.isawaitable(answer) else answer
        return _unpickled(answer) if isinstance(answer, dict) else answer

    def hear(self, process: Process) -> None:
        """Deliver the next message of a process to the scheduler."""
        message = self.up[process].popleft()
        if self.scheduler.knows(process):
            self.scheduler.stream_handlers[message.pop("op")](worker=process.address, **message)

    def send(self, process: Process, *messages: dict[str, Any]) -> None:
        """Send a batch of the scheduler's messages to a process, which handles nothing else in between."""
        if process.alive:
            self.down[process].append([_unpickled(message) for message in messages])

    def deliver_batch(self, process: Process) -> None:
        """Deliver the next batch of the scheduler's messages to a process."""
        for message in self.down[process].popleft():
            process.stream_handlers[message.pop("op")](**message)


def _unpickled(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of the scheduler as it arrives."""
    return {
        name: pickle.loads(pickle.dumps(value.data)) if isinstance(value, ToPickle) else value
        for name, value in message.items()
    }


class _Calls:
    """Call the scheduler, as ``Worker.scheduler`` does."""

    def __init__(self, wire: Wire):
        self._wire = wire
        self.process: Process

    def __getattr__(self, op: str) -> Callable[..., Any]:
        if op in DIRECT:
            return lambda **content: self._wire._handle(SCHEDULER, op, content)
        return self._call(op)

    def _call(self, op: str) -> Callable[..., Any]:
        return lambda **content: self._wire.call(self.process, SCHEDULER, op, content)

    def hear(self, message: dict[str, Any]) -> None:
        self._wire.up[self.process].append(dict(message))


# ---- workers -------------------------------------------------------------------------


class _WorkerRuntime(GpurtWorkerPlugin):
    """Run the hooks of the runtime on a worker, without the parts that they serve."""

    def __init__(self, worker: Any):
        self.worker, self.exchange, self.is_on = worker, worker.exchange, False


class ScheduledWorker(Process, BaseWorker):
    """Run Dask's state machine on a process, and its tasks when the test lets them.

    ``tasks``: takes a worker, a key and the values of its dependencies, and runs the task.
    """

    def __init__(
        self, address: str, wire: Wire, tasks: Callable[..., Any], *, pool: int, paths: Sequence[str]
    ):
        calls = _Calls(wire)
        calls.process = self
        Process.__init__(self, address, wire, calls, pool=pool, paths=paths)
        self.wire, self._tasks = wire, tasks
        self.data: dict[Any, Any] = {}
        runtime = _WorkerRuntime(self)
        self.plugins = {"gpurt": runtime, "shuffle": self.shuffles}
        state = WorkerState(address=address, data=self.data, plugins={"gpurt": runtime})
        BaseWorker.__init__(self, state)
        self.closed = False
        self.handlers["get_data"] = self._get_data
        self.stream_handlers |= {
            **{op: partial(self._on_event, event) for op, event in EVENTS.items()},
            NEW_OWNERS_OP: runtime.renew,
            ACCEPTED_OP: runtime.accepted,
            SEND_RESULTS_OP: runtime.take_results,
            STATUS: self._change_status,
            "close": self._on_close,
        }
        left = runtime._watch_removed_workers(self.stream_handlers["remove-worker"])
        self.stream_handlers["remove-worker"] = left

    def _on_event(self, event: type[StateMachineEvent], **message: Any) -> None:
        self.handle_stimulus(event(**message))

    def batched_send(self, msg: dict[str, Any]) -> None:
        self.batched_stream.send(msg)

    def digest_metric(self, name: Any, value: float) -> None:
        """Drop the measurement."""

    async def retry_busy_worker_later(self, worker: str) -> StateMachineEvent:
        raise AssertionError("no worker is busy here")

    # ---- tasks and data --------------------------------------------------------------

    async def execute(self, key: Any, *, stimulus_id: str) -> StateMachineEvent:
        if self.status not in (Status.running, Status.closing_gracefully):
            return RescheduleEvent(key=key, stimulus_id="closing")
        task = self.state.tasks[key]
        run_id, values = task.run_id, {each.key: self.data[each.key] for each in task.dependencies}
        await self.wire.turns.wait(f"the start of {key}", self)
        try:
            value = await self._tasks(self, key, values)
        except Reschedule:
            return RescheduleEvent(key=key, stimulus_id="rescheduled")
        except Exception as error:
            return ExecuteFailureEvent.from_exception(error, key=key, run_id=run_id, stimulus_id="failed")
        await self.wire.turns.wait(f"the end of {key}", self)
        return ExecuteSuccessEvent(
            key=key,
            run_id=run_id,
            value=value,
            start=0.0,
            stop=1.0,
            nbytes=1,
            type=type(value),
            stimulus_id="finished",
        )

    async def gather_dep(
        self, worker: str, to_gather: Any, total_nbytes: int, *, stimulus_id: str
    ) -> StateMachineEvent:
        about: dict[str, Any] = {"worker": worker, "total_nbytes": total_nbytes}
        try:
            data = await self.wire.call(self, worker, "get_data", {"keys": sorted(to_gather)})
        except OSError:
            return GatherDepNetworkFailureEvent(**about, stimulus_id="broken")
        return GatherDepSuccessEvent(**about, data=pickle.loads(data), stimulus_id="gathered")

    def _get_data(self, keys: Iterable[Any]) -> bytes:
        return pickle.dumps({key: self.data[key] for key in keys if key in self.data})

    def find_missing(self) -> None:
        """Ask the scheduler again who has the keys that no known worker has, as a worker does each second."""
        self.handle_stimulus(FindMissingEvent(stimulus_id="find-missing"))

    # ---- life ------------------------------------------------------------------------

    def _change_status(self, status: str, stimulus_id: str) -> None:
        if self.status is Status.closing:
            return
        before, self.status = self.status, Status[status]
        self.batched_send({"op": STATUS, "status": status, "stimulus_id": stimulus_id})
        if before is Status.running and self.status is not Status.running:
            self.handle_stimulus(PauseEvent(stimulus_id=stimulus_id))
        elif before is not Status.running and self.status is Status.running:
            self.handle_stimulus(UnpauseEvent(stimulus_id=stimulus_id))

    def _on_close(self, reason: str = "") -> None:
        self.wire.turns.spawn(self.close_down())

    async def close_down(self) -> None:
        """Close in the order of ``Worker.close``, up to its connections."""
        if self.status is Status.closing or not self.alive:
            return
        self.status = Status.closing
        self.batched_send({"op": STATUS, "status": "closing", "stimulus_id": "closing"})
        self.handle_stimulus(PauseEvent(stimulus_id="closing"))
        self._cancel_instructions()
        await self.shuffles.shuffle_runs.teardown()
        self.exchange._patches.restore()
        self.closed = True

    def die(self) -> None:
        super().die()
        self.wire.down.pop(self, None)
        self._cancel_instructions()

    def _cancel_instructions(self) -> None:
        for instruction in self._async_instructions:
            instruction.cancel()


# ---- the scheduler -------------------------------------------------------------------


class _SchedulerRuntime(GpurtSchedulerPlugin):
    """Run the hooks of the runtime on the scheduler, without the parts for memory, reports and placement."""

    def __init__(self, scheduler: Any, settings: config.Settings):
        self.scheduler, self.settings, self.metrics = scheduler, settings, Metrics()
        self.read_places = ReadPlaces(scheduler, (), lambda name, why: None)
        self.workers = Workers(scheduler, b"", TOKEN, SilentWorkers(scheduler, self.metrics))
        self.shuffles = SchedulerShuffles(scheduler, settings, self.metrics, self.workers)

    def add_worker(self, scheduler: Any, worker: str) -> None:
        self.workers.note_devices(worker, ["host"])

    def remove_worker(self, scheduler: Any, worker: str, **_: Any) -> None:
        self.workers.remove(worker)


class DaskScheduler(VirtualScheduler):
    """Run Dask's scheduler with the runtime.

    ``retries``: the setting ``gpurt.shuffle.retries``.
    ``errors``: takes what hooks of plugins raise, which Dask only logs.
    ``processes``: the workers, by address.
    ``leaving``: functions that are called with each worker that is about to be removed.
    ``told``: what was logged about shuffles: beginnings, repairs, restarts.
    """

    def __init__(self, wire: Wire, retries: int, errors: list[Any]):
        super().__init__(Clock(), 0.0, lambda *messages: None)
        self.allowed_failures = 10**6
        self.wire, wire.scheduler = wire, self
        self._stimuli = itertools.count()
        self.loop = SimpleNamespace(add_callback=self._call_soon, call_later=self._call_later)
        self._errors = errors
        self.told: list[dict[str, Any]] = []
        self.processes: dict[str, ScheduledWorker] = {}
        self.leaving: list[Callable[[Any], None]] = []
        self.handlers: dict[str, Callable[..., Any]] = {}
        self.extensions["shuffle"] = ShuffleSchedulerPlugin(self)
        settings = config.load_over({"shuffle": {"retries": retries, "balance": False}})
        self.runtime = _SchedulerRuntime(self, settings)
        self.shuffles = self.runtime.shuffles
        self.recovery = self.shuffles.recovery
        self.shuffles.install()
        self.add_plugin(self.runtime, name="gpurt")
        self.handlers |= {
            OWNERS_HANDLER: self.recovery.owners,
            RECOVER_HANDLER: self.recovery.recover,
            "gpurt_gone": self.runtime.gone,
            "gpurt_silent": self.shuffles.abandoning.continues_without,
        }
        self.stream_handlers |= {
            READY_OP: self.runtime.is_ready,
            SEALED_OP: self.recovery.sealed,
            CONFIRM_RESULTS_OP: self.shuffles.results.confirmed,
            STATUS: self.handle_worker_status_change,
        }
        for plugin in self.plugins.values():
            for hook in ("transition", "remove_worker", "add_worker"):
                setattr(plugin, hook, self._recorded(getattr(plugin, hook)))
        self.memory_manager = ActiveMemoryManagerExtension(self, set(), register=False, start=False)

    def _recorded(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Record the errors of a hook, which Dask only logs."""

        def recorded(*args: Any, **options: Any) -> Any:
            try:
                return hook(*args, **options)
            except Exception as error:
                self._errors.append(error)
                raise

        return recorded

    def active(self) -> Iterable[Any]:
        """Return the active shuffles."""
        return list(self.extensions["shuffle"].active_shuffles)

    def balance(self, outputs: Collection[int], where: int) -> None:
        """Move outputs of one of the active shuffles to another worker, if that is possible now."""
        for shuffle in self.active():
            together = self.recovery._runs.sharing(shuffle)
            candidates = self.recovery._runs.candidates(*together)
            movable = self.recovery.movable(together).keys() & outputs
            if movable and candidates:
                to = dict.fromkeys(sorted(movable), candidates[where % len(candidates)])
                self.recovery.balance(together, to, "uneven outputs")
                return

    def want(self, graph: Any, wanted: Iterable[Any], released: Iterable[Any]) -> None:
        """Release keys on behalf of the client, and ask for others."""
        self.release(released)
        if wanted:
            self.submit(graph, wanted)

    def check_nothing_is_held(self) -> None:
        """Assert that no shuffle is remembered."""
        results, in_a_row = self.recovery._results, self.recovery._in_a_row
        for held in (
            self.recovery._losses,
            results._kept,
            results._read,
            results._shuffles_of,
            results._pending,
            results._producers,
            in_a_row._runs,
            in_a_row._missing,
            in_a_row._of,
            self.shuffles._in_a_row._runs,
            [keys for keys in self.shuffles.results._unconfirmed.values() if keys],
        ):
            assert not held, held
        assert not [name for name in self.clients if str(name).startswith("gpurt")]

    # ---- time ------------------------------------------------------------------------

    def _call_soon(self, function: Callable[..., Any], *args: Any) -> None:
        asyncio.get_running_loop().call_soon(function, *args)

    def _call_later(self, delay: float, function: Callable[..., Any], *args: Any) -> None:
        asyncio.get_running_loop().call_later(delay, function, *args)

    # ---- workers ---------------------------------------------------------------------

    def knows(self, process: Process) -> bool:
        """Return whether a process, and not only its address, is a worker."""
        return self.processes.get(process.address) is process

    def joins(self, process: ScheduledWorker) -> None:
        """Add a worker, which is about to report that the runtime is on."""
        self.processes[process.address] = process
        self.join(process.address, threads=1, memory=10**9, send=partial(self.wire.send, process))
        self.heartbeat(process.address, 1e8, {}, 0)
        process.batched_send({"op": READY_OP, "token": TOKEN})

    async def leaves(self, process: ScheduledWorker, *, close: bool = False) -> None:
        """Remove a worker whose connection has ended; ``close`` it, if it is alive."""
        for leaves in self.leaving:
            leaves(self.workers[process.address])
        del self.processes[process.address]
        await self.remove_worker(process.address, stimulus_id=f"left-{next(self._stimuli)}", close=close)

    def retire(self, process: ScheduledWorker) -> None:
        """Begin to retire a worker, as ``Scheduler.retire_workers`` does."""
        policy = RetireWorker(process.address)
        self.memory_manager.add_policy(policy)
        worker = self.workers[process.address]
        self.handle_worker_status_change(Status.closing_gracefully, worker, "retire")
        self.wire.send(process, {"op": STATUS, "status": "closing_gracefully", "stimulus_id": "retire"})
        self.wire.turns.spawn(self._track(policy, process))

    async def _track(self, policy: RetireWorker, process: ScheduledWorker) -> None:
        """Move the data of a retiring worker, and then close it: ``Scheduler._track_retire_worker``."""
        while not policy.done():
            self.memory_manager.run_once()
            await self.wire.turns.wait("the memory manager", self)
        if not self.knows(process):
            return
        if policy.no_recipients:
            self.wire.send(process, {"op": STATUS, "status": "running", "stimulus_id": "retire"})
        else:
            self.wire.send(process, {"op": "close"})

    def log_event(self, topic: Any, msg: Any) -> None:
        if topic == SHUFFLE_TOPIC:
            self.told.append(msg)

    def coerce_address(self, addr: Any, resolve: bool = True) -> str:
        return str(addr)

    def close(self) -> None:  # type: ignore[override]
        self.shuffles._patches.restore()


@contextmanager
def stable_hashes() -> Iterator[None]:
    """Make the order of sets independent of addresses in memory; `PYTHONHASHSEED` still matters."""

    def of_shard(incoming: IncomingShard) -> int:
        return hash((incoming.shard.producer.address, incoming.shard.id, incoming.shard.share))

    with (
        mock.patch.object(TaskState, "__hash__", lambda task: hash(task.key)),
        mock.patch.object(RetireWorker, "__hash__", lambda policy: hash(policy.address), create=True),
        mock.patch.object(IncomingShard, "__hash__", of_shard, create=True),
    ):
        yield
