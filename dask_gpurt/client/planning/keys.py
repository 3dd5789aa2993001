"""Identify what is planned: what may be kept, by which keys, and by which digests in other processes.

Three steps, each stricter than the one before:

- an expression is *plain* (:class:`Plain`) if it holds no data and is fully identified by its name. A frame,
  a future or a file system in an expression would live as long as the expression is cached; Arrow's local
  file system is accepted, since it has no state. A user's function is identified by module and name, and may
  change when the module is reloaded, so only functions and classes of trusted packages count;
- a *key* is equal only for equal operands (:func:`frozen`); empty frames have schemas
  (:mod:`~dask_gpurt.client.planning.catalogue.schema`);
- a *digest* (:func:`digest_of`) covers a key, and everything else that a result of planning depends on: the
  settings, the versions of libraries, and the source of the packages that plan. Equal digests imply equal
  keys. A key that names something which may be different in another process has no digest.

Decisions and their figures: ``docs/decisions/planning.md``.
"""

from __future__ import annotations

import datetime
import decimal
import hashlib
import pathlib
import pickle
import platform
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from enum import Enum
from functools import cache, lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pandas as pd
from dask._expr import SingletonExpr
from dask.utils import methodcaller
from pandas.api.extensions import ExtensionDtype
from pyarrow.fs import LocalFileSystem

from dask_gpurt.client.planning.catalogue.schema import SIMPLE_DTYPES, schema_of
from dask_gpurt.dask_hooks import planning
from dask_gpurt.dask_hooks.planning import Expr
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
#: Bytes of a digest.
DIGEST_BYTES = 20

#: Packages that planning depends on through their version, with the names under which they are distributed.
_VERSIONED = {
    **{name: (name,) for name in ("numpy", "pandas", "pyarrow", "fsspec", "toolz", "distributed")},
    **{name: (name, f"{name}-cu12", f"{name}-cu13") for name in ("cudf", "dask_cudf")},
}
#: Packages that plan, with the files that they do it in. Their version may stay the same while they change.
PLANNERS = {
    "dask": ("*.py", "dataframe/**/*.py"),
    "dask_cudf": ("**/*.py",),
    "dask_gpurt": ("client/**/*.py", "dask_hooks/*.py", "frames/*.py", "shuffle/*.py"),
}
#: Types whose values are written as in source code.
_WRITTEN = frozenset([types.NoneType, bool, int, float, str, bytes])
#: Types of functions and constants, which their module does not name.
_UNNAMED = (
    types.NoneType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.EllipsisType,
)

#: The kinds of dtypes of numpy that their string describes completely.
_SIMPLE_KINDS = frozenset("biufcmMOSU")
#: pandas makes the other one of aggregates with names, and looks up nothing that is not there.
_DICTS = (dict, defaultdict)


# ---- expressions that may be kept -------------------------------------------------------------------------


class Plain:
    """Track the expressions that hold only plain operands.

    ``may_change``: returns whether an expression with plain operands may change although its name stays the
    same.
    """

    def __init__(self, may_change: Callable[[Expr], bool] = lambda expr: False) -> None:
        self._may_change = may_change
        # By name, since == on expressions creates another expression.
        self._known: WeakValueDictionary[str, Expr] = WeakValueDictionary()

    def note(self, expr: Expr) -> bool:
        """Return whether an expression may be cached, and remember it if so."""
        if not self._holds_plain(expr):
            return False
        self._known[planning.name_of(expr)] = expr
        return True

    def __contains__(self, expr: Expr) -> bool:
        return planning.name_of(expr) in self._known or (
            not isinstance(expr, SingletonExpr) and self._holds_plain(expr)
        )

    def _holds_plain(self, expr: Expr) -> bool:
        plain = is_trusted(type(expr)) and all(map(self._is_plain, planning.operands_of(expr)))
        return plain and not self._may_change(expr)

    def _is_plain(self, value: Any) -> bool:
        if type(value) in _WRITTEN:
            return True
        if isinstance(value, Expr):
            return value in self
        if isinstance(value, _SCALARS):
            return True
        if isinstance(value, (tuple, frozenset)) or type(value) in (list, set):  # of which `own` makes copies
            return len(value) <= VALUES_LIMIT and all(map(self._is_plain, value))
        if type(value) in _DICTS:
            return len(value) <= VALUES_LIMIT and all(
                self._is_plain(key) and self._is_plain(item) for key, item in value.items()
            )
        if type(value) is np.ndarray:
            return value.nbytes <= ARRAY_LIMIT_BYTES and (
                not value.dtype.hasobject or all(map(self._is_plain, value.flat))
            )
        if type(value) is partial:
            return self._is_plain([value.func, value.args, value.keywords])
        if (deferred := planning.deferred_values(value)) is not None:
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
    if planning.deferred_values(value) is not None:
        return planning.with_deferred_values(value, own)
    if kind is partial:
        return partial(value.func, *map(own, value.args), **own(value.keywords))
    if kind not in (list, tuple, set, *_DICTS) or len(value) > VALUES_LIMIT:
        return value
    if kind in _DICTS:
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
    return type(value) is methodcaller  # of `dask.utils.M`, which calls a method by its name


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


