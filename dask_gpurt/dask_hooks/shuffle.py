"""Re-export, call and replace private parts of Dask's p2p shuffles."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dask.array.core import concatenate3
from dask.array.rechunk import old_to_new as _old_to_new
from distributed import Reschedule
from distributed.shuffle import _scheduler_plugin, _shuffle
from distributed.shuffle._core import (
    P2PBarrierTask,
    SchedulerShuffleState,
    ShuffleId,
    ShuffleRun,
    ShuffleRunSpec,
    ShuffleSpec,
    barrier_key,
    get_worker_plugin,
    id_from_key,
)
from distributed.shuffle._exceptions import P2PConsistencyError, P2POutOfDiskError, ShuffleClosedError
from distributed.shuffle._rechunk import ArrayRechunkSpec
from distributed.shuffle._shuffle import DataFrameShuffleSpec
from distributed.shuffle._shuffle import _get_worker_for_range_sharding as worker_for_range_sharding
from distributed.shuffle._worker_plugin import ShuffleWorkerPlugin

from dask_gpurt.dask_hooks.patch import PatchSet, Wrap
from dask_gpurt.dask_hooks.seams import BAGS, RUN_LOOKUP, SCHEDULER_SHUFFLES
from dask_gpurt.dask_hooks.types import SchedulerServer, SchedulerTask, ShuffleExtension

#: Also what is defined here.
__all__ = [
    "ArrayRechunkSpec",
    "DataFrameShuffleSpec",
    "P2PBarrierTask",
    "P2PConsistencyError",
    "SchedulerShuffleState",
    "ShuffleClosedError",
    "ShuffleId",
    "ShuffleRunSpec",
    "ShuffleSpec",
    "ShuffleWorkerPlugin",
    "barrier_key",
    "id_from_key",
    "worker_for_range_sharding",
]


#: A run on the scheduler. The ids of its outputs are of any type.
RunState = SchedulerShuffleState[Any]


# ---- on the scheduler ------------------------------------------------------------------------------


def replace_on_extension(patches: PatchSet, extension: ShuffleExtension, wraps: Mapping[str, Wrap]) -> None:
    """Replace methods of the scheduler's shuffle extension, whose signatures are in the seams.

    Raises UnsupportedError if one of the methods differs from the known one.
    """
    patches.replace_all({SCHEDULER_SHUFFLES[name]: wrap for name, wrap in wraps.items()}, on=extension)


def runs_of(extension: ShuffleExtension, shuffle_id: ShuffleId) -> Iterable[RunState]:
    """Return all runs of a shuffle that the scheduler knows, including those that have ended."""
    return extension._shuffles.get(shuffle_id, ())


#: What Dask logs as warnings of each run that begins or ends, with the id of its shuffle as first argument.
_ORDINARY = ("Shuffle %s initialized by", "Shuffle %s deactivated due to")


def silence(is_silent: Callable[[ShuffleId], bool]) -> Callable[[], None]:
    """Keep the ordinary begins and ends of shuffles out of Dask's log; return a function that undoes this."""

    def is_logged(record: logging.LogRecord) -> bool:
        if not isinstance(record.args, tuple) or not record.msg.startswith(_ORDINARY):
            return True
        return not is_silent(ShuffleId(str(record.args[0])))

    _scheduler_plugin.logger.addFilter(is_logged)
    return lambda: _scheduler_plugin.logger.removeFilter(is_logged)


def set_restriction(extension: ShuffleExtension, task: SchedulerTask, worker: str) -> None:
    """Restrict an output task to a worker, such that the extension removes the restriction by itself."""
    extension._set_restriction(task, worker)


def name_workers(scheduler: SchedulerServer, task: SchedulerTask) -> None:
    """Replace a task's restriction to hosts by one to the workers on these hosts.

    Dask runs a task that is restricted to hosts and to a worker on the union of both. So an output would not
    stay with its owner: it could be scheduled anywhere on the host, be sent back to the owner, and so on
    forever.
    """
    if not task.host_restrictions:
        return
    names = set(map(scheduler.coerce_hostname, task.host_restrictions))
    there = {
        address for name in names & scheduler.host_info.keys() for address in _addresses(scheduler, name)
    }
    if there:
        scheduler.set_restrictions({task.key: there | (task.worker_restrictions or set())})
        task.host_restrictions = None


def _addresses(scheduler: SchedulerServer, host: str) -> Iterable[str]:
    addresses: Iterable[str] = scheduler.host_info[host]["addresses"]
    return addresses


def restrict_again(extension: ShuffleExtension, task: SchedulerTask, worker: str | None) -> None:
    """Restrict an output task to another worker, or with None only as its user has."""
    extension._unset_restriction(task)
    if worker is not None:
        extension._set_restriction(task, worker)


def restart(
    extension: ShuffleExtension, scheduler: SchedulerServer, shuffle_id: ShuffleId, stimulus_id: str
) -> None:
    """Restart a shuffle."""
    extension._restart_shuffle(shuffle_id, scheduler, stimulus_id=stimulus_id)


