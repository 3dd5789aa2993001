"""Make the last step of a reduction an operation on one partition, which can be fused with others.

Dask's expression for a reduction makes the tasks of all of its steps. So nothing is fused with them, even if
there is one step only, and one task follows the other through the scheduler::

    read and sum parts  ->  sum of sums  ->  reset_index          is done as one task

Decisions and their figures: ``docs/decisions/planning.md``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from dask._expr import Expr
from dask._task_spec import List, Task, TaskRef
from dask.core import flatten
from dask.dataframe.dask_expr._expr import Blockwise
from dask.dataframe.dask_expr._reductions import TreeReduce
from dask.typing import Key
from dask.utils import apply

from dask_gpurt.dask_hooks.comparison import Seam

#: The tasks of a reduction.
_STEPS = Seam("dask.dataframe.dask_expr._reductions:TreeReduce._layer", "self", bodies=("30af60bff27c",))


@cache
def _is_known() -> bool:
    return _STEPS.difference() is None


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
    if type(expr) is not TreeReduce or not _is_known():
        return expr
    is_only = expr.split_every is False or expr.frame.npartitions <= expr.split_every
    return LastStep(*expr.operands) if is_only else expr  # type: ignore[no-untyped-call]
