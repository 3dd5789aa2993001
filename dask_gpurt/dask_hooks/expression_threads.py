"""Let several threads of one process create and read Dask's expressions.

With a ``LocalCluster(processes=False)`` the scheduler is a thread of its client's process, and both use the
same expressions. The threads of a worker do so too if tasks plan dataframes. Dask has a race and, before
Python 3.12, a deadlock there.

Dask keeps one instance of equal expressions, by name, in a dictionary of weak references. Its lookup checks
for the name and then reads it::

    scheduler, unpickling a graph: the dictionary has an expression of this name
    client, which has sent it:     drops the last reference
    scheduler:                     KeyError; the graph is rejected

The futures of that graph fail, and dependent tasks are cancelled with "lost dependencies".

Before Python 3.12 ``functools.cached_property`` has one lock for all instances of a class::

    the main thread reads the ``divisions`` of a sort: it takes the lock of ``divisions``, sends the scheduler
        a graph that computes them, and waits for the result
    the event loop receives the graph, and reads the ``divisions`` of its expressions
    ->  it waits for the lock, and the main thread waits for the event loop

    a task on a worker reads the ``divisions`` of a sort: it takes the lock, and has a cluster compute them
    all other threads of the worker run tasks that read the ``divisions`` of any sort, and wait for the lock
    ->  nothing is left to compute what the first one waits for

Python 3.12 has removed the lock: two threads that read a property at the same time both compute it, and one
of the two equal values is kept.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from dask._expr import Expr, SingletonExpr

from dask_gpurt.dask_hooks.patch import PatchSet

#: How often an expression is looked up that another thread releases each time.
MAX_LOOKUPS = 3


#: What is replaced, once for all who want it in this process, and those.
_patches, _users, _lock = PatchSet(), set[object](), threading.Lock()


@contextmanager
def sharing_expressions() -> Iterator[None]:
    """Create expressions without Dask's race, and read their properties without Python's lock, in the body.

    Everything in this process that needs it enters: the client, its scheduler and workers may share it.
    """
    user = object()
    _begin(user)
    try:
        yield
    finally:
        _end(user)


def _begin(user: object) -> None:
    with _lock:
        if not _users:
            _patches.put(SingletonExpr, "__new__", _looked_up_again)
            if sys.version_info < (3, 12):
                _patches.put(cached_property, "__get__", _without_lock)
        _users.add(user)


def _end(user: object) -> None:
    with _lock:
        _users.remove(user)
        if not _users:
            _patches.restore()


def _looked_up_again(original: Callable[..., Any]) -> Callable[..., Any]:
    """Look an expression up again if it was released in the middle: then Dask makes another one."""

    def new(*args: Any, **kwargs: Any) -> Any:
        for _ in range(MAX_LOOKUPS - 1):
            try:
                return original(*args, **kwargs)
            except KeyError:  # or the error of an operand, which comes again
                continue
        return original(*args, **kwargs)

    return new


def _without_lock(original: Callable[..., Any]) -> Callable[..., Any]:
    def get(self: Any, instance: Any, owner: Any = None) -> Any:
        if not isinstance(instance, Expr) or self.attrname is None:
            return original(self, instance, owner)
        values = vars(instance)
        if self.attrname not in values:
            values[self.attrname] = self.func(instance)
        return values[self.attrname]

    return get
