"""Digest the keys of planning, so that other processes find what one has planned.

A digest covers the key, and everything else that a result of planning depends on: the settings, the versions
of libraries, and the source of the packages that plan. Equal digests imply equal keys. A key that names
something which may be different in another process, such as a function of the user's, has no digest.

Decisions and their figures: ``docs/decisions/planning.md``.
"""

from __future__ import annotations

import hashlib
import pickle
import platform
import sys
import types
from collections.abc import Hashable, Iterable, Iterator
from enum import Enum
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dask_gpurt.client.planning.operands import is_trusted
from dask_gpurt.client.planning.schemas import SIMPLE_DTYPES
from dask_gpurt.dask_hooks.planning import is_method_name

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
_PLAIN = frozenset([types.NoneType, bool, int, float, str, bytes])
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


class _UnstableError(ValueError):
    """A key names something that may be different in another process."""


def digest_of(*key: Hashable) -> bytes | None:
    """Return a digest that other processes of the same environment give the same key, and only that.

    Parameters
    ----------
    key
        Nested tuples of plain values, dtypes, and functions and classes of trusted packages. For a key with
        anything else the digest is None.
    """
    if (here := environment()) is None:
        return None
    text = [here]
    try:
        _write(key, text)
    except _UnstableError:
        return None
    return hashlib.blake2b("".join(text).encode(), digest_size=DIGEST_BYTES).digest()


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

    Raises
    ------
    OSError
        If the package has no folder.
    """
    spec = find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise OSError(f"{package} has no folder")
    for folder in map(Path, folders):
        files = {file for pattern in PLANNERS[package] for file in folder.glob(pattern)}
        yield from ((folder, file) for file in sorted(files) if "tests" not in file.parts)


def _write(value: Any, text: list[str]) -> None:
    """Write a key such that different keys are written differently.

    Raises
    ------
    _UnstableError
        If another process may write a different key in the same way.
    """
    kind = type(value)
    if kind is tuple:
        text.append("(")
        for item in value:
            _write(item, text)
            text.append(",")
        text.append(")")
    elif kind in _PLAIN:
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
    if is_method_name(value):
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
