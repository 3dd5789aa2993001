"""Remember the lines of the user's program that made joins, groups, sorts and reads.

Dask's optimiser rebuilds most expressions, with other names. So a line is found by what does not change: the
kind of an operation and its keys. Operations of the same kind by the same keys on several lines are told
apart only if their names stayed the same; otherwise all of these lines are given.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Hashable
from functools import cache
from types import CodeType
from typing import Any

from dask_gpurt.client.planning.packed import LRU
from dask_gpurt.dask_hooks.planning import Expr, name_of

#: The most operations whose lines are remembered.
LIMIT = 4_096
#: The most lines that are given for operations that cannot be told apart, the latest ones.
LINES = 3
#: The most frames between an expression and the line that made it.
DEPTH = 60
#: The most keys of an operation that are named.
MAX_KEYS = 6
#: Packages in which no line is the user's.
_LIBRARIES = sys.stdlib_module_names - {"__main__"} | {
    *("dask", "distributed", "dask_gpurt", "dask_cudf", "cudf", "pandas", "tornado", "tlz", "toolz"),
}


class Origins:
    """Remember where operations were made. Thread-safe."""

    def __init__(self) -> None:
        self._lines: LRU[tuple[str, ...]] = LRU(LIMIT)

    def note(self, expr: Expr, optimiser: CodeType) -> None:
        """Remember the line that makes an expression, if it is of a kind that has keys.

        ``optimiser``: the code of the function below which no expression is the user's.
        """
        if (kind := kind_of(expr)) is not None and (line := _line(optimiser)) is not None:
            key = (kind, *_keys(kind, expr))
            before = self._lines.get(key) or ()
            if line not in before:
                self._lines.put(key, (*before, line)[-LINES:])

    def of(self, expr: Expr) -> str:
        """Return the lines that made an expression, as in ``query.py:12``; empty if unknown."""
        kind = kind_of(expr)
        return "" if kind is None else " or ".join(self._lines.get((kind, *_keys(kind, expr))) or ())

    def of_shuffles(self, expr: Expr, plan: Expr) -> dict[str, str]:
        """Say for which operation, made in which line, shuffles of a plan are, by the names in their keys.

        ``expr``: what the user computes, before it was planned. Dask plans what it persists twice, and the
        second time has none of the user's operations.
        """
        made: dict[str, str] = {}
        for each in expr.walk():
            if kind_of(each) not in (None, "read") and (line := self.of(each)):
                what = named(each)
                made.setdefault(_shuffled(what), f"{what} ({line})")
        labels = ((each, each.label) for each in plan.walk() if hasattr(type(each), "label"))
        # Those of others are operands, often None.
        found = (
            (name_of(each), made.get(_shuffled(label))) for each, label in labels if isinstance(label, str)
        )
        return {name: what for name, what in found if what is not None}


def kind_of(expr: Any) -> str | None:
    """Return the kind of an operation that users know by a name; None for any other."""
    return _kind_of(type(expr).__mro__)


@cache
def _kind_of(classes: tuple[type, ...]) -> str | None:
    names = {each.__name__ for each in classes}
    for kind, of_kind in _KINDS.items():
        if names & of_kind:
            return kind
    return None


#: Dask's classes by the word for what they do. Lowered operations derive from those that they stand for.
_KINDS = {
    "apply": {
        *("Apply", "Map", "MapPartitions", "ApplyOnColumns"),
        *("GroupByApply", "GroupByTransform", "GroupByUDFBlockwise"),
    },
    "join": {"Merge"},
    "sort": {"SortValues"},
    "set_index": {"SetIndex"},
    "group": {"GroupByBase"},
    "deduplicate": {"DropDuplicates"},
    "shuffle": {"RearrangeByColumn"},
    "read": {"ReadParquet", "ReadCSV", "FromMap"},
}
#: What tells operations of a kind apart, and stays the same as a plan is optimised.
_KEYS = {
    "apply": ("function", "func"),
    "join": ("how", "left_on", "right_on"),
    "sort": ("by",),
    "set_index": ("_other",),
    "deduplicate": ("subset",),
    "shuffle": ("partitioning_index",),
    "read": ("path",),
}


def _keys(kind: str, expr: Any) -> tuple[Hashable, ...]:
    if kind == "group":
        return tuple(map(repr, expr.by))
    return tuple(repr(_operand(expr, name)) for name in _KEYS[kind] if name in expr._parameters)


def _line(optimiser: CodeType) -> str | None:
    frame = inspect.currentframe()
    for _ in range(DEPTH):
        if frame is None or frame.f_code is optimiser:
            return None
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return None


# ---- names for users --------------------------------------------------------------------------------


def _shuffled(label: str) -> str:
    """Return by what rows are shuffled. A rule may have made another kind of join of the user's."""
    _, joined, keys = label.rpartition(" join on ")
    return f"join on {keys}" if joined else label.partition(" by ")[2] or label


def named(expr: Any) -> str:
    """Name an operation with its keys, as its user would."""
    kind = kind_of(expr)
    if kind == "join":
        left, right = (listed(_operand(expr, name)) for name in ("left_on", "right_on"))
        by = left if left and left == right else f"{left or 'index'} = {right or 'index'}"
        return f"{_operand(expr, 'how') or 'asof'} join on {by}"
    if kind == "group":
        return f"group by {listed(list(getattr(expr, 'by', ())))}"
    if kind == "sort":
        return f"sort by {listed(expr.by)}"
    if kind in ("set_index", "shuffle", "deduplicate"):
        by = listed(expr.operand(_KEYS[kind][0]))
        return f"{kind} by {by}" if by else kind
    if kind == "apply":
        by = f" by {listed(list(expr.by))}" if hasattr(expr, "by") else ""
        return f"apply {_function(expr)}{by}"
    return kind or type(expr).__name__


def _operand(expr: Any, name: str) -> Any:
    """Return an operand; None for a parameter that a class lacks, which Dask would look for as a column."""
    return expr.operand(name) if name in expr._parameters else None


def _function(expr: Any) -> str:
    """Return the name of the user's function that an operation calls."""
    found = (getattr(getattr(expr, name, None), "__name__", None) for name in ("function", "func", "arg"))
    return next(filter(None, found), "a function")


def listed(keys: Any) -> str:
    """Return the names of keys, of one or of several."""
    keys = keys if isinstance(keys, (list, tuple)) else [] if keys is None else [keys]
    names = [str(key.columns[0] if isinstance(key, Expr) and key.columns else key) for key in keys]
    return ", ".join(names[:MAX_KEYS]) + (
        f" and {len(names) - MAX_KEYS} more" if len(names) > MAX_KEYS else ""
    )
