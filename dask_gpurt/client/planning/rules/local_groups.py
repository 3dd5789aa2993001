"""Group and deduplicate rows where they are read, if the files of a table have different keys.

Tables are often written in the order of a key, such as the number of an order or of an event. All rows of a
key are then in one file, as the least and the largest value in the footer of each file tell. Rows can be
deduplicated and grouped by such a key in the partitions in which they are read. Dask would shuffle the one,
and for the other send the groups of all partitions to one worker, which groups them once more.

Rows of which duplicates are dropped before that are deduplicated there, too. The groups of all partitions
become a single partition, as they are in Dask's plan, before a join, and only there. Some operations on
single rows between the groupby and the join are done before that, in each partition.

What it does not reason about
    Groups that are the result, or are used otherwise than in a join: they have an order. Keys that are no
    integers of the files, or have nulls; tables of more than 500 files, or in object storage; files of
    which only some share a key; whether there are few groups, of which one more step costs nothing.
Why the result is the same
    No value of a key is in two files, so a partition has all rows of its groups, and a second grouping would
    change nothing. A join depends neither on the order nor on the labels of its rows, and the rest of the
    plan is independent of partitions (:mod:`.dependence`), with groups as they are and with those of Dask in
    as many partitions. Tasks check the ranges of keys in the files that they read.
The figure
    Q18 and Q21 of TPC-H take 0.58 of the time at scale 3 on two cores (``tpch-local-groups-2cpu-sf3.json``),
    and Q21 0.71 at scale 100 on two H200s (``tpch-local-groups-2xh200-sf100.json``).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from dask._expr import Expr
from dask.dataframe.dask_expr import _expr, _groupby, _reductions
from dask.dataframe.dask_expr._merge import Merge, SemiMerge
from dask.dataframe.dask_expr._repartition import Repartition
from dask.dataframe.dask_expr.io import parquet
from dask.dataframe.dask_expr.io.io import FusedIO

from dask_gpurt.client.planning.operations import is_no_operation, is_on_rows
from dask_gpurt.client.planning.reads import is_idle, parquet_reads
from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.client.planning.rules.dependence import joins_columns
from dask_gpurt.client.planning.rules.table_sizes import Leave, independence_of
from dask_gpurt.client.planning.table_facts import TableFacts
from dask_gpurt.dask_hooks.planning import name_of, rebuild

#: Operations on single rows whose dtype follows from those of their inputs.
_IN_PARTS = frozenset(
    [_expr.Projection, _expr.RenameFrame, _expr.RenameSeries, _expr.ToFrame, _expr.ResetIndex, _expr.Filter]
    + [_expr.EQ, _expr.NE, _expr.GT, _expr.GE, _expr.LT, _expr.LE, _expr.And, _expr.Or]
)


class LocalGroups:
    """Group rows in the partitions in which they are read."""

    def apply(self, plan: Expr, facts: Facts) -> Expr:
        """Return a plan that groups rows locally where that is certain to be the same."""
        bare, depends = facts.bare(plan)
        if depends:
            if parquet_reads(bare):
                reason = "has its groups as Dask makes them, since results depend on partitions"
                facts.note(self, name_of(plan), reason)
            return plan
        attempt = _Attempt(facts.tables, partial(facts.note, self))
        try:
            changed = attempt.change_most(bare)
            if not (changes := attempt.changes):
                return plan
            as_dask = attempt.change(bare, by_dask=True)
            known = [independence_of(each, facts.tables) for each in (bare, as_dask)]
        except (
            OSError,  # a file has gone, which Dask finds out as it reads it
            KeyError,  # Dask cannot follow a note of how rows are divided through a renaming
            TypeError,
        ) as error:
            facts.note(self, name_of(plan), f"has its groups as Dask makes them: {error!r}")
            return plan
        if None in known:
            facts.note(self, name_of(plan), "has its groups as Dask makes them, since dtypes vary")
            return plan
        for each in filter(None, known):
            facts.tables.rely_on_dtypes(each)
        for read, column in attempt.relied:
            facts.tables.rely_on_keys(read, column)
        for what, number in changes.items():
            text = f"has {number} {what} computed where rows are read, without a shuffle"
            facts.note(self, name_of(plan), text, done=True)
            facts.metrics.add("planning.local.{what}", number, what)
        return changed


def are_apart(ranges: Iterable[tuple[int, int] | None]) -> bool:
    """Return whether no two ranges, given by their first and last number, have a number in common.

    None stands for an unknown range, which may have. No more ranges are taken than are needed.
    """
    known: list[tuple[int, int]] = []
    for each in ranges:
        if each is None:
            return False
        at = bisect(known, each)
        if (at and known[at - 1][1] >= each[0]) or (at < len(known) and each[1] >= known[at][0]):
            return False
        known.insert(at, each)
    return True


class _Parts(NamedTuple):
    """Describe an expression with several partitions of groups.

    Operations on two of them need the same rows with the same labels, by which pandas aligns them.

    ``groups``: the groupby.
    ``rows``: the latest operation by which rows have been chosen or numbered.
    """

    groups: int
    rows: int


class _NotForJoin(Exception):
    """Groups are used otherwise than in joins."""

    def __init__(self, groups: int):
        super().__init__(groups)
        self.groups = groups


class _Attempt:
    """Change a plan, with the exception of some groupbys.

    An expression of the plan is identified by its number in the order in which it is visited, which is always
    the same. Names differ from one change to the next.

    ``changes``: the number of expressions that the latest change has replaced, by kind.
    ``relied``: the columns of which no value is in two files, each as a read and the name of the column.
    """

    def __init__(self, facts: TableFacts, leave: Leave) -> None:
        self.changes: dict[str, int] = {}
        self.relied: list[tuple[Expr, object]] = []
        self._facts = facts
        self._leave = leave
        #: The groupbys that are left to Dask.
        self._excluded: set[int] = set()
        self._are_apart: dict[tuple[str, object], bool] = {}

    def change_most(self, plan: Expr) -> Expr:
        """Return a plan in which all groupbys are changed whose groups are only joined."""
        while True:
            try:
                return self.change(plan)
            except _NotForJoin as found:
                self._leave(
                    name_of(plan), f"has groups that are not only joined, by expression {found.groups}"
                )
                self._excluded.add(found.groups)

    def change(self, plan: Expr, *, by_dask: bool = False) -> Expr:
        """Return the changed plan.

        ``by_dask``: whether its groups have the same partitions, but are grouped by Dask, in a shuffle. Rows
        are then deduplicated as in the original plan.
        Raises _NotForJoin if a changed groupby has to be excluded.
        """
        self.changes = {}
        self._by_dask = by_dask
        self._visited = 0
        self._parts: dict[str, _Parts] = {}
        changed = rebuild(plan, self._replaced)
        if name_of(changed) in self._parts:
            raise _NotForJoin(self._parts[name_of(changed)].groups)
        return changed

    def _replaced(self, expr: Expr) -> Expr:
        self._visited += 1
        parts = {self._parts[name_of(each)] for each in expr.dependencies() if name_of(each) in self._parts}
        if parts:
            return self._after_groups(expr, parts)
        if self._visited in self._excluded or (keys := keys_of_groups(expr)) is None:
            return expr
        return self._grouped(expr, keys)

    def _grouped(self, expr: Expr, keys: list[object]) -> Expr:
        rows: Any = expr.frame
        if (columns := keys_of_duplicates(rows)) is None:
            local = grouped(expr) if self._are_local(rows, keys) else None
        elif self._are_local(rows.frame, [column for column in columns if column in keys]):
            local = grouped(expr.substitute_parameters({"frame": deduplicated(rows)}))
        else:
            local = None
        if local is None or not are_alike(local, expr):
            reason = "files may share a key" if local is None else "its dtypes or names would differ"
            self._leave(name_of(expr), f"is left to Dask: {reason}")
            return expr
        if self._by_dask:
            local = grouped_in_parts(expr)
        self._parts[name_of(local)] = _Parts(self._visited, self._visited)
        self._note("groups")
        if columns is not None:
            self._note("duplicates")
        return local

    def _note(self, what: str) -> None:
        self.changes[what] = self.changes.get(what, 0) + 1

    def _after_groups(self, expr: Expr, parts: set[_Parts]) -> Expr:
        """Return an operation on groups that have several partitions, or the join of them as a single one."""
        inputs = [name_of(each) for each in expr.dependencies()]
        if is_join(expr):
            operands = [
                Repartition(each, 1) if isinstance(each, Expr) and name_of(each) in self._parts else each
                for each in expr.operands
            ]
            return type(expr)(*operands)
        if is_row_by_row(expr) and len(parts) == 1 and all(name in self._parts for name in inputs):
            (part,) = parts
            rows = self._visited if chooses_or_numbers_rows(expr) else part.rows
            self._parts[name_of(expr)] = _Parts(part.groups, rows)
            return expr
        raise _NotForJoin(min(part.groups for part in parts))

    def _are_local(self, rows: Expr, keys: Iterable[object]) -> bool:
        """Return whether all rows of a key are in one partition."""
        for key in keys:
            if (found := origin_of(rows, key)) is None:
                continue
            read, column = found
            known = (name_of(read), column)
            if known not in self._are_apart:
                ranges = self._facts.ranges(read, column)
                self._are_apart[known] = are_apart(ranges) and self._facts.are_alike(read)
            if self._are_apart[known]:
                self.relied.append((read, column))
                return True
        return False


# ---- where rows come from ---------------------------------------------------------------------------


def origin_of(expr: Any, column: Any) -> tuple[Any, Any] | None:
    """Return the read of Parquet files that a column comes from, and its name there; None if it is unknown.

    Its values are those in the files, and its rows are in the same partitions.
    """
    while True:
        if expr.ndim != 2 or column not in expr.columns:
            return None
        kind = type(expr)
        read = expr.operand("_expr") if isinstance(expr, FusedIO) else expr
        if isinstance(read, (parquet.ReadParquetFSSpec, parquet.ReadParquetPyarrowFS)):
            return read, column
        if kind is _expr.RenameFrame:
            if not isinstance(expr.operand("columns"), Mapping):
                return None
            sources = [old for old in expr.frame.columns if expr.operand("columns").get(old, old) == column]
            if len(sources) != 1:
                return None
            (column,) = sources
        elif kind is _expr.Assign:
            if column in expr.keys:
                return None
        elif not (kind in (_expr.Projection, _expr.Filter) or is_no_operation(expr) or is_idle(expr)):
            return None
        expr = expr.frame


# ---- operations within partitions -------------------------------------------------------------------


def keys_of_duplicates(expr: Any) -> list[Any] | None:
    """Return the columns by which rows are deduplicated in a shuffle; None if there is no such shuffle."""
    if type(expr) is not _reductions.DropDuplicates or expr.frame.ndim != 2 or expr.npartitions == 1:
        return None
    if expr.subset is not None or expr.ignore_index or expr.keep not in ("first", "last"):
        return None
    return list(expr.frame.columns) if expr.should_shuffle and expr.need_to_shuffle else None


def deduplicated(expr: Any) -> Expr:
    """Deduplicate the rows of each partition by itself."""
    chunk: Expr = expr._chunk_cls(expr.frame, type(expr), expr.chunk, expr.chunk_kwargs)
    return chunk


def keys_of_groups(expr: Any) -> list[Any] | None:
    """Return the columns of a groupby whose result is a single partition; None for another expression."""
    if not isinstance(expr, _groupby.GroupByBase) or not isinstance(expr, _reductions.ApplyConcatApply):
        return None
    if expr.npartitions != 1 or expr.frame.npartitions == 1 or expr.frame.ndim != 2:
        return None
    keys = list(expr.by)
    # Unobserved categories would be groups in each partition.
    dtypes = [expr.frame._meta.dtypes.get(key) for key in keys if not isinstance(key, Expr)]
    is_plain = len(dtypes) == len(keys) and None not in dtypes
    return keys if is_plain and not any(map(_is_category, dtypes)) and not expr.sort else None


def _is_category(dtype: Any) -> bool:
    return type(dtype).__name__ == "CategoricalDtype"  # of pandas or cudf


def grouped_in_parts(expr: Any) -> Expr:
    """Return a groupby with as many partitions of groups as of rows, by Dask."""
    parts: Expr = expr.substitute_parameters({"split_out": True})
    return parts


def grouped(expr: Any) -> Expr | None:
    """Group the rows of each partition by itself; None if it is not known how."""
    physical = expr._lower() if isinstance(expr, _groupby.GroupbyAggregation) else expr
    if type(physical)._lower is not _reductions.ApplyConcatApply._lower or not physical.aggregate:
        return None
    chunk = physical._chunk_cls(
        physical.frame, type(physical), physical.chunk, physical.chunk_kwargs, *physical._chunk_cls_args
    )
    whole: Expr = _reductions.Aggregate(
        chunk, type(physical), physical.aggregate, physical.aggregate_kwargs, *physical.aggregate_args
    )
    return whole


def are_alike(one: Any, other: Any) -> bool:
    """Return whether two expressions have the same columns and index, in name and dtype."""
    return bool(_columns_of(one._meta) == _columns_of(other._meta))


def _columns_of(meta: Any) -> tuple[Any, ...]:
    dtypes = list(map(str, meta.dtypes)) if meta.ndim == 2 else [str(meta.dtype)]
    names = list(meta.columns) if meta.ndim == 2 else [meta.name]
    levels = [str(dtype) for dtype in getattr(meta.index, "dtypes", [meta.index.dtype])]
    return type(meta), names, dtypes, list(meta.index.names), levels


def is_row_by_row(expr: Any) -> bool:
    """Return whether an operation can be done in each partition of groups.

    It is on each row by itself, and neither its values nor its dtype follow from other rows. Others that
    :func:`is_on_rows` allows infer a dtype from all values of a partition, such as ``where``, which makes
    floats of integers where a row does not match.
    """
    return type(expr) in _IN_PARTS and is_on_rows(expr)


def chooses_or_numbers_rows(expr: Any) -> bool:
    """Return whether the rows of the result, or their labels, are others than those of the input."""
    return type(expr) in (_expr.Filter, _expr.ResetIndex)


def is_join(expr: Any) -> bool:
    """Return whether an expression joins columns, for which neither order nor labels of rows matter."""
    return type(expr) in (Merge, SemiMerge) and joins_columns(expr)
