"""Make lighter tasks of reductions and joins than Dask's expressions do.

Dask's expression for a reduction makes the tasks of all of its steps. So nothing is fused with them, even if
there is one step only, and one task follows the other through the scheduler. Here the last step is an
operation on one partition::

    read and sum parts  ->  sum of sums  ->  reset_index          is done as one task

The metadata of joins travel with their tasks as bytes, of which workers make frames if they need them.

Decisions and their figures: ``docs/decisions/planning.md``.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from functools import cache, cached_property
from typing import Any

from dask._expr import Expr
from dask._task_spec import List, Task, TaskRef
from dask.core import flatten
from dask.dataframe.dask_expr._expr import Blockwise
from dask.dataframe.dask_expr._reductions import TreeReduce
from dask.dataframe.multi import merge_chunk
from dask.tokenize import normalize_token
from dask.typing import Key
from dask.utils import apply

from dask_gpurt.dask_hooks.comparison import Seam


@cache
def _is_known(seam: Seam) -> bool:
    return seam.difference() is None


@cache
def compare() -> None:
    """Compare the sources of Dask that this depends on, which are read from files, for later calls."""
    for seam in (_STEPS, _JOIN):
        _is_known(seam)


# ---- last steps of reductions ------------------------------------------------------------------------

#: The tasks of a reduction.
_STEPS = Seam("dask.dataframe.dask_expr._reductions:TreeReduce._layer", "self", bodies=("30af60bff27c",))


class LastStep(Blockwise):
    """Aggregate all partitions of a frame in one task, as a ``TreeReduce`` of few partitions does."""

    _parameters = TreeReduce._parameters
    _defaults = TreeReduce._defaults
    _name = TreeReduce._name

    @property
    def _meta(self) -> Any:
        return self.operands[self._parameters.index("_meta")]

    def _divisions(self) -> tuple[None, None]:
        return (None, None)

    def _task(self, name: Key, index: int) -> Task:
        parts = List(*map(TaskRef, flatten(self.frame.__dask_keys__())))
        return Task(name, apply, self.aggregate, List(parts), self.aggregate_kwargs)


def last_step(expr: Expr) -> Expr:
    """Return the only step of a reduction in place of one that has no others; others as they are."""
    if type(expr) is not TreeReduce or not _is_known(_STEPS):
        return expr
    is_only = expr.split_every is False or expr.frame.npartitions <= expr.split_every
    return LastStep(*expr.operands) if is_only else expr  # type: ignore[no-untyped-call]


# ---- metadata of joins ------------------------------------------------------------------------------

#: The argument of joins that is their metadata.
_META = "result_meta"
#: What asks it for dtypes and columns.
_JOIN = Seam("dask.dataframe.multi:merge_chunk", "lhs args result_meta kwargs", bodies=("b5312ef6cc60",))


class LateMetadata:
    """Stand in for an empty frame, which is made as soon as anything is asked of it."""

    def __init__(self, payload: bytes):
        self._payload = payload

    @cached_property
    def frame(self) -> Any:
        """Return the frame."""
        return pickle.loads(self._payload)

    def __getattr__(self, name: str) -> Any:
        if name == "frame" or name.startswith("__"):  # or it would ask for itself if it cannot be made
            raise AttributeError(name)
        return getattr(self.frame, name)

    def __dask_tokenize__(self) -> Any:
        return normalize_token(self.frame)

    def __reduce__(self) -> tuple[Any, ...]:
        return LateMetadata, (self._payload,)


def defer_metadata(graph: Mapping[Any, Any]) -> None:
    """Have the joins of a new graph, also those within fused tasks, get their metadata late."""
    late: dict[int, tuple[Any, LateMetadata]] = {}  # with the frames: an address may be used again
    left = [*graph.values()] if _is_known(_JOIN) else []
    while left:
        node = left.pop()
        if not isinstance(node, Task):
            continue
        if node.has_subgraph():
            left += node.args[0].values()
        elif node.func is merge_chunk and not isinstance(meta := node.kwargs[_META], LateMetadata):
            if id(meta) not in late:
                late[id(meta)] = meta, LateMetadata(pickle.dumps(meta, protocol=5))
            node.kwargs[_META] = late[id(meta)][1]
