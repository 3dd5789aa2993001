"""Find the rows of a left join that have no match, for which the right side needs each key only once.

There is no anti join in dask.dataframe. Programs join left, which repeats each row of the left side for all
its matches, and then keep the rows where a column of the right side is null, or where ``_merge`` (of
``indicator=True``) is ``left_only``. :mod:`.filters` follows that condition to the join, if all that use its
rows state it, and the right side becomes its distinct keys: only these are shuffled, and no row is repeated.

What it does not reason about
    Columns that may be null in the right side, so that a row with a match may look like one without: all but
    constants, and integers, booleans, strings and times of files that have no nulls by their footers.
    Joins by an index, or by keys that may be distinct: all but integers of files that have twice as many rows
    as there are integers between the least and the largest.
Why the result is the same
    A row of the left side is without a match whether the right side has the key once or more often. Rows with
    a match are left out, however many there are, and the others have nulls for all columns of the right side.
    Tasks check that the files that they read have no nulls there.
The figure
    ``docs/decisions/planning.md``.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from dask.dataframe.dask_expr import _expr
from dask.dataframe.dask_expr._reductions import DropDuplicates

from dask_gpurt.client.planning.reads import read_of
from dask_gpurt.client.planning.rules.needed_columns import column_of, keys_of_join, names_in_join, origin_of
from dask_gpurt.client.planning.table_facts import TableFacts
from dask_gpurt.dask_hooks.planning import Expr, collection_of, name_of, with_operand

#: The rows of the right side for each of its keys from which on it has each key only once.
WORTH_A_STEP = 2


class DistinctKeys(DropDuplicates):
    """Leave one row for each key, whichever: its other columns only tell whether there is one."""


def tested_column(join: Any, condition: Any) -> Hashable:
    """Return the column of a left join that a condition says is null, as it is without a match, or None."""
    kind, operands = type(condition), condition.operands
    if kind is _expr.EQ and join.indicator and isinstance(operands[1], str) and operands[1] == "left_only":
        column = column_of(join, operands[0])
        return column if column == _indicator(join) else None
    if kind is _expr.Invert and type(operands[0]) is _expr.NotNull:
        operands = operands[0].operands
    elif kind is not _expr.IsNa:
        return None
    column = column_of(join, operands[0])
    return column if column in names_in_join(join)[1] and column not in join.left.columns else None


def tells_matches(join: Any, column: Hashable, tables: TableFacts) -> bool:
    """Return whether a column is null for exactly those rows of a left join that have no match.

    Raises OSError if a file cannot be read.
    """
    return column == _indicator(join) or _is_full(join.right, names_in_join(join)[1][column], tables)


def _indicator(join: Any) -> Hashable:
    return "_merge" if join.indicator is True else join.indicator or None


def _is_full(frame: Any, column: Hashable, tables: TableFacts) -> bool:
    """Return whether a column has no nulls."""
    origin, name = origin_of(frame, column)
    if (read := read_of(origin)) is not None:
        return tables.is_full(read, name)
    return isinstance(origin, (bool, int, str))


def repeats_keys(join: Any, tables: TableFacts) -> bool:
    """Return whether the right side has so many rows that its keys, columns of integers in files, repeat.

    That is before it is filtered. With fewer rows, leaving each key once may take longer than it saves.

    Raises OSError if a file cannot be read.
    """
    keys = keys_of_join(join)[1]
    if not keys or join.left_index or join.right_index or any(isinstance(key, Expr) for key in keys):
        return False
    origins = [origin_of(join.right, key) for key in keys]
    reads = {name_of(read): read for origin, _ in origins if (read := read_of(origin)) is not None}
    if len(reads) != 1 or any(read_of(origin) is None for origin, _ in origins):
        return False
    (read,) = reads.values()
    return tables.rows_for_each(read, [name for _, name in origins]) >= WORTH_A_STEP


def with_distinct_keys(join: Any) -> Expr:
    """Return a left join whose right side has each key once."""
    found = collection_of(join.right).drop_duplicates(subset=keys_of_join(join)[1]).expr
    made: Any = DistinctKeys
    return with_operand(join, "right", made(*found.operands))
