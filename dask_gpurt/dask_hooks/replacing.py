"""Replace how Dask makes, names, describes and optimises expressions, where a planner stands in for it.

The replacements intercept the creation of each expression, each optimisation, and the metadata of the most
frequent operations. They are installed on Dask's classes, for all clients of the process.

Decisions and their figures: ``docs/decisions/planning.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from typing import Any

from dask.dataframe.dask_expr._collection import FrameBase
from dask.dataframe.dask_expr._expr import Binop
from dask.dataframe.dask_expr.io import parquet

from dask_gpurt.dask_hooks import parquet_files
from dask_gpurt.dask_hooks.making import FactsWritten, make_faster, token_of_read
from dask_gpurt.dask_hooks.patch import PatchSet, Wrap
from dask_gpurt.dask_hooks.seams import PLANNING

#: A replacement that gets the original as its first argument.
Replacement = Callable[..., Any]

#: The classes of collections, by what their metadata are.
_COLLECTIONS: dict[Hashable, Callable[[Any], Any]] = {}

#: The methods that compute the metadata of the operations that are described; others of the same name are
#: Dask's own affair.
_DESCRIBED = frozenset(seam.short for seam in PLANNING.seams if seam.attribute == "_meta")


def replace_planning(
    patches: PatchSet,
    *,
    made: Replacement,
    optimise: Replacement,
    metadata: Replacement,
    columns: Replacement,
    dimensions: Replacement,
    is_described: Callable[[Any], bool],
    kind_of: Callable[[Any], Hashable | None],
    names_index: Replacement,
    look_at_files: Replacement,
    name_read: Replacement,
    facts_written: FactsWritten,
    file_plans: int,
    operand: Callable[[Any], str | None],
) -> None:
    """Replace how expressions are created, optimised and described, and how reads of files are.

    ``made``: called as ``made(original, kind, *operands, **keywords)``; returns the expression.
    ``optimise``: called as ``optimise(original, expr, stage)``; returns the optimised expression.
    ``metadata``, ``columns``, ``dimensions``: called as ``metadata(original, expr)``; return the metadata of
    an expression, the labels of its columns, and the number of its dimensions.
    ``is_described``: returns whether an expression is known to be a frame or a series.
    ``kind_of``: returns what the class of the metadata is, where that is known; None otherwise.
    ``names_index``: called as ``names_index(original, frame, columns)``; returns whether columns of a join
    name an index.
    ``look_at_files``: called as ``look_at_files(original, expr)``; returns the facts that a read of Parquet
    files needs.
    ``name_read``: called as ``name_read(original, expr)``; returns the token of a read of Parquet files.
    ``facts_written``: see :data:`~dask_gpurt.dask_hooks.making.FactsWritten`.
    ``file_plans``: the number of sets of files and filters for which Dask caches footer statistics.
    ``operand``: returns what describes an operand completely, as a part of names; None to leave that to Dask.
    Raises UnsupportedError if one of these differs from the known one; nothing is replaced.
    """
    wraps: dict[Any, Wrap] = {
        PLANNING["__new__"]: lambda original: partial(made, original),
        PLANNING["optimize_until"]: lambda original: partial(optimise, original),
        PLANNING["ndim"]: lambda original: partial(dimensions, original),
        PLANNING["__dask_tokenize__"]: lambda original: partial(
            name_read, partial(token_of_read, original, facts_written)
        ),
        PLANNING["__init__"]: lambda original: partial(parquet_files.make_partition, original),
        PLANNING["_divisions"]: lambda original: partial(_divisions_of_binary, original, is_described),
    }
    for seam in PLANNING.seams:
        if seam.attribute == "columns":
            wraps[seam] = lambda original: partial(columns, original)
        if seam.attribute == "is_dataframe_like":
            wraps[seam] = lambda original: partial(_is_frame, original)
        if seam.name == f"{FrameBase.__module__}:new_collection":
            wraps[seam] = lambda original: partial(_collection, original, kind_of)
        if seam.attribute == "_dataset_info":
            wraps[seam] = lambda original: partial(look_at_files, original)
        if seam.name.endswith("_merge:_contains_index_name"):
            wraps[seam] = lambda original: partial(names_index, original)
        if seam.short in _DESCRIBED:
            wraps[seam] = partial(_where_own, seam.owner(), metadata)
    PLANNING.require()
    patches.replace_all(wraps)
    patches.add_item(vars(parquet), PLANNING["_CACHED_PLAN_SIZE"].attribute, file_plans)
    make_faster(patches, operand)


def observe_planning(patches: PatchSet, *, made: Replacement, optimise: Replacement) -> None:
    """Call functions as expressions are created and optimised, as in :func:`replace_planning`.

    Raises UnsupportedError if one of Dask's functions differs from the known one.
    """
    patches.replace_all(
        {
            PLANNING["__new__"]: lambda original: partial(made, original),
            PLANNING["optimize_until"]: lambda original: partial(optimise, original),
        }
    )


def _collection(original: Callable[[Any], Any], kind_of: Callable[[Any], Hashable | None], expr: Any) -> Any:
    """Return the collection of an expression, of which Dask would make metadata to find the class."""
    if (kind := kind_of(expr)) is None:
        return original(expr)
    if (of_kind := _COLLECTIONS.get(kind)) is not None:
        return of_kind(expr)
    collection = original(expr)
    _COLLECTIONS[kind] = type(collection)
    return collection


def _is_frame(original: Callable[[Any], bool], value: Any) -> bool:
    """Return whether a value is a frame; Dask would compute the dtypes of one to find out."""
    kind = type(value)
    is_known = kind.__name__ == "DataFrame" and kind.__module__.partition(".")[0] in ("pandas", "cudf")
    return is_known or original(value)


def _divisions_of_binary(
    original: Callable[[Any], Any], is_described: Callable[[Any], bool], expr: Any
) -> Any:
    """Return the divisions of an operation on two operands, of which Dask asks whether it is of an index."""
    if not is_described(expr):
        return original(expr)
    if expr._broadcastable and len(expr.dependencies()) == 2:
        return (expr.right if expr.left.ndim < expr.right.ndim else expr.left).divisions
    return super(Binop, expr)._divisions()


def _where_own(owner: type, replacement: Replacement, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Replace a computation of metadata where it is not part of that of a subclass."""

    def described(expr: Any) -> Any:
        kind: Any = type(expr)
        is_own = _owner_of_metadata(kind) is owner
        return replacement(original, expr) if is_own else original(expr)

    return described


@lru_cache(None)
def _owner_of_metadata(kind: Any) -> Any:
    return next(each for each in kind.__mro__ if "_meta" in vars(each))
