"""Find out for which scheduler and client a computation is planned, and how the client gets its results."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import dask
from dask.base import compute, get_scheduler, persist
from dask.context import thread_state
from dask.dataframe.dask_expr._collection import FrameBase
from dask.dataframe.dask_expr._repartition import RepartitionToFewer
from dask.typing import Key
from distributed import Client, Future, as_completed

from dask_gpurt.dask_hooks.patch import PatchSet
from dask_gpurt.dask_hooks.planning import Expr, PlanWrapper, is_sequence
from dask_gpurt.dask_hooks.seams import RESULTS_FOR_CLIENTS

#: Values of Dask's setting ``scheduler`` that mean the current client.
_DISTRIBUTED = ("dask.distributed", "distributed")
#: Dask's functions that choose a scheduler, then plan, then compute. Unwrapped, since wrappers call them.
_COMPUTING = frozenset(inspect.unwrap(function).__code__ for function in (compute, persist))
#: The function that plans first, and passes the name of a scheduler on.
_PERSISTING = inspect.unwrap(FrameBase.persist).__code__
#: The methods of a client that plan and compute.
_OF_CLIENTS = frozenset(inspect.unwrap(method).__code__ for method in (Client.compute, Client.persist))


def cluster_size(client: Client) -> tuple[int, int]:
    """Return the numbers of workers and of their task threads, as the client last heard. Does not block."""
    known: Mapping[str, Any] = client._scheduler_identity
    return known.get("n_workers", 0), known.get("total_threads", 0)


def runs_locally() -> bool:
    """Return whether this thread plans a computation for one of Dask's local schedulers.

    ``compute(scheduler="threads")`` chooses one by an argument that neither expressions nor the configuration
    record. But the function is on the call stack while it plans. If there are several, as when planning
    itself computes something, the innermost one counts. If there is none, as in ``optimize()``, the
    configured scheduler does.
    """
    scheduler = _scheduler_on_the_stack() or _owner(dask.config.get("scheduler", None))
    if isinstance(scheduler, str):
        return scheduler.lower() not in _DISTRIBUTED
    return scheduler is not None and not isinstance(scheduler, Client)


def chosen_client() -> Client | None:
    """Return the client that this thread plans a computation for; None if that is the current one.

    It need not be the current one: ``client.compute(frame)``, ``frame.compute(scheduler=client)``.
    """
    if len(Client._instances) < 2:
        return None
    scheduler = _scheduler_on_the_stack()
    return scheduler if isinstance(scheduler, Client) else None


def _scheduler_on_the_stack() -> Any:
    """Return the client of the innermost computation, the ``get`` of a local scheduler, or None."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code in _COMPUTING:
            return _owner(frame.f_locals.get("schedule"))
        if frame.f_code is _PERSISTING:
            return _owner(get_scheduler(scheduler=frame.f_locals["kwargs"].get("scheduler")))
        if frame.f_code in _OF_CLIENTS:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def _owner(get: Any) -> Any:
    """Return the client of a ``get`` function, or the function of a local scheduler."""
    owner = getattr(get, "__self__", None)
    return owner if isinstance(owner, Client) else get


# ---- results of a computation ----------------------------------------------------------------------


def results_of(plan: Expr) -> Sequence[Expr]:
    """Return the plan of each result of a computation, without what wraps it."""
    while isinstance(plan, PlanWrapper):
        plan = plan.plan
    return [each for plan in plan.operands for each in results_of(plan)] if is_sequence(plan) else [plan]


def apart(result: Expr) -> Expr | None:
    """Return the expression whose partitions a last task puts together; None if there is none."""
    if type(result) is not RepartitionToFewer or result.new_partitions != 1:
        return None
    frame: Expr = result.frame
    return frame


def is_in_task() -> bool:
    """Return whether a task of a worker runs in this thread."""
    return bool(getattr(thread_state, "key", False))


def replace_get(patches: PatchSet, get: Callable[..., Any]) -> None:
    """Replace how a client computes a graph and gets its results.

    ``get``: called as ``get(original, client, dsk, keys, *args, **kwargs)``.
    Raises UnsupportedError if Dask's differs from the known one; nothing is replaced.
    """
    RESULTS_FOR_CLIENTS.require()
    patches.replace_all({RESULTS_FOR_CLIENTS["get"]: lambda original: partial(get, original)})


async def last_ends(client: Client, futures: list[Future[Any]]) -> bool:
    """Wait for all tasks, or for the first one that fails; return whether all have results."""
    async for future in as_completed(futures, loop=client.loop):
        if future.status != "finished":
            return False
    return True


async def where_are(client: Client, keys: list[Key]) -> tuple[dict[Key, list[str]], dict[Key, int]]:
    """Ask the scheduler for the workers that have results, and for their bytes."""
    scheduler: Any = client.scheduler
    holders: dict[Key, list[str]] = await scheduler.who_has(keys=keys)
    try:
        nbytes: dict[Key, int] = await scheduler.nbytes(keys=list(holders), summary=False)
    except KeyError:  # another client has cancelled one of them
        return {}, {}
    return holders, nbytes


async def has_worker(client: Client, worker: str) -> bool:
    """Ask the scheduler whether a worker is still there."""
    scheduler: Any = client.scheduler
    known: dict[str, int] = await scheduler.ncores(workers=[worker])
    return worker in known


async def fetch(client: Client, worker: str, keys: list[Key], connect_s: float) -> dict[Key, Any]:
    """Fetch results from a worker; return those that it has, and none if it is busy.

    Raises ConnectionRefusedError if the client cannot connect to the worker within ``connect_s`` seconds.
    """
    # Dask may lack it, and then only results go through the scheduler; `replace_get` has compared it.
    from distributed.worker import get_data_from_worker

    try:
        comm = await asyncio.wait_for(client.rpc.connect(worker), connect_s)
    except (OSError, TimeoutError) as error:
        raise ConnectionRefusedError(
            f"no connection from the client to worker {worker}: {error!r}"
        ) from error
    client.rpc.reuse(worker, comm)
    reply: Any = await get_data_from_worker(client.rpc, keys, worker)
    found: dict[Key, Any] = reply["data"] if reply["status"] == "OK" else {}
    return found


async def gather(client: Client, futures: list[Future[Any]]) -> list[Any]:
    """Get results through the scheduler, and have those computed again that are lost."""
    found: list[Any] = await client._gather(futures, direct=False)
    return found
