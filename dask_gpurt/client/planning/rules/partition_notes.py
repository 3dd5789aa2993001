"""Find out by which columns the partitions of an expression are divided, for certain.

Dask notes by which columns a shuffle has divided rows, so that a groupby or a join by these need not shuffle
again. Some of its notes are false, and such a groupby repeats groups, such a join loses rows: notes of joins
that send one side to all partitions of the other, of joins that give a noted name to another column by
suffixes or keep unmatched rows, of columns that were renamed or assigned anew, and of hashes modulo another
number of partitions. So the runtime derives them itself, and Dask's are not used.

What it does not reason about
    Divisions by values of operations that it does not know, or by keys that are computed: these count as
    unknown, and rows are shuffled once more. Whether shuffling once more would take less time.
Why the result is the same
    Each operation has a guarantee of which rows stay together (``_KEEP_ROWS``, relabelling, joins by kind),
    with random programs as tests; without one a shuffle stays.
The figure
    Rows, not seconds: Dask's notes repeat groups and lose rows of joins
    (``docs/reference/where-dask-is-wrong.md``).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import pandas as pd
from dask._expr import Expr
from dask.dataframe.dask_expr import _expr, _groupby, _reductions
from dask.dataframe.dask_expr._merge import BlockwiseMerge, BroadcastJoin, HashJoinP2P, Merge
from dask.dataframe.dask_expr._repartition import Repartition, RepartitionToFewer
from dask.dataframe.dask_expr._shuffle import RearrangeByColumn, ShuffleBase
from dask.dataframe.utils import UNKNOWN_CATEGORIES

from dask_gpurt.client.planning.operations import (
    KEEPING,
    RELABELLING,
    dtype_in,
    dtypes_of,
    index_of,
    is_no_operation,
    is_of_pandas,
    kind_of,
)
from dask_gpurt.client.planning.rules.needed_columns import listed, names_in_join

logger = logging.getLogger(__name__)

#: Stands for the whole index among the columns of a division.
INDEX: Any = "<index>", object()

#: Operations that leave each row in its partition, with its values and its index.
_KEEP_ROWS = frozenset(
    [*KEEPING, _expr.ArrowStringConversion, _expr.ClearDivisions, _expr.DropDuplicatesBlockwise]
)
#: The kinds of joins whose result has each row of the left or of the right side as it was.
_KEEP_LEFT, _KEEP_RIGHT = frozenset(["inner", "left", "leftsemi"]), frozenset(["inner", "right"])
#: The attribute of an expression that keeps its divisions.
_KNOWN = "_gpurt_divisions"

#: How the hash of each key depends on its dtype; None where it depends on more than that.
Hashes = tuple[str | None, ...]


class Division(NamedTuple):
    """Describe how rows are divided: those that are alike in some columns are in one partition.

    ``columns``: labels of columns, or of levels of the index.
    ``hashed``: how they were hashed, if Dask's hash of them, modulo the number of partitions, is the number
    of the partition; else None.
    """

    columns: tuple[Any, ...]
    hashed: Hashes | None


# ---- what relies on divisions ----------------------------------------------------------------------


def is_aligned(join: Any, side: Any, on: Any) -> bool:
    """Return whether the rows of one side of a join are where the hashes of the other side's keys will be."""
    is_left = side._name == join.left._name and on == join.left_on
    columns = _keys(on, join.left_index if is_left else join.right_index)
    own, other = hashes_of_keys(join)
    hashed = other if is_left else own
    wanted = Division(columns, hashed)
    aligned = any(found == wanted for found in divisions(side) if found.hashed is not None)
    _log(join, f"rows of the {'left' if is_left else 'right'} side", wanted, side, is_shuffled=not aligned)
    return aligned


def needs_no_shuffle(join: Any) -> bool:
    """Return whether Dask joins as partitions are: by known divisions, or since one side is one partition."""
    return bool(join._is_single_partition_broadcast or (join.merge_indexed_left and join.merge_indexed_right))


def are_together(expr: Any) -> bool:
    """Return whether all rows of a group, or all duplicates, are in one partition already."""
    keys = _keys_of_groups(expr)
    together = any(keys.issuperset(found.columns) for found in divisions(expr.frame))
    _log(expr, "its rows", sorted(keys, key=str), expr.frame, is_shuffled=not together)
    return together


def _log(expr: Any, what: str, wanted: object, frame: Any, *, is_shuffled: bool) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        text = "need a shuffle" if is_shuffled else "need no shuffle"
        known = sorted(map(str, divisions(frame)))
        logger.debug("%s: %s %s by %s; divided by %s", expr._name, what, text, wanted, known)


