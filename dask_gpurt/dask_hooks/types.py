"""Export the tasks of graphs, and declare the used members of Dask's workers and schedulers as protocols.

mypy checks the protocols.

Each protocol names Dask's class and lists the members that the runtime uses. Read-only attributes are
properties, so that test doubles may compute them. The functions at the end make mypy fail if a type in Dask
differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Reversible, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import distributed
    from dask.typing import Key
    from distributed import scheduler, worker_memory, worker_state_machine
    from distributed.core import Status
    from distributed.shuffle._core import SchedulerShuffleState, ShuffleId
    from distributed.shuffle._scheduler_plugin import ShuffleSchedulerPlugin
    from distributed.worker_state_machine import StateMachineEvent
    from tornado.ioloop import IOLoop, PeriodicCallback
from dask._task_spec import Alias, GraphNode, Task, TaskRef, convert_legacy_graph
from dask.dataframe.core import _concat as concat
from dask.dataframe.groupby import _compute_sum_of_squares as sum_of_squares
from dask.dataframe.groupby import _groupby_raise_unaligned as group_aligned
from dask.dataframe.multi import merge_chunk

# ---- on a worker -----------------------------------------------------------------------------------


class WorkerTask(Protocol):
    """Type a task on a worker: ``distributed.worker_state_machine.TaskState``."""

    priority: tuple[int, ...] | None

    @property
    def key(self) -> Key: ...
    @property
    def run_id(self) -> int: ...
    @property
    def metadata(self) -> dict[str, Any]: ...  # sent to the scheduler with the end of the task
    @property
    def run_spec(self) -> Any: ...
    @property
    def state(self) -> str: ...
    @property
    def nbytes(self) -> int | None: ...
    @property
    def dependencies(self) -> AbstractSet[WorkerTask]: ...
    @property
    def dependents(self) -> AbstractSet[WorkerTask]: ...
    @property
    def waiting_for_data(self) -> AbstractSet[WorkerTask]: ...
    @property
    def coming_from(self) -> str | None: ...  # the worker that it is fetched from
    @property
    def startstops(self) -> Sequence[Any]: ...  # with "action", "start" and "stop", the latest last
    @property
    def start_time(self) -> float | None: ...  # when it was submitted to a thread
    def get_nbytes(self) -> int: ...


class WorkerStateMachine(Protocol):
    """Type the tasks of a worker and their order: ``distributed.worker_state_machine.WorkerState``."""

    data: MutableMapping[Key, object]
    nbytes: int

    @property
    def address(self) -> str: ...
    @property
    def nthreads(self) -> int: ...
    @property
    def tasks(self) -> Mapping[Key, WorkerTask]: ...
    @property
    def ready(self) -> Any: ...  # a HeapSet of Dask's own TaskState, to which WorkerTask cannot be added
    @property
    def data_needed(self) -> Any: ...  # such a HeapSet for each worker
    @property
    def constrained(self) -> Any: ...  # such a HeapSet
    @property
    def running(self) -> bool: ...
    @property
    def executing(self) -> AbstractSet[WorkerTask]: ...
    @property
    def long_running(self) -> AbstractSet[WorkerTask]: ...
    @property
    def waiting(self) -> AbstractSet[WorkerTask]: ...
    @property
    def in_flight_tasks(self) -> AbstractSet[WorkerTask]: ...
    @property
    def missing_dep_flight(self) -> AbstractSet[WorkerTask]: ...
    @property
    def in_flight_workers(self) -> Mapping[str, AbstractSet[Key]]: ...
    @property
    def busy_workers(self) -> AbstractSet[str]: ...


class MemoryManager(Protocol):
    """Type the memory limits of a worker: ``distributed.worker_memory.WorkerMemoryManager``."""

    data: MutableMapping[Key, object]
    memory_limit: int | None
    memory_target_fraction: float | Literal[False]
    memory_spill_fraction: float | Literal[False]
    memory_pause_fraction: float | Literal[False]


class Monitor(Protocol):
    """Type the measurements of a process: ``distributed.system_monitor.SystemMonitor``."""

    def get_process_memory(self) -> int: ...


class Stream(Protocol):
    """Type an ordered stream of messages: ``distributed.batched.BatchedSend``."""

    interval: float

    def send(self, *messages: Any) -> None: ...


class WorkerServer(Protocol):
    """Type a worker: ``distributed.Worker``."""

    metrics: dict[str, Callable[[Any], Any]]
    scheduler_delay: float
    rpc: Any  # called with an address; its attributes are the handlers of that worker

    @property
    def address(self) -> str: ...
    @property
    def threads(self) -> Mapping[Key, int]: ...  # the thread of a task that has run
    @property
    def active_threads(self) -> Mapping[int, Key]: ...  # the task of a thread that is running one
    @property
    def status(self) -> Status: ...
    @property
    def state(self) -> WorkerStateMachine: ...
    @property
    def data(self) -> MutableMapping[Key, object]: ...
    @property
    def memory_manager(self) -> MemoryManager: ...
    @property
    def monitor(self) -> Monitor: ...
    @property
    def local_directory(self) -> str: ...
    @property
    def loop(self) -> IOLoop: ...
    @property
    def scheduler(self) -> Any: ...  # its attributes are the scheduler's handlers
    @property
    def plugins(self) -> MutableMapping[str, Any]: ...
    @property
    def executors(self) -> MutableMapping[str, Executor]: ...
    @property
    def handlers(self) -> MutableMapping[str, Callable[..., Any]]: ...
    @property
    def stream_handlers(self) -> MutableMapping[str, Callable[..., Any]]: ...
    @property
    def periodic_callbacks(self) -> Mapping[str, PeriodicCallback]: ...
    @property
    def batched_stream(self) -> Stream: ...
    @property
    def transfer_outgoing_count(self) -> int: ...
    @property
    def transfer_outgoing_bytes_total(self) -> int: ...
    @property
    def digests_total(self) -> Mapping[Any, float]: ...
    @property
    def transfer_incoming_log(self) -> Reversible[Mapping[str, Any]]: ...
    def handle_stimulus(self, *stims: StateMachineEvent) -> None: ...
    async def execute(self, key: Key, *, stimulus_id: str) -> StateMachineEvent: ...
    async def gather_dep(
        self, worker: str, to_gather: Collection[Key], total_nbytes: int, *, stimulus_id: str
    ) -> StateMachineEvent: ...


class ActiveRun(Protocol):
    """Type a run on a worker: ``distributed.shuffle._core.ShuffleRun``, or the runtime's."""

    closed: bool


