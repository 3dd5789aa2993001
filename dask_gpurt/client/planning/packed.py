"""Pickle a cached plan once, and create its graph once, however often the plan is computed.

For a plan that is known already, pickling it on the client and unpickling it on the scheduler took more than
half of the time between the user's ``compute()`` and the first task.

Decisions and their figures: ``docs/decisions/planning.md``.
"""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import cloudpickle  # type: ignore[import-untyped]
from dask.typing import Key

from dask_gpurt.client.planning.catalogue.schema import reduced_frames
from dask_gpurt.dask_hooks.parquet_files import pickled
from dask_gpurt.dask_hooks.planning import Expr, PlanWrapper, graph_of
from dask_gpurt.dask_hooks.types import GraphNode

Value = TypeVar("Value")


class LRU(Generic[Value]):
    """Keep the most recently used values. Thread-safe.

    ``limit``: the maximum number of values.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> Value | None:
        """Return the value of a key and mark it as used; None if there is none."""
        with self._lock:
            found = self._values.get(key)
            if found is not None:
                self._values.move_to_end(key)
            return found

    def put(self, key: Hashable, value: Value) -> None:
        """Store a value, and evict the least recently used one if there are too many."""
        dropped = None
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            if len(self._values) > self._limit:
                dropped = self._values.popitem(last=False)
        del dropped  # outside the lock: its finaliser may run any code

    def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            values, self._values = self._values, OrderedDict()
        values.clear()


#: The most plans that a process keeps for those who send them again, and the largest of these.
PLANS_LIMIT, PAYLOAD_LIMIT_BYTES, TASKS_LIMIT = 128, 4 * 1024 * 1024, 1_000


@dataclass
class _Forms:
    """Hold the other forms of a plan."""

    #: Empty if an expression has been made of another one's plan.
    payload: bytes = b""
    #: None until it is known, or if it is too large to keep.
    graph: dict[Key, GraphNode] | None = None


class PackedPlan(PlanWrapper):
    """Compute a plan, and keep its pickled form and its graph. Created by :func:`pack` and :func:`unpack`."""

    _parameters = ["plan"]

    @cached_property
    def _forms(self) -> _Forms:  # expressions allow no other attributes
        return _Forms()

    def __reduce__(self) -> tuple[Any, ...]:
        payload = self._forms.payload
        if not payload:
            made: tuple[Any, ...] = super().__reduce__()  # type: ignore[no-untyped-call]
            return made
        return unpack, (payload,)

    def __dask_graph__(self) -> dict[Key, GraphNode]:
        """Return the graph of the plan, in a dictionary that the caller may change; tasks are immutable."""
        graph = self._forms.graph
        if graph is None:  # two threads may both create it, and either is right
            graph = graph_of(self.plan)
            if len(graph) <= TASKS_LIMIT:
                self._forms.graph = graph
        return dict(graph)


def pack(plan: Expr) -> Expr:
    """Pickle a plan, and return it with its pickled form, unless that cannot be kept.

    It may be too large, or refer to classes of a module that another process does not have: Dask sends those
    of ``__main__``, and of modules that the user has registered with cloudpickle, by value.

    The pickled form is the same each time only if the plan holds nothing but plain operands (see
    :class:`~dask_gpurt.client.planning.keys.Plain`): no data that someone may change in place, and no
    function that is pickled by value together with the globals that it uses.
    """
    payload = pickled(plan, reduced_frames())
    sent_by_value = ["__main__", *cloudpickle.list_registry_pickle_by_value()]
    if len(payload) > PAYLOAD_LIMIT_BYTES or any(name.encode() in payload for name in sent_by_value):
        return plan
    return _kept(plan, payload)  # which a scheduler in this process finds, instead of unpickling it


def unpack(payload: bytes) -> PackedPlan:
    """Return the plan that has been pickled, the one kept in this process if there is one."""
    found = _KEPT.get(_digest(payload))
    return _kept(pickle.loads(payload), payload) if found is None else found


def forget_plans() -> None:
    """Drop the plans that this process keeps."""
    _KEPT.clear()


def _kept(plan: Expr, payload: bytes) -> PackedPlan:
    packed = PackedPlan(plan)  # type: ignore[no-untyped-call]
    packed._forms.payload = payload
    _KEPT.put(_digest(payload), packed)
    return packed


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()


#: By digest, the plans that have been pickled or unpickled in this process last.
_KEPT: LRU[PackedPlan] = LRU(PLANS_LIMIT)
