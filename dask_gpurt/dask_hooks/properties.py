"""Compute cached properties of Dask's expressions without the lock that Python 3.11 holds meanwhile.

Before 3.12 ``functools.cached_property`` has one lock for all instances of a class. If client and scheduler
share a process, as with ``LocalCluster``, Dask can deadlock::

    the main thread reads the ``divisions`` of a sort: it takes the lock of ``divisions``, sends the scheduler
        a graph that computes them, and waits for the result
    the event loop receives the graph, and reads the ``divisions`` of its expressions
    ->  it waits for the lock, and the main thread waits for the event loop

Python 3.12 has removed the lock: two threads that read a property at the same time both compute it, and one
of the two equal values is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property
from typing import Any

from dask._expr import Expr

from dask_gpurt.dask_hooks.patch import PatchSet


def drop_class_lock(patches: PatchSet) -> None:
    """Compute cached properties of expressions without a lock, as Python 3.12 does. A no-op on Python 3.12.

    Parameters
    ----------
    patches
        Restores the lock.
    """
    if sys.version_info < (3, 12):
        patches.put(cached_property, "__get__", _without_lock)


def _without_lock(original: Callable[..., Any]) -> Callable[..., Any]:
    def get(self: Any, instance: Any, owner: Any = None) -> Any:
        if not isinstance(instance, Expr) or self.attrname is None:
            return original(self, instance, owner)
        values = vars(instance)
        if self.attrname not in values:
            values[self.attrname] = self.func(instance)
        return values[self.attrname]

    return get
