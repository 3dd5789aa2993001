"""Group and deduplicate rows where they are read, if the files of a table have different keys.

Tables are often written in the order of a key, such as the number of an order or of an event. All rows of a
key are then in one file, as the least and the largest value in the footer of each file tell. Rows can be
deduplicated and grouped by such a key in the partitions in which they are read. Dask would shuffle the one,
and for the other send the groups of all partitions to one worker, which groups them once more.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable
from typing import NamedTuple

from dask_gpurt.client.planning.reads import is_idle
from dask_gpurt.client.planning.rules.dependence import depends_on_partitions
from dask_gpurt.client.planning.rules.key_ranges import (
    are_alike,
    as_one_partition,
    chooses_or_numbers_rows,
    deduplicated,
    grouped,
    grouped_in_parts,
    is_join,
    is_row_by_row,
    keys_of_duplicates,
    keys_of_groups,
    origin_of,
    rows_of_groups,
    with_rows,
)
from dask_gpurt.client.planning.rules.partition_size import independence_of
from dask_gpurt.client.planning.table_facts import TableFacts
from dask_gpurt.dask_hooks.planning import Expr, name_of, rebuild

#: Counts operations by kind, `groups` or `duplicates`.
Count = Callable[[str, int], None]


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


def with_local_groups(
    plan: Expr, count: Count = lambda what, number: None, facts: TableFacts | None = None
) -> Expr:
    """Return a tuned plan that groups rows in the partitions in which they are read.

    Rows of which duplicates are dropped before that are deduplicated there, too. The groups of all partitions
    become a single partition, as they are in Dask's plan, before a join, and only there: its result depends
    neither on the order nor on the labels of their rows. Some operations on single rows between the groupby
    and the join are done before that, in each partition.

    Parameters
    ----------
    plan
        The plan of a computation, whose result goes to the client.
    count
        Called with what is done locally, and how often.
    facts
        Tells the ranges of keys in files, and notes on which of them the plan relies.
    """
    bare = rebuild(plan, lambda expr: expr.frame if is_idle(expr) else expr)
    if depends_on_partitions(bare):
        return plan
    facts = TableFacts() if facts is None else facts
    attempt = _Attempt(facts)
    try:
        changed = attempt.change_most(bare)
        if not (changes := attempt.changes):
            return plan
        known = [independence_of(each, facts) for each in (bare, attempt.change(bare, by_dask=True))]
        if None in known:
            return plan
    except OSError:  # a file has gone, which Dask finds out as it reads it
        return plan
    except (KeyError, TypeError):  # Dask cannot follow a note of how rows are divided through a renaming
        return plan
    for each in filter(None, known):
        facts.rely_on_dtypes(each)
    for read, column in attempt.relied:
        facts.rely_on_keys(read, column)
    for what, number in changes.items():
        count(what, number)
    return changed


class _Parts(NamedTuple):
    """Describe an expression with several partitions of groups.

    Operations on two of them need the same rows with the same labels, by which pandas aligns them.

    Attributes
    ----------
    groups
        The groupby.
    rows
        The latest operation by which rows have been chosen or numbered.
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

    Attributes
    ----------
    changes
        The number of expressions that the latest change has replaced, by kind.
    relied
        The columns of which no value is in two files, each as a read and the name of the column.
    """

    def __init__(self, facts: TableFacts) -> None:
        self.changes: dict[str, int] = {}
        self.relied: list[tuple[Expr, object]] = []
        self._facts = facts
        #: The groupbys that are left to Dask.
        self._excluded: set[int] = set()
        self._are_apart: dict[tuple[str, object], bool] = {}

    def change_most(self, plan: Expr) -> Expr:
        """Return a plan in which all groupbys are changed whose groups are only joined."""
        while True:
            try:
                return self.change(plan)
            except _NotForJoin as found:
                self._excluded.add(found.groups)

    def change(self, plan: Expr, *, by_dask: bool = False) -> Expr:
        """Return the changed plan.

        Parameters
        ----------
        by_dask
            Whether its groups have the same partitions, but are grouped by Dask, in a shuffle. Rows are then
            deduplicated as in the original plan.

        Raises
        ------
        _NotForJoin
            If a changed groupby has to be excluded.
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
        rows = rows_of_groups(expr)
        if (columns := keys_of_duplicates(rows)) is None:
            local = grouped(expr) if self._are_local(rows, keys) else None
        elif self._are_local(rows_of_groups(rows), [column for column in columns if column in keys]):
            local = grouped(with_rows(expr, deduplicated(rows)))
        else:
            local = None
        if local is None or not are_alike(local, expr):
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
                as_one_partition(each) if isinstance(each, Expr) and name_of(each) in self._parts else each
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