def groups_need_shuffle(expr: Any) -> bool:
    """Return whether a function that is applied to groups needs a shuffle; known divisions may suffice."""
    frame = expr.frame
    by_index = any(_groupby._contains_index_name(index_of(frame).name, key) for key in expr.by)
    return not are_together(expr) and (any(each is None for each in frame.divisions) or not by_index)


def _keys_of_groups(expr: Any) -> set[Any]:
    """Return the columns by which rows are grouped or deduplicated; none if they are computed."""
    if not hasattr(expr, "by"):
        return set(listed(expr.split_by or expr.frame.columns))
    return set() if any(isinstance(key, Expr) for key in expr.by) else set(expr._by_columns)


# ---- hashes ----------------------------------------------------------------------------------------


def hash_alike(join: Any) -> bool:
    """Return whether equal keys of both sides of a join have equal hashes, whatever the values."""
    left, right = hashes_of_keys(join)
    return left == right and None not in left


def hashes_of_keys(join: Any) -> tuple[Hashes, Hashes]:
    """Return how Dask hashes the keys of the left and of the right side of a join."""
    return _hashes(join.left, _names(join, "left")), _hashes(join.right, _names(join, "right"))


def _hashes(frame: Any, columns: Iterable[Any]) -> Hashes:
    return tuple(_hash_of(frame, column) for column in columns)


def _hash_of(frame: Any, column: Any) -> str | None:
    """Return how Dask hashes a column or an index: equal names mean equal hashes of equal values."""
    if column is not INDEX and frame.ndim == 2 and list(frame.columns).count(column) == 1:
        dtype = dtype_in(frame, column)
    elif (index := index_of(frame)).nlevels == 1:
        dtype = index.dtype
    else:
        return None
    is_text_of_cudf = str(dtype) == "object" and not is_of_pandas(frame)
    return "text" if is_text_of_cudf else _hash_of_dtype(dtype)


def _hash_of_dtype(dtype: Any) -> str | None:
    if isinstance(dtype, pd.CategoricalDtype):
        known = dtype.categories is not None and UNKNOWN_CATEGORIES not in dtype.categories
        return _hash_of_dtype(dtype.categories.dtype) if known and len(dtype.categories) else None
    if str(dtype) in ("category", "object") or isinstance(dtype, pd.IntervalDtype):
        return None  # the first is cudf's, the second may hold 1 and 1.0, the third Dask cannot hash
    if pd.api.types.is_numeric_dtype(dtype):
        return "number"  # Dask casts these to float64
    if isinstance(dtype, pd.StringDtype) or str(dtype) in ("string[pyarrow]", "large_string[pyarrow]"):
        return "text"
    if isinstance(dtype, pd.DatetimeTZDtype):
        return f"datetime64[{dtype.unit}]"
    return str(dtype)


# ---- divisions -------------------------------------------------------------------------------------


def divisions(expr: Any) -> frozenset[Division]:
    """Return all that is known of how the rows of an expression are divided."""
    found: frozenset[Division] | None = vars(expr).get(_KNOWN)
    if found is None:
        if found := frozenset(_derived(expr)):
            # Those by labels that one column, or one level of the index, has.
            labels = Counter([*expr.columns, *index_of(expr).names])
            labels[INDEX] = 1
            found = frozenset(each for each in found if all(labels[column] == 1 for column in each.columns))
        vars(expr)[_KNOWN] = found
    return found


def _derived(expr: Any) -> Iterable[Division]:
    kind = kind_of(expr)
    if isinstance(expr, Merge):
        return _of_join(expr)
    if isinstance(expr, ShuffleBase):
        return _of_shuffle(expr)
    if isinstance(expr, _reductions.ApplyConcatApply):
        return _of_groups(expr)
    if kind in (Repartition, RepartitionToFewer):
        return _of_fewer(expr)
    if kind in RELABELLING:
        return _under(divisions(expr.frame), _positions(expr.frame.columns, expr.columns))
    if kind is _expr.ResetIndex:
        return [each for each in divisions(expr.frame) if INDEX not in each.columns]
    if kind is _expr.Assign:
        return [each for each in divisions(expr.frame) if not {*each.columns} & {*expr.keys}]
    if kind is _expr.RenameAxis:
        return [each for each in divisions(expr.frame) if {*each.columns} <= {INDEX, *expr.columns}]
    if kind in _KEEP_ROWS or is_no_operation(expr):
        return divisions(expr.frame)
    return ()


def _positions(before: list[Any], after: list[Any]) -> dict[Any, Any]:
    """Return the new label of each column; of the index, only the whole is known."""
    return {**dict(zip(before, after, strict=True)), INDEX: INDEX} if len(before) == len(after) else {}


def _under(found: Iterable[Division], names: Mapping[Any, Any]) -> Iterator[Division]:
    """Yield divisions under other names, without those by columns that have none."""
    for columns, hashed in found:
        if all(column in names for column in columns):
            yield Division(tuple(names[column] for column in columns), hashed)


