"""Find out which scheduler and which client the computation that is being planned will run on."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import dask
from dask.base import compute, get_scheduler, persist
from dask.dataframe.dask_expr._collection import FrameBase
from distributed import Client

__all__ = ["chosen_client", "cluster_size", "runs_locally"]

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
