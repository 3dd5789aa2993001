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
from collections.abc import Iterable
from typing import Any

from dask._expr import Expr
from dask.dataframe.dask_expr import _expr, _groupby, _reductions
from dask.dataframe.dask_expr._merge import Merge, SemiMerge
from dask.dataframe.dask_expr._repartition import Repartition

from dask_gpurt.client.planning.operations import are_alike, is_on_rows
from dask_gpurt.client.planning.reads import parquet_reads, read_of
from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.client.planning.rules.dependence import joins_columns, rely_on_independence
from dask_gpurt.client.planning.rules.needed_columns import origin_of
from dask_gpurt.client.planning.table_facts import TableFacts
from dask_gpurt.dask_hooks.planning import bottom_up, name_of, rebuild_from

#: Operations on single rows whose dtype follows from those of their inputs. Others that :func:`is_on_rows`
#: allows infer one from all values of a partition, such as ``where``.
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
        try:
            groups = _Groups(bare)
            local = {
                name: found for name, expr in groups.joined.items() if (found := self._local(expr, facts))
            }
            if not local:
                return plan
            # The rest of the plan has to be the same with groups in several partitions, also by Dask.
            by_dask = groups.replaced({name: in_parts(groups.joined[name]) for name in local})
            is_same = rely_on_independence(facts.tables, bare, by_dask)
        except (
            OSError,  # a file has gone, which Dask finds out as it reads it
            KeyError,  # Dask cannot follow a note of how rows are divided through a renaming
            TypeError,
        ) as error:
            facts.note(self, name_of(plan), f"has its groups as Dask makes them: {error!r}")
            return plan
        if not is_same:
            facts.note(self, name_of(plan), "has its groups as Dask makes them, since dtypes vary")
            return plan
        distinct = [name for name in local if keys_of_duplicates(groups.joined[name].frame) is not None]
        for what, names in (("groups", list(local)), ("duplicates", distinct)):
            for name in names:
                text = f"has its {what} computed where rows are read, without a shuffle"
                facts.note(self, name, text, done=True)
            if names:
                facts.metrics.add("planning.local.{what}", len(names), what)
        for _, read, column in local.values():
            facts.tables.rely_on_keys(read, column)
        return groups.replaced({name: expr for name, (expr, _, _) in local.items()})

    def _local(self, groups: Any, facts: Facts) -> tuple[Expr, Any, Any] | None:
        """Return groups made in each partition, and the read and its column of which no value is in two."""
        rows, keys = groups.frame, list(groups.by)
        if (columns := keys_of_duplicates(rows)) is not None:
            groups_of_distinct = groups.substitute_parameters({"frame": deduplicated(rows)})
            found = _key_apart(rows.frame, [column for column in columns if column in keys], facts.tables)
            local = grouped(groups_of_distinct) if found else None
        else:
            found = _key_apart(rows, keys, facts.tables)
            local = grouped(groups) if found else None
        if found is None or local is None or not are_alike(local, groups):
            reason = "files may share a key" if local is None else "its dtypes or names would differ"
            facts.note(self, name_of(groups), f"is left to Dask: {reason}")
            return None
        return local, *found


class _Groups:
    """Find the groupbys of a plan whose groups, and what is made of them row by row, are only joined.

    ``joined``: these groupbys, by name.
    """

    def __init__(self, plan: Expr):
        self._plan = plan
        #: By name of an expression of groups, the name of the groupby, and that of the latest operation by
        #: which rows have been chosen or numbered: two need both to be the same, as pandas aligns by labels.
        self._rows: dict[str, tuple[str, str]] = {}
        self.joined: dict[str, Any] = {}
        for expr in bottom_up(plan):
            self._add(expr, {self._rows.get(name_of(each)) for each in expr.dependencies()})
        if name_of(plan) in self._rows:
            self._leave(self._rows[name_of(plan)])

    def _add(self, expr: Any, inputs: set[tuple[str, str] | None]) -> None:
        name, kind = name_of(expr), type(expr)
        known = inputs - {None}
        if not known:
            if is_of_columns(expr):
                self._rows[name], self.joined[name] = (name, name), expr
        elif len(inputs) == 1 and kind in _IN_PARTS and is_on_rows(expr):
            ((groups, latest),) = filter(None, known)
            self._rows[name] = groups, name if kind in (_expr.Filter, _expr.ResetIndex) else latest
        elif not is_join(expr):
            self._leave(*filter(None, known))

    def _leave(self, *rows: tuple[str, str]) -> None:
        for groups, _ in rows:
            self.joined.pop(groups, None)

    def replaced(self, instead: dict[str, Expr]) -> Expr:
        """Return the plan with groupbys replaced by name, whose partitions are put together to be joined."""

        def change(old: Any, new: Any) -> Any:
            if not is_join(old):
                return instead.get(name_of(old), new)
            pairs = zip(old.operands, new.operands, strict=True)
            return type(new)(
                *(Repartition(each, 1) if self._is_of(was, instead) else each for was, each in pairs)
            )

        return rebuild_from(self._plan, change)

    def _is_of(self, expr: Any, groups: dict[str, Expr]) -> bool:
        return isinstance(expr, Expr) and self._rows.get(name_of(expr), ("", ""))[0] in groups


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


def _key_apart(rows: Any, keys: Iterable[Any], tables: TableFacts) -> tuple[Any, Any] | None:
    """Return a read, and its column that is one of the keys, if all rows of a key are in one partition."""
    for key in keys:
        origin, column = origin_of(rows, key)
        if (read := read_of(origin)) is None:
            continue
        if are_apart(tables.ranges(read, column)) and tables.are_alike(read):
            return read, column
    return None


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


def is_of_columns(expr: Any) -> bool:
    """Return whether an expression groups by columns, in no order, into a single partition."""
    if not isinstance(expr, _groupby.GroupByBase) or not isinstance(expr, _reductions.ApplyConcatApply):
        return False
    if expr.npartitions != 1 or expr.frame.npartitions == 1 or expr.frame.ndim != 2 or expr.sort:
        return False
    # Unobserved categories, of pandas or cudf, would be groups in each partition.
    dtypes = [None if isinstance(key, Expr) else expr.frame._meta.dtypes.get(key) for key in expr.by]
    return not any(dtype is None or type(dtype).__name__ == "CategoricalDtype" for dtype in dtypes)


def in_parts(expr: Any) -> Expr:
    """Return a groupby with as many partitions of groups as of rows, by Dask, in a shuffle."""
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


def is_join(expr: Any) -> bool:
    """Return whether an expression joins columns, for which neither order nor labels of rows matter."""
    return type(expr) in (Merge, SemiMerge) and joins_columns(expr)
