"""Join tables by their sizes, and not in the order in which a program names them.

Programs join large tables first and small ones later, or tables that share a nation before those that share
an order, and so move and multiply rows that later joins leave out. Here inner joins by columns whose rows are
only joined again are taken together with all that is done row by row in between. The tables are joined in the
order in which the fewest bytes are joined and moved, also small ones with each other first. Columns that have
to be equal because of joins, or of a condition ``a == b`` later on, are keys as soon as both are there.

The flow of a plan:

1. :class:`JoinOrder` makes joins by columns of those that look rows up by an index;
2. :mod:`.graph` finds joins whose rows are only joined again, and describes them without an order: tables,
   keys, conditions, and the columns of the result;
3. :mod:`.costs` says how many rows and values tables have, by the footers of their files, and finds the order
   that costs least, by dynamic programming over sets of tables;
4. :class:`JoinOrder` decides whether that is worth it, and says so, and :mod:`.graph` makes a plan of it.

What it does not reason about
    Joins of other kinds, of two indexes, or by floats; what happens to the result of such joins, which is a
    table for the others. More than eight tables: those that are joined first stay together.
Why the result is the same
    Inner joins find all combinations of rows for which keys are equal, or both null, in any order. A
    condition ``a == b`` is checked as well, since null is not equal to null. Keys have one dtype on both
    sides, in which equal values are the same. No result may depend on how rows are divided or in which order
    they are joined (:mod:`~.rules.dependence`), and tasks check on which dtypes of files that relies.
    ``tests/unit/client/planning/test_join_order.py`` compares random trees of joins.
The figure
    See ``docs/decisions/planning.md``.
"""

from __future__ import annotations

from typing import Any

from dask.dataframe.dask_expr import _expr
from dask.dataframe.dask_expr._merge import Merge

from dask_gpurt.client.planning.join_order.costs import Costs, Joined, RowEstimates, UnknownSizeError
from dask_gpurt.client.planning.join_order.graph import Building, JoinFinder, JoinGraph, OrderError, Tree
from dask_gpurt.client.planning.reads import parquet_reads
from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.client.planning.rules.dependence import numbered, rely_on_independence
from dask_gpurt.client.planning.rules.needed_columns import listed
from dask_gpurt.client.planning.rules.row_roots import RowRoots
from dask_gpurt.dask_hooks.planning import Expr, name_of, rebuild_from

#: What an order may cost at most, of what that of the program costs, to be taken: estimates are not exact.
WORTHWHILE = 0.8


class JoinOrder:
    """Join tables in the order in which the fewest bytes are joined and moved."""

    def apply(self, plan: Expr, facts: Facts) -> Expr:
        """Return a plan whose inner joins are ordered by sizes."""
        if sum(type(expr) is Merge for expr in plan.walk()) < 2:
            return plan
        bare, dependent = facts.bare(plan)
        if dependent:
            self._leave(facts, plan, f"since results depend on partitions: {dependent}")
            return plan
        changed = bare = by_columns(bare)
        try:
            if not (orders := self._orders(bare, facts)):
                return plan
            is_same = rely_on_independence(facts.tables, bare)
        except OSError as error:  # a file has gone, which Dask finds out as it reads it
            self._leave(facts, plan, f"since a table cannot be read: {error!r}")
            return plan
        if not is_same:
            self._leave(facts, plan, "since dtypes vary from file to file")
            return plan
        for graph, tree in orders:  # the last joins first: their tables are as they were
            changed = _with(changed, name_of(graph.join), Building(graph).result(tree))
        return changed

    def _leave(self, facts: Facts, plan: Expr, why: str) -> None:
        facts.note(self, name_of(plan), f"has its joins in the order of the program, {why}")

    def _orders(self, plan: Expr, facts: Facts) -> list[tuple[JoinGraph, Tree]]:
        """Return joins, and the orders in which their tables are joined, where these are others."""
        found = []
        roots, estimates = RowRoots(plan), RowEstimates(facts.tables)
        blocksize = max((each.blocksize for each in parquet_reads(plan).values()), default=0)
        finder = JoinFinder(roots)
        for part in finder.parts():
            name = name_of(part.joins[0])
            try:
                graph = finder.graph(part)
                costs = Costs(graph, estimates, roots, facts.sizes.of(blocksize)[1])
                now, best = costs.of_tree(graph.tree), costs.best()
            except (OrderError, UnknownSizeError) as error:
                facts.note(self, name, f"is joined in the order of the program: {error}")
                continue
            text = f"{len(graph.tables)} tables, which costs about {_mib(now)}, by sizes {_mib(best)}"
            is_worthwhile = best.cost <= now.cost * WORTHWHILE
            end = "ordered by sizes" if is_worthwhile else "left in the order of the program"
            facts.note(self, name, f"joins {text}: {end}", done=is_worthwhile)
            if is_worthwhile:
                found.append((graph, best.tree))
        return found


def _with(plan: Expr, name: str, expr: Expr) -> Expr:
    return rebuild_from(plan, lambda old, new: expr if name_of(old) == name else new)


def _mib(plan: Joined) -> str:
    return f"{plan.cost / 2**20:.1f} MiB"


# ---- lookups ---------------------------------------------------------------------------------------


def by_columns(plan: Expr) -> Expr:
    """Return a plan in which inner joins that look rows up by an index are joins by columns, as far as known.

    A lookup, or what a groupby returns, is a table like others then, and may be joined earlier or later. Not
    joins of two indexes, of several levels, by the index of the left side, and outer joins.

    The keys have one dtype, and joins match them by value, also nulls. What differs is labels: those of the
    left side without the change, numbers of joined rows with it. It is made only where the left side's are
    numbers of rows, of which no result of a plan is made that is independent of partitions.

    ``plan``: its results do not depend on partitions.
    """
    if not any(type(expr) is Merge and expr.right_index for expr in plan.walk()):
        return plan
    numbers = numbered(plan)

    def change(old: Any, new: Any) -> Any:
        is_lookup = type(old) is Merge and name_of(old.left) in numbers and _looks_up(old)
        return _by_column(new) if is_lookup else new

    return rebuild_from(plan, change)


def _looks_up(join: Any) -> bool:
    """Return whether an inner join looks up a column in the index of its right side."""
    left, right, keys = join.left, join.right, listed(join.left_on)
    if join.how != "inner" or not join.right_index or join.left_index or join.indicator or len(keys) != 1:
        return False
    index, (key,) = right._meta.index, keys
    return (
        not isinstance(key, Expr)
        and right.ndim == left.ndim == 2
        and all(len({*each.columns}) == len(each.columns) for each in (left, right, join))
        and key in list(left.columns)
        and key not in list(right.columns)  # pandas would return it thrice
        and index.nlevels == 1
        and index.name is not None
        and index.name not in list(right.columns)
        and bool(left._meta.dtypes[key] == index.dtype)
    )


def _by_column(join: Any) -> Any:
    label = "key"
    while label in [*join.left.columns, *join.right.columns]:
        label += "_"
    index: Any = _expr.ResetIndex(join.right)
    right = _expr.RenameFrame(index, {join.right._meta.index.name: label})
    method = join.shuffle_method
    keys = (listed(join.left_on), [label])
    made = Merge(join.left, right, "inner", *keys, suffixes=join.suffixes, shuffle_method=method)
    return _expr.Projection(made, list(join.columns))
