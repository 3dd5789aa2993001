"""Select the expressions that may be cached: they hold no data, and are fully identified by their names.

A frame, a future or a file system in an expression would live as long as the expression is cached; Arrow's
local file system is accepted, since it has no state. A user's function is identified by module and name, and
may change when the module is reloaded.
"""

from __future__ import annotations

import datetime
import decimal
import pathlib
import types
from collections.abc import Callable, Hashable
from enum import Enum
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pandas as pd
from pandas.api.extensions import ExtensionDtype
from pyarrow.fs import LocalFileSystem

from dask_gpurt.dask_hooks.planning import (
    Expr,
    deferred_values,
    is_method_name,
    is_shared,
    name_of,
    operands_of,
    with_deferred_values,
)
from dask_gpurt.frames.registry import LIBRARIES

#: Packages whose functions and classes do not change while a process runs.
TRUSTED = frozenset(
    [
        *("builtins", "functools", "operator", "_operator", "tlz", "toolz"),
        *("numpy", "pyarrow", "dask", "dask_gpurt"),
        *(name for library, row in LIBRARIES.items() for name in (library, *row.before)),
    ]
)
#: The most values in an operand, and the most bytes of an array. Larger operands count as data.
VALUES_LIMIT, ARRAY_LIMIT_BYTES = 10_000, 64 * 1024

_SCALARS = (
    bool | int | float | complex | str | bytes | None | slice | Enum | types.EllipsisType | decimal.Decimal
    | datetime.date | datetime.time | datetime.timedelta | pathlib.PurePath | np.generic | np.dtype
    | ExtensionDtype | pd.Timestamp | pd.Timedelta | type(pd.NaT) | type(pd.NA)
)  # fmt: skip


class Plain:
    """Track the expressions that hold only plain operands.

    Parameters
    ----------
    may_change
        Returns whether an expression with plain operands may change although its name stays the same.
    """

    def __init__(self, may_change: Callable[[Expr], bool] = lambda expr: False) -> None:
        self._may_change = may_change
        # By name, since == on expressions creates another expression.
        self._known: WeakValueDictionary[str, Expr] = WeakValueDictionary()

    def note(self, expr: Expr) -> bool:
        """Return whether an expression may be cached, and remember it if so."""
        if not self._holds_plain(expr):
            return False
        self._known[name_of(expr)] = expr
        return True

    def __contains__(self, expr: Expr) -> bool:
        return name_of(expr) in self._known or (not is_shared(expr) and self._holds_plain(expr))

    def _holds_plain(self, expr: Expr) -> bool:
        plain = is_trusted(type(expr)) and all(map(self._is_plain, operands_of(expr)))
        return plain and not self._may_change(expr)

    def _is_plain(self, value: Any) -> bool:
        if isinstance(value, Expr):
            return value in self
        if isinstance(value, _SCALARS):
            return True
        if isinstance(value, (tuple, frozenset)) or type(value) in (list, set):  # of which `own` makes copies
            return len(value) <= VALUES_LIMIT and all(map(self._is_plain, value))
        if type(value) is dict:
            return len(value) <= VALUES_LIMIT and all(
                self._is_plain(key) and self._is_plain(item) for key, item in value.items()
            )
        if type(value) is np.ndarray:
            return value.nbytes <= ARRAY_LIMIT_BYTES and (
                not value.dtype.hasobject or all(map(self._is_plain, value.flat))
            )
        if type(value) is partial:
            return self._is_plain([value.func, value.args, value.keywords])
        if (deferred := deferred_values(value)) is not None:
            return all(map(self._is_plain, deferred))
        return is_trusted(value) or is_empty_frame(value) or type(value) is LocalFileSystem


def own(value: Any) -> Any:
    """Return an operand that nobody changes in place: a copy, if it is a list, a dict, a set or an array.

    An expression that is cached is found by its name, which tells what its operands were when it was created.
    Operands that are too large to be cached are the same objects, as are those of any other type.
    """
    kind = type(value)
    if kind is np.ndarray:
        return value.copy() if value.nbytes <= ARRAY_LIMIT_BYTES else value
    if deferred_values(value) is not None:
        return with_deferred_values(value, own)
    if kind is partial:
        return partial(value.func, *map(own, value.args), **own(value.keywords))
    if kind not in (list, tuple, dict, set) or len(value) > VALUES_LIMIT:
        return value
    if kind is dict:
        return {key: own(item) for key, item in value.items()}
    copied = kind(map(own, value))
    # A tuple without anything to copy in it stays the same object.
    same = kind is tuple and all(new is old for new, old in zip(copied, value, strict=True))
    return value if same else copied


def is_empty_frame(value: Any) -> bool:
    """Return whether a value is the metadata of a frame: an empty frame of a known library."""
    kind = type(value)
    return kind.__name__ in ("DataFrame", "Series") and is_trusted(kind) and len(value) == 0


def is_trusted(value: Any) -> bool:
    """Return whether a value is a function or class that does not change while the process runs."""
    if isinstance(value, types.MethodType):
        return isinstance(value.__self__, type) and is_trusted(value.__self__) and is_trusted(value.__func__)
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, np.ufunc)):
        closed_over = getattr(value, "__closure__", None) or ()
        of = getattr(value, "__module__", None) or "numpy"  # ufuncs have no module
        return of.partition(".")[0] in TRUSTED and not closed_over
    return is_method_name(value)


def frozen(value: Any) -> Hashable | None:
    """Return a key that is equal only for equal operands; None if there is none.

    The type is part of the key, since 1, 1.0 and True are equal in Python, and floats are by their digits,
    since 0.0 and -0.0 are. Categorical dtypes have no key: they compare equal whatever the order of their
    categories.
    """
    if isinstance(value, (tuple, list)):
        items = tuple(map(frozen, value))
        return None if None in items else (type(value), items)
    if isinstance(value, dict):
        items = tuple(map(frozen, value.items()))
        return None if None in items else (dict, items)
    if isinstance(value, float):
        return (type(value), float(value).hex())
    if value is None or isinstance(value, (bool, int, str, bytes, Enum, np.dtype)):
        return (type(value), value)
    if type(value) is LocalFileSystem:  # its options are in the arguments by which it is pickled
        return (type(value), frozen(value.__reduce__()[1]))
    return (type(value), value) if is_trusted(value) else None
