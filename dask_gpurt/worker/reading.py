"""Let a worker's tasks read files while other tasks compute.

Decisions and their figures: ``docs/decisions/overlap.md`` and ``docs/decisions/partitions.md``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

from dask.system import CPU_COUNT
from dask.typing import Key
from distributed.sizeof import safe_sizeof
from distributed.worker_state_machine import StateMachineEvent

from dask_gpurt.config import ReadSettings
from dask_gpurt.dask_hooks import PatchSet, UnsupportedError
from dask_gpurt.dask_hooks.parquet_files import call_of
from dask_gpurt.dask_hooks.readers import PATH_READERS, STREAM_READERS, WRITERS, Readers
from dask_gpurt.dask_hooks.seams import READS
from dask_gpurt.dask_hooks.types import WorkerServer, WorkerTask
from dask_gpurt.dask_hooks.worker import (
    has_left_pool,
    is_closing,
    leave_slot,
    rejoin_pool,
    widen_pool,
    wrap_execute,
    wrap_submit,
)
from dask_gpurt.device import Device, Streams
from dask_gpurt.device.base import Beside
from dask_gpurt.device.discover import gpu_count, visible_gpus
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.reads.columns import Asked
from dask_gpurt.reads.policy import (
    BESIDE_ON_GPU,
    MAX_BESIDE,
    DetachedReads,
    ReadConcurrency,
    ReadTimes,
    ThreadTime,
)
from dask_gpurt.reads.turns import ComputeSlots, Turn
from dask_gpurt.worker import Layer
from dask_gpurt.worker.kept_reads import KeptColumns, Table, asked_of

#: Environment variable of kvikio and libcudf; libcudf reads it once, at its first read of a file.
NTHREADS = "KVIKIO_NTHREADS"
#: Environment variables by which users choose the number themselves.
GIVEN = frozenset({NTHREADS, "KVIKIO_NUM_THREADS"})
#: The default of libcudf, and the number beyond which reads were not faster in measurements.
MIN_THREADS, MAX_THREADS = 4, 32


@dataclass(eq=False)
class _Execution:
    """Describe one execution of a task.

    ``begins_with_read``: whether the first function that it calls is a reader, which has not returned yet.
    ``ends_with_write``: whether the last function that it calls is a writer.
    ``turn``: its turn to run user code.
    ``is_reading``: whether its thread is inside a reader. Readers may call each other.
    ``asked``: what its call of cudf's reader asks for, until that calls libcudf's.
    ``tables``: what its calls of cudf's reader have read within one of Dask's; None where that is not known.
    ``computed_s``: CPU time of its thread, in seconds.
    """

    key: Key
    reads: WorkerReads
    begins_with_read: bool
    ends_with_write: bool
    turn: Turn
    is_reading: bool = False
    asked: Asked | None = None
    tables: list[Table | None] = field(default_factory=list)
    times: ReadTimes = field(default_factory=ReadTimes)
    computed_s: float = 0.0


#: The execution of the current coroutine, from which Dask submits the task to a thread.
_handed_over: ContextVar[_Execution | None] = ContextVar("gpurt-reads", default=None)


class _Thread(threading.local):
    """Hold the execution that the current thread runs."""

    execution: _Execution | None = None


_thread = _Thread()


class WorkerReads:
    """Let a worker start tasks ahead, which read, and limit the tasks that run user code at once.

    ``worker``: the Dask worker; its ``execute`` and its thread pool are wrapped on the instances. Readers and
    writers are wrapped for the whole process; calls from other workers' tasks pass through.
    ``columns``: keeps columns that are read on streams of a device; None to keep none.
    """

    def __init__(
        self,
        worker: WorkerServer,
        device: Device,
        settings: ReadSettings,
        metrics: Metrics,
        columns: KeptColumns | None = None,
    ) -> None:
        self._worker = worker
        #: The device, if it has streams beside that of user code.
        self.streams = device if isinstance(device, Streams) else None
        self.columns = columns if self.streams is not None else None
        self._metrics = metrics
        least = 0 if device.on_host else BESIDE_ON_GPU
        #: Learns how many tasks should leave their slot; None if the settings fix the number.
        self._concurrency = ReadConcurrency(least) if settings.beside is None else None
        self._most = MAX_BESIDE if settings.beside is None else settings.beside
        self._aside = DetachedReads(least if settings.beside is None else settings.beside)
        self._patches, self._submit_patch = PatchSet(Layer.READS), PatchSet(Layer.READS)
        self._undo = ExitStack()
        self._refused = partial(metrics.fallback, Fallback.READS_KEEP_SLOT)
        self.share_stream = partial(metrics.fallback, Fallback.READS_SHARE_STREAM)
        self._not_kept = partial(metrics.fallback, Fallback.READS_NOT_KEPT)
        self.count_stream = partial(metrics.add, "reads.streams")
        self.turns = ComputeSlots(worker.state.nthreads, partial(has_left_pool, worker), metrics)
        #: Tasks that have started before, and so run without turns.
        self._without_turn: set[WorkerTask] = set()

    def install(self) -> None:
        """Apply to all tasks that start from now on. On the event loop."""
        if not self._most:
            return
        try:
            READS.require()
            self._undo.callback(widen_pool(self._worker, self._most))
        except UnsupportedError as error:
            self._refused(str(error))
            return
        self._without_turn = set(self._worker.state.executing)
        self._readers = Readers(self._patches, _by(WorkerReads.read), self._refused)
        self._writers = Readers(self._patches, _by(WorkerReads.write), self._refused, WRITERS)
        wrapped = STREAM_READERS if self.streams is not None else ()
        self._stream_readers = Readers(self._patches, _on_own_stream, self.share_stream, wrapped)
        by_path = PATH_READERS if self.columns is not None else ()
        self._path_readers = Readers(self._patches, _noting, self._not_kept, by_path)
        for readers in (self._readers, self._writers, self._stream_readers, self._path_readers):
            readers.wrap_imported()
        self._execute = self._worker.execute
        wrap_execute(self._patches, self._worker, lambda original: self.execute)
        wrap_submit(self._submit_patch, self._worker, lambda submit: partial(self._submit, submit))

    def uninstall(self) -> None:
        """Start no more tasks ahead. On the event loop; tasks that have started still take turns."""
        self._patches.restore()
        self._most = self._aside.limit = 0
        if is_closing(self._worker):
            self.turns.close()
        self._give_pool_back()

    def _give_pool_back(self) -> None:
        """Restore Dask's pool once the runtime is off and no tasks have started beyond the worker's slots."""
        if not self._most and not self._aside.count:
            self._submit_patch.restore()
            self._undo.close()

    def is_aside(self, key: Key) -> bool:
        """Return whether a task has left its slot for a read, and has not ended."""
        return key in self._aside

    def report(self) -> dict[str, Any]:
        """Return the current settings of this worker, as plain values."""
        threads = os.environ.get(NTHREADS)
        return {"beside": self._aside.limit, "threads": threads and int(threads)}

    # ---- on the event loop -------------------------------------------------------------------------

    async def execute(self, key: Key, *, stimulus_id: str) -> StateMachineEvent:
        """Run a task, and track its reads."""
        execution = _Execution(key, self, *self._reads_and_writes(self._worker.state.tasks[key]), Turn(key))
        token = _handed_over.set(execution)
        try:
            return await self._execute(key, stimulus_id=stimulus_id)
        finally:
            _handed_over.reset(token)
            self._leave_slot(self._aside.end(key))
            self._learn(execution)
            self._give_pool_back()

    def _reads_and_writes(self, task: WorkerTask) -> tuple[bool, bool]:
        """Return whether a task begins by calling a reader, and whether it ends by calling a writer."""
        try:
            self._stream_readers.wrap_imported()
            self._path_readers.wrap_imported()
            spec = task.run_spec
            return self._readers.begins_with_read(spec), self._writers.ends_with_write(spec)
        # A task may call anything. If this raised out of `execute`, Dask would wait forever for its event.
        except Exception as error:
            self._refused(repr(error))
            return False, False

    def _learn(self, execution: _Execution) -> None:
        """Update the number of tasks that may leave their slot from a task that has ended."""
        if self._concurrency is None or not self._most:
            return
        self._concurrency.note(execution.times, execution.computed_s)
        if self._concurrency.beside != self._aside.limit:
            self._aside.limit = self._concurrency.beside
            while (key := self._aside.next()) is not None:
                self._leave_slot(key)

    def _make_way(self, key: Key) -> None:
        self._without_turn &= self._worker.state.executing
        if not self._without_turn:
            self._leave_slot(self._aside.add(key))

    def _leave_slot(self, key: Key | None) -> None:
        """Have a task leave its slot, or the next candidate if that task was cancelled."""
        while key is not None and self._most:
            if leave_slot(self._worker, key):
                self._metrics.add("reads.aside")
                return
            key = self._aside.end(key)

    # ---- on threads of tasks -----------------------------------------------------------------------

    def _submit(
        self, submit: Callable[..., Any], function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Submit a function to the worker's pool: of Dask for a task, or of the user from within a task."""
        running, execution = _thread.execution, _handed_over.get()
        if running is not None and running.reads is self and rejoin_pool(self._worker):
            self.turns.queue(running.turn)
            self.turns.wait(running.turn)
            return submit(function, *args, **kwargs)
        if running is not None or execution is None or execution.reads is not self:
            turn = Turn("a function submitted to the pool")
            run = partial(self._run_other, turn, function)
        else:
            turn = execution.turn
            run = partial(self._run, execution, function)
        self.turns.queue(turn)
        try:
            future = submit(run, *args, **kwargs)
        except BaseException:
            self.turns.end(turn)
            raise
        future.add_done_callback(lambda _: self.turns.end(turn))  # also if it is cancelled before it runs
        return future

    def _run(self, execution: _Execution, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a task's function on its thread, once it has its turn or if it begins with a read."""
        if not execution.begins_with_read:
            self._wait(execution)
        _thread.execution = execution
        before = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            execution.computed_s = time.thread_time() - before
            _thread.execution = None

    def _run_other(self, turn: Turn, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.turns.wait(turn)
        return function(*args, **kwargs)

    def _wait(self, execution: _Execution) -> None:
        """Wait for the turn of a task; meanwhile other tasks may start, and read."""
        if not self.turns.is_held(execution.turn):
            self._start_next(execution)
        self.turns.wait(execution.turn)

    def _start_next(self, execution: _Execution) -> None:
        self._worker.loop.add_callback(self._make_way, execution.key)

    def read(self, execution: _Execution, reader: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a reader, without waiting for a turn if no user code can have run before."""
        if not execution.begins_with_read:
            return self._read(execution, reader, *args, **kwargs)
        if self._worker.state.ready:
            self._start_next(execution)
        result = self._read(execution, reader, *args, **kwargs)
        execution.begins_with_read = False
        self._wait(execution)
        return result

    def _read(self, execution: _Execution, reader: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what a reader would; without a read that could wait for files if all columns are kept."""
        columns, streams = self.columns, self.streams
        call = None if columns is None else call_of(args, kwargs)
        if columns is not None and streams is not None and call is not None:
            with self.turns.reading(execution.turn):
                found = columns.frame(call, streams.beside)
            if found is not None:
                self.count_stream()
                return found
        if execution.begins_with_read:
            self._start_next(execution)
        try:
            result = self._timed(execution, reader, *args, **kwargs)
            if columns is not None and call is not None:
                columns.made(call, execution.tables, result)
        finally:
            execution.tables.clear()
        return result

    def write(self, execution: _Execution, writer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a writer, without a turn if no user code can run afterwards."""
        if execution.ends_with_write:
            self.turns.end(execution.turn)
            self._start_next(execution)
        return self._timed(execution, writer, *args, **kwargs)

    def _timed(self, execution: _Execution, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a reader or writer, and measure it."""
        execution.is_reading = True
        try:
            with self.turns.reading(execution.turn):
                before = ThreadTime.now()
                result = function(*args, **kwargs)
                times = ThreadTime.now().since(before)
        finally:
            execution.is_reading = False
        if self._concurrency is not None:
            execution.times.add(*times, safe_sizeof(result))
        return result


def _by(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper for readers or writers that passes their calls by tasks to a method of WorkerReads."""

    def wrap(reader: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(reader)
        def read(*args: Any, **kwargs: Any) -> Any:
            execution = _thread.execution
            if execution is None or execution.is_reading:
                return reader(*args, **kwargs)
            return method(execution.reads, execution, reader, *args, **kwargs)

        return read

    return wrap


def _noting(read_parquet: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap cudf's reader, which has what libcudf's cannot tell of its options, so that columns are kept."""

    @wraps(read_parquet)
    def read(*args: Any, **kwargs: Any) -> Any:
        execution = _thread.execution
        if execution is None or not execution.is_reading or execution.reads.columns is None:
            return read_parquet(*args, **kwargs)
        execution.asked = asked_of(*args, **kwargs)
        execution.tables.append(None)
        try:
            return read_parquet(*args, **kwargs)
        finally:
            execution.asked = None

    return read


def _on_own_stream(read_parquet: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap libcudf's reader, so that it does not use the stream of the tasks that compute beside it."""

    @wraps(read_parquet)
    def read(options: Any, stream: Any = None, mr: Any = None, *args: Any, **kwargs: Any) -> Any:
        execution = _thread.execution
        given = stream is not None or mr is not None
        streams = None if execution is None or not execution.is_reading else execution.reads.streams
        if given or execution is None or streams is None:
            return read_parquet(options, stream, mr, *args, **kwargs)
        try:
            beside = streams.beside()
        except Exception as error:  # whatever CUDA raises: without a stream of its own it can still read
            execution.reads.share_stream(str(error))
            return read_parquet(options, stream, mr, *args, **kwargs)
        plainly = partial(read_parquet, options, beside.stream, mr, *args, **kwargs)
        if (found := _of_columns(execution, options, plainly, beside)) is not None:
            return found
        found = plainly()
        try:
            beside.join(found.columns)
        except TypeError as error:
            execution.reads.share_stream(str(error))
            return read_parquet(options, stream, mr, *args, **kwargs)
        execution.reads.count_stream()
        return found

    return read


def _of_columns(execution: _Execution, options: Any, plainly: Callable[[], Any], beside: Beside) -> Any:
    """Return what a reader of libcudf would, through the cache of columns; None if it has to be called."""
    asked, kept = execution.asked, execution.reads.columns
    execution.asked = None

    def note(table: Table) -> None:
        execution.tables[-1] = table

    if asked is None or kept is None or (found := kept.read(asked, options, plainly, beside, note)) is None:
        return None
    execution.reads.count_stream()
    return found


def set_reader_threads(setting: int | None) -> Callable[[], None]:
    """Set libcudf's number of reader threads, unless the user has; return a function that undoes this."""
    if GIVEN & os.environ.keys():
        return lambda: None
    if setting is None:
        named = visible_gpus()
        gpus = gpu_count() if named is None else len(named)
        setting = threads_of(CPU_COUNT, len(os.sched_getaffinity(0)), gpus)
    return set_threads(setting)


def threads_of(cores: int, allowed: int, gpus: int) -> int:
    """Return the number of threads with which a GPU worker reads files.

    ``cores``, ``allowed``: cores that this container may use, and those of them that this process is bound
    to: dask-cuda binds workers to the cores near their GPU, which several GPUs may share.
    ``gpus``: GPUs of the host in use by workers.

    Examples
    --------
    >>> threads_of(128, 64, 8), threads_of(16, 16, 1), threads_of(8, 8, 8)
    (16, 16, 4)
    """
    return min(MAX_THREADS, max(MIN_THREADS, min(allowed, cores // max(1, gpus))))


def set_threads(threads: int) -> Callable[[], None]:
    """Set the number of threads for libraries of this process that have not read a file yet.

    Returns a function that restores the variable. Libraries that have read it are not affected.
    """
    before = os.environ.get(NTHREADS)
    os.environ[NTHREADS] = str(threads)

    def restore() -> None:
        if before is None:
            os.environ.pop(NTHREADS, None)
        else:
            os.environ[NTHREADS] = before

    return restore