def _weak(found: Iterable[Division]) -> Iterator[Division]:
    return (Division(each.columns, None) for each in found)


def _of_fewer(expr: Any) -> Iterable[Division]:
    """Return the divisions of a frame whose neighbouring partitions are combined, if they are."""
    if expr.operand("new_partitions") is None or expr.npartitions > expr.frame.npartitions:
        return ()
    found = divisions(expr.frame)
    return found if expr.npartitions == expr.frame.npartitions else _weak(found)


def _of_shuffle(expr: Any) -> Iterable[Division]:
    keys = expr.original_partitioning_index or expr._partitioning_index
    by_index = "index_shuffle" in expr._parameters and expr.index_shuffle  # concrete shuffles have it not
    if not isinstance(keys, list) or by_index or any(isinstance(key, Expr) for key in keys):
        return ()
    if type(expr) is not RearrangeByColumn and expr.original_partitioning_index is None:
        return ()  # by a column of targets, as for a sort
    return [_hashed(expr.frame, tuple(keys), alike=not hashes_values(expr))]


def hashes_values(shuffle: Any) -> bool:
    """Return whether rows are divided by a hash of the values of keys, not by Dask's, which dtypes change."""
    return any(getattr(each, "hashes_values", False) for each in (shuffle, shuffle.frame))


def _hashed(frame: Any, columns: tuple[Any, ...], *, alike: bool = True) -> Division:
    hashes = _hashes(frame, columns)
    return Division(columns, hashes if alike and None not in hashes else None)


def _of_groups(expr: Any) -> Iterable[Division]:
    """Return the divisions of groups or of distinct rows, by their keys."""
    is_known = isinstance(expr, (_groupby.GroupByBase, _reductions.DropDuplicates))
    keys = _keys_of_groups(expr) if is_known and expr.should_shuffle else set()
    dtypes = zip(expr.frame.columns, dtypes_of(expr.frame), strict=True)
    if not keys or any(name in keys and str(dtype) == "category" for name, dtype in dtypes):
        return ()  # each partition may have all categories
    if are_together(expr):
        found = [each for each in divisions(expr.frame) if keys.issuperset(each.columns)]
        return found if expr.npartitions == expr.frame.npartitions else _weak(found)
    as_many = expr.split_out is True or expr.split_out >= expr.frame.npartitions
    columns = tuple(listed(expr.split_by or expr.frame.columns))
    return [_hashed(expr.frame, columns, alike=as_many)]


# ---- divisions of joins ----------------------------------------------------------------------------


def _of_join(join: Any) -> Iterator[Division]:
    left, right = _divisions_of_sides(join)
    index = {INDEX: INDEX} if join.left_index and join.right_index else {}
    left_names, right_names = (
        {old: new for new, old in names.items()} | index for names in names_in_join(join)
    )
    if join.how in _KEEP_LEFT:
        yield from _under(left, left_names)
    if join.how in _KEEP_RIGHT:
        yield from _under(right, right_names)
    if join.how == "outer" and _names(join, "left") == _names(join, "right"):
        shared = (each for each in left & right if each.columns == _names(join, "left"))
        yield from _under(shared, left_names)


def _divisions_of_sides(join: Any) -> tuple[frozenset[Division], frozenset[Division]]:
    """Return how the rows of either side are divided when they are joined."""
    nothing = frozenset[Division]()
    if isinstance(join, BlockwiseMerge) or (type(join) is Merge and join._is_single_partition_broadcast):
        number = max(join.left.npartitions, join.right.npartitions)
        sides = (join.left, join.right)
        left, right = (divisions(side) if side.npartitions == number else nothing for side in sides)
        return left, right
    if isinstance(join, BroadcastJoin) or (not isinstance(join, HashJoinP2P) and join.is_broadcast_join):
        if type(join) is Merge and join.operand("_npartitions") is not None:
            return nothing, nothing  # the other side is repartitioned
        at_left = join.broadcast_side == "left"
        return (nothing, divisions(join.right)) if at_left else (divisions(join.left), nothing)
    if type(join) is Merge and join.merge_indexed_left and join.merge_indexed_right:
        return nothing, nothing
    alike = hash_alike(join)
    return (
        frozenset([_hashed(join.left, _names(join, "left"), alike=alike)]),
        frozenset([_hashed(join.right, _names(join, "right"), alike=alike)]),
    )


def _names(join: Any, side: str) -> tuple[Any, ...]:
    """Return the labels of the keys of a side."""
    return _keys(getattr(join, f"{side}_on"), getattr(join, f"{side}_index"))


def _keys(on: Any, by_index: bool) -> tuple[Any, ...]:
    return (INDEX,) if by_index else tuple(listed(on))
