"""Sort a result once, in the task that has all of it, and set no index that only a join looks up.

Dask sorts a whole result in one task, since all of it goes to the client: it moves the step that puts the
partitions together below ``sort_values``, but only if nothing follows. With ``reset_index(drop=True)``, a new
column or a projection behind it, it computes quantiles in a job of their own, with the whole input, and
shuffles. ``set_index`` does so too, also if the index is just what a join looks rows up by. Here the
partitions are put together before such a sort, and an index for a join is set in each partition.

What it does not reason about
    Sorts whose rows are joined, grouped or cut off afterwards; results that stay on the cluster; whether one
    task can sort the result: it has to hold it in any case. Joins of two indexes, whose result is sorted.
Why the result is the same
    What follows the sort is row by row, and so is done on all rows in one partition as on several. Numbers of
    rows, which restart at 0 in each of Dask's partitions, are those of pandas then. Of rows with equal keys
    Dask leaves the order open. A join by columns and an index has no order and the other side's labels.
The figure
    ``sort_values("x").reset_index(drop=True)`` of four files takes one job of 7 tasks, not two jobs, of
    which the second has 13 (``docs/decisions/partitions.md``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dask.dataframe.dask_expr._expr import ResetIndex
from dask.dataframe.dask_expr._merge import Merge
from dask.dataframe.dask_expr._repartition import Repartition
from dask.dataframe.dask_expr._shuffle import SetIndex, SetIndexBlockwise, SortValues

from dask_gpurt.client.planning.operations import is_on_rows
from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.dask_hooks.planning import Expr, name_of, rebuild, with_operand


class SortOnce:
    """Put the partitions of a result together before it is sorted, and sort nothing for a join."""

    def apply(self, plan: Expr, facts: Facts) -> Expr:
        """Return a plan that computes no quantiles for a sort of its result, or for the index of a join."""
        if not any(type(expr) in (SortValues, SetIndex) for expr in plan.walk()):
            return plan

        def change(expr: Any) -> Any:
            if type(expr) is Merge:
                return self._looked_up(expr, facts)
            if type(expr) is not Repartition or expr.operand("new_partitions") != 1:
                return expr
            return self._together(expr, facts)

        return rebuild(plan, change)

    def _together(self, whole: Any, facts: Facts) -> Any:
        """Return a result of one partition that is sorted there, if it is sorted at all."""
        changed = _within(whole.frame, _in_one_partition)
        if changed is None:
            return whole
        facts.note(self, name_of(whole), "is sorted in one task, which has all of it", done=True)
        return changed

    def _looked_up(self, join: Any, facts: Facts) -> Any:
        """Return a join by columns and an index which is set in each partition."""
        side = "left" if join.left_index else "right"
        if join.left_index == join.right_index or join.how not in ("inner", "left", "right"):
            return join
        changed = _within(getattr(join, side), _in_each_partition)
        if changed is None or not _is_labelled_by(changed, SetIndexBlockwise):
            return join
        facts.note(
            self, name_of(join), f"looks up the index of its {side} side, which is not sorted", done=True
        )
        return join.substitute_parameters({side: changed})


def _within(expr: Any, change: Callable[[Any], Expr | None]) -> Expr | None:
    """Return operations on the rows of one sort with that changed; None if they are on anything else."""
    sorts: set[str] = set()

    def changed(expr: Any) -> Expr | None:
        if type(expr) in (SortValues, SetIndex):
            sorts.add(name_of(expr))
            return change(expr)
        if not is_on_rows(expr):
            return None
        below = {name_of(each): changed(each) for each in expr.dependencies() if each.ndim}
        if not below or any(each is None for each in below.values()):
            return None
        operands = [
            below.get(name_of(each), each) if isinstance(each, Expr) else each for each in expr.operands
        ]
        found: Expr = type(expr)(*operands)
        return found

    found = changed(expr)
    return found if len(sorts) == 1 else None


def _in_one_partition(sort: Any) -> Expr | None:
    """Return a sort of all rows in one partition; None if that is not by values of its columns alone."""
    if sort.operand("npartitions") is not None or not _is_plain(sort):
        return None
    frame = _within(sort.frame, _in_one_partition)
    return with_operand(sort, "frame", Repartition(sort.frame, 1) if frame is None else frame)


def _in_each_partition(index: Any) -> Expr | None:
    """Return an index that is set in each partition; None if it is not a column."""
    if type(index) is not SetIndex or not _is_plain(index):
        return None
    found: Expr = SetIndexBlockwise(index.frame, index.operand("_other"), index.drop, None)
    return found


def _is_labelled_by(expr: Any, kind: type) -> bool:
    """Return whether the index is that of an operation below, and no numbers of rows."""
    while type(expr) is not kind and type(expr) is not ResetIndex:
        expr = expr.dependencies()[0]
    return type(expr) is kind


def _is_plain(sort: Any) -> bool:
    if type(sort) is SortValues:
        return sort.operand("sort_function") is None and not sort.operand("sort_function_kwargs")
    by = sort.operand("_other")
    is_column = not isinstance(by, Expr) and by in list(sort.frame.columns)
    return is_column and sort.user_divisions is None and not sort.append