# ---- on the scheduler ------------------------------------------------------------------------------


class TaskPrefix(Protocol):
    """Type the tasks with one prefix: ``distributed.scheduler.TaskPrefix``."""

    @property
    def name(self) -> str: ...
    @property
    def duration_average(self) -> float: ...
    @property
    def nbytes_total(self) -> int: ...
    @property
    def states(self) -> Mapping[Any, int]: ...


class SchedulerTask(Protocol):
    """Type a task on the scheduler: ``distributed.scheduler.TaskState``."""

    retries: int
    host_restrictions: set[str] | None

    @property
    def key(self) -> Key: ...
    @property
    def run_id(self) -> int | None: ...
    @property
    def metadata(self) -> dict[str, Any] | None: ...
    @property
    def state(self) -> str: ...
    @property
    def run_spec(self) -> Any: ...
    @property
    def priority(self) -> tuple[float, ...] | None: ...
    @property
    def actor(self) -> bool: ...
    @property
    def prefix(self) -> TaskPrefix: ...
    @property
    def dependencies(self) -> AbstractSet[SchedulerTask]: ...
    @property
    def dependents(self) -> AbstractSet[SchedulerTask]: ...
    @property
    def waiters(self) -> AbstractSet[SchedulerTask] | None: ...
    @property
    def who_has(self) -> AbstractSet[WorkerState] | None: ...
    @property
    def who_wants(self) -> Collection[ClientState] | None: ...
    @property
    def waiting_on(self) -> AbstractSet[SchedulerTask] | None: ...
    @property
    def processing_on(self) -> WorkerState | None: ...
    @property
    def worker_restrictions(self) -> AbstractSet[str] | None: ...
    @property
    def resource_restrictions(self) -> Mapping[str, float] | None: ...
    @property
    def loose_restrictions(self) -> bool: ...
    def get_nbytes(self) -> int: ...


