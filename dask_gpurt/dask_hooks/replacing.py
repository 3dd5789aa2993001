"""Replace how Dask makes, names, describes and optimises expressions, where a planner stands in for it.

The replacements intercept the creation of each expression, each optimisation, and the metadata of the most
frequent operations. They are installed on Dask's classes, for all clients of the process.

Decisions and their figures: ``docs/decisions/planning.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache, partial
from typing import Any

from dask.dataframe.dask_expr._expr import Binop
from dask.dataframe.dask_expr.io import parquet

from dask_gpurt.dask_hooks.comparison import Seam
from dask_gpurt.dask_hooks.patch import PatchSet, Wrap
from dask_gpurt.dask_hooks.seams import PLANNING

#: A replacement that gets the original as its first argument.
Replacement = Callable[..., Any]
#: Returns what the class of the metadata of an expression is, where its schema is known; None otherwise.
KindOf = Callable[[Any], Hashable | None]

#: The classes of collections, by what their metadata are.
_COLLECTIONS: dict[Hashable, Callable[[Any], Any]] = {}


def replace_planning(
    patches: PatchSet, replacements: Mapping[str, Replacement], kind_of: KindOf, file_plans: int
) -> None:
    """Replace how expressions are created, optimised and described, and how reads of files are.

    ``replacements``: by their names in the seam, for all classes and modules that have one. In place of
    ``_meta`` the metadata of those operations that are described; others of the name are Dask's own affair.
    ``file_plans``: the number of sets of files and filters for which Dask caches footer statistics.
    Raises UnsupportedError if one of these differs from the known one; nothing is replaced.
    """
    known: dict[str, Replacement] = {
        "_divisions": partial(_divisions_of_binary, kind_of),
        "is_dataframe_like": _is_frame,
        "new_collection": partial(_collection, kind_of),
        **replacements,
    }

    def wrap(seam: Seam) -> Wrap:
        replacement = known[seam.attribute]
        if seam.attribute == "_meta":
            return partial(_where_own, seam.owner(), replacement)
        return lambda original: partial(replacement, original)

    PLANNING.require()
    patches.replace_all({seam: wrap(seam) for seam in PLANNING.seams if seam.attribute in known})
    patches.add_item(vars(parquet), PLANNING["_CACHED_PLAN_SIZE"].attribute, file_plans)


def observe_planning(patches: PatchSet, *, made: Replacement, optimise: Replacement) -> None:
    """Call functions as expressions are created and optimised: with the original, and what that gets.

    Raises UnsupportedError if one of Dask's functions differs from the known one.
    """
    patches.replace_all(
        {
            PLANNING["__new__"]: lambda original: partial(made, original),
            PLANNING["optimize_until"]: lambda original: partial(optimise, original),
        }
    )


def _collection(kind_of: KindOf, original: Callable[[Any], Any], expr: Any) -> Any:
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


def _divisions_of_binary(kind_of: KindOf, original: Callable[[Any], Any], expr: Any) -> Any:
    """Return the divisions of an operation on two operands, of which Dask asks whether it is of an index."""
    if kind_of(expr) is None:  # else it is no index and no value
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
