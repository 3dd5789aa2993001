"""Find out which scheduler the computation that is being planned will run on."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

from dask.base import compute, get_scheduler, persist
from dask.dataframe.dask_expr._collection import FrameBase
from distributed import Client

__all__ = ["runs_locally"]

#: Dask's functions that choose a scheduler, then plan, then compute. Unwrapped, since wrappers call them.
_COMPUTING = frozenset(inspect.unwrap(function).__code__ for function in (compute, persist))
#: The function that plans first, and passes the name of a scheduler on.
_PERSISTING = inspect.unwrap(FrameBase.persist).__code__


def runs_locally() -> bool:
    """Return whether this thread plans a computation for one of Dask's local schedulers.

    ``compute(scheduler="threads")`` chooses one by an argument that neither expressions nor the configuration
    record. But the function is on the call stack while it plans. If there are several, as when planning
    itself computes something, the innermost one counts.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _COMPUTING:
            return _is_local(frame.f_locals.get("schedule"))
        if frame.f_code is _PERSISTING:
            return _is_local(get_scheduler(scheduler=frame.f_locals["kwargs"].get("scheduler")))
        frame = frame.f_back
    return False


def _is_local(get: Any) -> bool:
    """Return whether a ``get`` function is a local scheduler's rather than a client's."""
    return get is not None and not isinstance(getattr(get, "__self__", None), Client)