def end_run(extension: ShuffleExtension, run: RunState, message: str, stimulus_id: str) -> None:
    """End a run; its tasks fail on all workers with a message."""
    extension._fail_on_workers(run, message)
    extension._clean_on_scheduler(run.id, stimulus_id)


def restart_without(
    extension: ShuffleExtension, scheduler: SchedulerServer, run: RunState, message: str, stimulus_id: str
) -> None:
    """End a run on all workers with a message, and restart its shuffle."""
    end_run(extension, run, message, stimulus_id)
    restart(extension, scheduler, run.id, stimulus_id)


# ---- on a worker -----------------------------------------------------------------------------------


def active_runs(plugin: ShuffleWorkerPlugin) -> Mapping[ShuffleId, ShuffleRun[Any, Any]]:
    """Return the active runs of a worker's shuffle plugin, by shuffle. This is the live mapping."""
    runs: Mapping[ShuffleId, ShuffleRun[Any, Any]] = plugin.shuffle_runs._active_runs
    return runs


async def run_barrier(shuffle_id: ShuffleId, *run_ids: int) -> int:
    """Run the barrier of a shuffle on the event loop of its worker. Called by a task, in place of Dask's.

    Dask awaits tasks that are coroutines, without a thread. Its own function blocks one until the event loop
    has run the barrier.

    ``run_ids``: the results of the transfers.
    Raises RuntimeError as Dask's function does, for every error except those that Dask handles by itself.
    """
    try:
        run_id: int = await get_worker_plugin()._barrier(shuffle_id, run_ids)
    except (Reschedule, P2PConsistencyError, P2POutOfDiskError):
        raise
    except Exception as error:
        raise RuntimeError(f"P2P {shuffle_id} failed during barrier phase") from error
    return run_id


#: Marks an exception that what was done to rows has raised, and not the protocol.
_OF_DATA = "_gpurt_of_data"


@contextmanager
def errors_of_data() -> Iterator[None]:
    """Have :func:`transfer` and :func:`shuffle_unpack` raise what the body raises as it is."""
    try:
        yield
    except Exception as error:
        setattr(error, _OF_DATA, True)
        raise


def transfer(data: Any, shuffle_id: ShuffleId, partition: int) -> Any:
    """Transfer an input partition to a run. Called by a task, on its worker."""
    return _keeping_types(_shuffle.shuffle_transfer, data, shuffle_id, partition)


def shuffle_unpack(shuffle_id: ShuffleId, partition: int, run_id: int) -> Any:
    """Return an output partition of a run. Called by a task, on its worker; has the name of Dask's."""
    return _keeping_types(_shuffle.shuffle_unpack, shuffle_id, partition, run_id)


def _keeping_types(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of Dask, which raises RuntimeErrors only.

    Errors of data are raised as they were, and every lack of memory as a MemoryError.
    """
    try:
        return function(*args)
    except RuntimeError as error:
        cause = error.__cause__
        if cause is None or not (hasattr(cause, _OF_DATA) or isinstance(cause, MemoryError)):
            raise
    raise cause  # with its own causes only


def output_of(shuffle_id: ShuffleId, run_id: int, partition: int) -> Any:
    """Return an output partition of a run. Called by a task, on its worker."""
    return get_worker_plugin().get_output_partition(shuffle_id, run_id, partition)


def replace_run_lookup(patches: PatchSet, plugin: ShuffleWorkerPlugin, find: Wrap) -> None:
    """Replace the lookup of runs by a worker's tasks.

    ``find``: wraps ``get_or_create_shuffle(shuffle_id)`` and ``get_shuffle_run(shuffle_id, run_id)``; called
    on the threads of tasks.
    Raises UnsupportedError if one of the two differs from the known one; then none is replaced.
    """
    patches.replace_all(dict.fromkeys(RUN_LOOKUP.seams, find), on=plugin)


def keep_barriers_in_bags(patches: PatchSet) -> None:
    """Leave barriers as they are when the graph of a bag is optimised, in the process that makes graphs.

    Dask rebuilds each task as a plain one, without the spec of its shuffle: its own p2p fails too.

    Raises UnsupportedError if Dask's function differs from the known one.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def lazify_task(task: Any, start: bool = True) -> Any:
            return task if isinstance(task, P2PBarrierTask) else original(task, start)

        return lazify_task

    patches.replace(BAGS["lazify_task"], wrap)


# ---- chunks of arrays ------------------------------------------------------------------------------


def old_to_new(
    old: tuple[tuple[float, ...], ...], new: tuple[tuple[float, ...], ...]
) -> list[list[list[tuple[int, slice]]]]:
    """Return for each axis and new chunk the old chunks that it consists of, with a slice of each."""
    found: list[list[list[tuple[int, slice]]]] = _old_to_new(old, new)
    return found


def concatenate(arrays: list[Any]) -> Any:
    """Concatenate arrays in nested lists, one level for each axis, as Dask does."""
    return concatenate3(arrays)