# ---- digests ----------------------------------------------------------------------------------------------


class _UnstableError(ValueError):
    """A key names something that may be different in another process."""


def digest_of(*key: Hashable) -> bytes | None:
    """Return a digest that other processes of the same environment give the same key, and only that.

    ``key``: nested tuples of plain values, dtypes, and functions and classes of trusted packages. For a key
    with anything else the digest is None.
    """
    if (here := environment()) is None:
        return None
    text = [here]
    try:
        _write(key, text)
    except _UnstableError:
        return None
    return hashlib.blake2b("".join(text).encode(), digest_size=DIGEST_BYTES).digest()


def text_of_frame(value: Any) -> str | None:
    """Return what describes an empty frame completely; None for anything else.

    Dask hashes the values of its columns and of its index, by kernels on a GPU.
    """
    text: list[str] = []
    if not is_empty_frame(value) or (schema := schema_of(value)) is None:
        return None
    try:
        _write(schema.key, text)
    except _UnstableError:
        return None
    return "".join(text)


@cache
def environment() -> str | None:
    """Return a description of the libraries that planning depends on; None if one of them is not known."""
    found = [sys.version, platform.machine()]
    try:
        found += (
            f"{package} {_version_of(names)}" for package, names in _VERSIONED.items() if _is_there(package)
        )
        found += (f"{package} {_hash_of(package)}" for package in PLANNERS if _is_there(package))
    except (PackageNotFoundError, OSError):
        return None
    return "\n".join(found)


def _is_there(package: str) -> bool:
    return find_spec(package) is not None


def _version_of(names: Iterable[str]) -> str:
    """Return the version of a package; it may be distributed under several names."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise PackageNotFoundError(", ".join(names))


def _hash_of(package: str) -> str:
    """Return a hash of the source files of a package that plans."""
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for folder, file in sources_of(package):
        content = file.read_bytes()
        found.update(f"{file.relative_to(folder)} {len(content)} ".encode())
        found.update(content)
    return found.hexdigest()


def sources_of(package: str) -> Iterator[tuple[Path, Path]]:
    """Yield the source files of a package that plan, without its tests, each with the package's folder.

    Raises OSError if the package has no folder.
    """
    spec = find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise OSError(f"{package} has no folder")
    for folder in map(Path, folders):
        files = {file for pattern in PLANNERS[package] for file in folder.glob(pattern)}
        yield from ((folder, file) for file in sorted(files) if "tests" not in file.relative_to(folder).parts)


def _write(value: Any, text: list[str]) -> None:
    """Write a key such that different keys are written differently.

    Raises _UnstableError if another process may write a different key in the same way.
    """
    kind = type(value)
    if kind is tuple:
        text.append("(")
        for item in value:
            _write(item, text)
            text.append(",")
        text.append(")")
    elif kind in _WRITTEN:
        text.append(repr(value))
    else:
        text.append(f"<{_described(value)}>")


def _described(value: Any) -> str:
    """Describe a dtype, function, class or constant by its name."""
    if isinstance(value, np.dtype) and value.kind in _SIMPLE_KINDS:
        return f"dtype {value.str}"
    if isinstance(value, pd.ArrowDtype):
        return f"arrow {pickle.dumps(value.pyarrow_dtype, protocol=4).hex()}"
    if isinstance(value, (*SIMPLE_DTYPES, Enum)):
        kind: Any = type(value)
        return f"{_name_of(kind)} {value.name}"
    if type(value) is methodcaller:
        return f"method {value.method}"
    if isinstance(value, types.MethodType):
        return f"{_name_of(value.__self__)} {value.__name__}"
    if isinstance(value, type) and value in _UNNAMED:
        return str(value.__name__)
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, np.ufunc)):
        return _name_of(value)
    raise _UnstableError


@lru_cache(1_000)  # of functions and classes that modules have anyway
def _name_of(value: Any) -> str:
    """Return the name by which a function or class of a trusted package is found."""
    module = "numpy" if isinstance(value, np.ufunc) else str(getattr(value, "__module__", None))
    name = str(getattr(value, "__qualname__", None) or getattr(value, "__name__", None))
    # What is local to a function, and a lambda, are not found by their names.
    if not is_trusted(value) or _found(module, name) is not value:
        raise _UnstableError
    return f"{module}:{name}"


def _found(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
