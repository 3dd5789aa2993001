"""Tell on which scheduler the computation runs that is being planned."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

from dask.base import compute, get_scheduler, persist
from dask.dataframe.dask_expr._collection import FrameBase
from distributed import Client

__all__ = ["runs_locally"]

#: The functions of Dask that choose a scheduler, plan, and compute, in this order; wrappers call them.
_COMPUTING = frozenset(inspect.unwrap(function).__code__ for function in (compute, persist))
#: The one that plans first, and hands the name of a scheduler on.
_PERSISTING = inspect.unwrap(FrameBase.persist).__code__


def runs_locally() -> bool:
    """Tell whether this thread plans a computation for a scheduler of Dask's own in this process.

    ``compute(scheduler="threads")`` chooses one by an argument, of which neither expressions nor the
    configuration know. The function that has it is on the stack of calls while it plans; of several, as where
    planning computes something itself, the innermost one counts.
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
    """Tell whether the function that computes a graph is not that of a client."""
    return get is not None and not isinstance(getattr(get, "__self__", None), Client)