class WorkerState(Protocol):
    """Type a worker on the scheduler: ``distributed.scheduler.WorkerState``."""

    @property
    def address(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def name(self) -> Any: ...
    @property
    def status(self) -> Status: ...
    @property
    def last_seen(self) -> float: ...
    @property
    def nthreads(self) -> int: ...
    @property
    def memory_limit(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def occupancy(self) -> float: ...
    @property
    def metrics(self) -> Mapping[str, Any]: ...
    @property
    def processing(self) -> Collection[SchedulerTask]: ...
    @property
    def has_what(self) -> Collection[SchedulerTask]: ...
    @property
    def needs_what(self) -> Mapping[Any, int]: ...
    @property
    def task_prefix_count(self) -> Mapping[str, int]: ...


class ClientState(Protocol):
    """Type a client on the scheduler: ``distributed.scheduler.ClientState``."""

    @property
    def client_key(self) -> str: ...
    @property
    def wants_what(self) -> AbstractSet[SchedulerTask]: ...


class SchedulerState(Protocol):
    """Type the tasks and workers of a cluster, and their transitions.

    This is the part of ``distributed.Scheduler`` without a server, so that simulations can provide it.
    """

    @property
    def tasks(self) -> Mapping[Key, SchedulerTask]: ...
    @property
    def workers(self) -> Mapping[str, WorkerState]: ...
    @property
    def running(self) -> AbstractSet[WorkerState]: ...
    @property
    def idle_task_count(self) -> set[Any]: ...
    @property
    def queued(self) -> Any: ...
    @property
    def unrunnable(self) -> Collection[SchedulerTask]: ...
    @property
    def task_prefixes(self) -> Mapping[str, Any]: ...
    @property
    def bandwidth(self) -> float: ...
    @property
    def extensions(self) -> MutableMapping[str, Any]: ...
    def check_idle_saturated(self, ws: Any, occ: float = -1.0) -> None: ...
    def valid_workers(self, ts: Any) -> Any: ...
    def stimulus_queue_slots_maybe_opened(self, *, stimulus_id: str) -> None: ...
    def transitions(self, recommendations: dict[Key, Any], stimulus_id: str) -> None: ...


class SchedulerServer(SchedulerState, Protocol):
    """Type a scheduler: ``distributed.Scheduler``."""

    @property
    def plugins(self) -> MutableMapping[str, Any]: ...
    @property
    def worker_plugins(self) -> MutableMapping[str, bytes]: ...
    @property
    def handlers(self) -> MutableMapping[str, Callable[..., Any]]: ...
    @property
    def stream_handlers(self) -> MutableMapping[str, Callable[..., Any]]: ...
    @property
    def stream_comms(self) -> Mapping[str, Stream]: ...
    @property
    def host_info(self) -> Mapping[str, Mapping[str, Any]]: ...
    @property
    def clients(self) -> MutableMapping[str, Any]: ...
    @property
    def loop(self) -> IOLoop: ...
    @property
    def rpc(self) -> Any: ...
    @property
    def computations(self) -> Collection[Any]: ...  # the last ones, oldest first
    def client_desires_keys(self, keys: Collection[Key], client: str) -> None: ...
    def client_releases_keys(self, keys: Collection[Key], client: str, stimulus_id: str) -> None: ...
    def send_all(self, client_msgs: Any, worker_msgs: Any) -> None: ...
    def log_event(self, topic: str | Collection[str], msg: Any) -> None: ...
    def get_events(self, topic: str) -> tuple[tuple[float, Any], ...]: ...
    def add_plugin(self, plugin: Any, *, name: str | None = None) -> None: ...
    def add_replica(self, ts: Any, ws: Any) -> None: ...
    def remove_replica(self, ts: Any, ws: Any) -> None: ...
    def handle_worker_status_change(self, status: Any, worker: Any, stimulus_id: str) -> None: ...
    def coerce_hostname(self, host: str) -> str: ...
    def set_restrictions(self, worker: dict[Key, Collection[str] | str | None]) -> None: ...
    async def broadcast(
        self, *, msg: dict[str, Any], workers: list[str] | None = None, on_error: Any = "raise"
    ) -> dict[str, Any]: ...


class ShuffleExtension(Protocol):
    """Type the shuffles of a scheduler: ``distributed.shuffle._scheduler_plugin.ShuffleSchedulerPlugin``."""

    @property
    def active_shuffles(self) -> dict[ShuffleId, SchedulerShuffleState[Any]]: ...
    @property
    def heartbeats(self) -> Mapping[ShuffleId, dict[str, Any]]: ...
    @property
    def _shuffles(self) -> Mapping[ShuffleId, AbstractSet[SchedulerShuffleState[Any]]]: ...
    def _set_restriction(self, ts: Any, worker: str) -> None: ...
    def _unset_restriction(self, ts: Any) -> None: ...
    def _restart_shuffle(self, id: ShuffleId, scheduler: Any, *, stimulus_id: str) -> None: ...
    def _fail_on_workers(self, shuffle: SchedulerShuffleState[Any], message: str) -> None: ...
    def _clean_on_scheduler(self, id: ShuffleId, stimulus_id: str) -> None: ...


# ---- compared with Dask's own ----------------------------------------------------------------------

if TYPE_CHECKING:

    def _worker(of_dask: distributed.Worker) -> WorkerServer:
        return of_dask

    def _state_machine(of_dask: worker_state_machine.WorkerState) -> WorkerStateMachine:
        return of_dask

    def _worker_task(of_dask: worker_state_machine.TaskState) -> WorkerTask:
        return of_dask

    def _memory_manager(of_dask: worker_memory.WorkerMemoryManager) -> MemoryManager:
        return of_dask

    def _scheduler(of_dask: distributed.Scheduler) -> SchedulerServer:
        return of_dask

    def _task_prefix(of_dask: scheduler.TaskPrefix) -> TaskPrefix:
        return of_dask

    def _scheduler_task(of_dask: scheduler.TaskState) -> SchedulerTask:
        return of_dask

    def _client_state(of_dask: scheduler.ClientState) -> ClientState:
        return of_dask

    def _shuffle_extension(of_dask: ShuffleSchedulerPlugin) -> ShuffleExtension:
        return of_dask

    def _worker_state(of_dask: scheduler.WorkerState) -> WorkerState:
        return of_dask


__all__ = [
    "Alias",
    "GraphNode",
    "Task",
    "TaskRef",
    "concat",
    "convert_legacy_graph",
    "group_aligned",
    "merge_chunk",
    "sum_of_squares",
]
