"""Make expressions as Dask does, with the same names, in less time.

The optimiser makes some thousand expressions for a query, each named by a hash of its operands. Most of these
are other expressions, labels and numbers, of which Dask finds out one by one that they are nothing special.

Decisions and their figures: ``docs/decisions/planning.md``.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import Any

from dask._expr import Expr, _unpack_collections
from dask.tokenize import _ENSURE_DETERMINISTIC, _IDENTITY_DISPATCH, normalize_object, normalize_token
from dask.typing import no_default
from dask.utils import funcname, methodcaller

from dask_gpurt.dask_hooks.comparison import differences
from dask_gpurt.dask_hooks.patch import PatchSet
from dask_gpurt.dask_hooks.seams import MAKING

#: Types whose values are hashed as they are written.
PLAIN = frozenset([NoneType, bool, int, float, str])
#: Stands for no value.
_NEITHER: Any = object()
#: The most levels of lists, tuples and dicts in an operand; what contains itself is left to Dask.
_MOST_LEVELS = 8
#: Types of which each value is pickled to be hashed.
_PICKLED = frozenset([type, FunctionType, BuiltinFunctionType, methodcaller, type(no_default)])
#: The packages whose values of these types do not change while a process runs.
_PACKAGES = frozenset(["dask", "dask_cudf", "dask_gpurt", "operator", "_operator"])
#: What Dask hashes of those, and as it is written, as a part of the name of each expression.
_TOKENS: dict[Any, tuple[Any, str]] = {}

#: Writes what Dask hashes of a value of any other type.
Other = Callable[[Any], str]
#: Takes facts about files, and a function that writes them; returns what has been written of the same ones.
FactsWritten = Callable[[Any, Callable[[], str]], str]


class _TooDeepError(Exception):
    """An operand has too many levels."""


def make_faster(patches: PatchSet, described: Callable[[Any], str | None] = lambda value: None) -> None:
    """Replace how expressions are made and named, if this version of Dask is known.

    They are the same, but for the names of those of which an operand is described.

    ``described``: returns what describes an operand completely; None to leave that to Dask.
    """
    if differences(MAKING.seams):
        return
    patches.replace_all(
        {
            MAKING["__new__"]: lambda original: partial(_new, original),
            MAKING["__dask_tokenize__"]: lambda original: partial(
                _token, original, partial(_described_or_strict, described)
            ),
            MAKING["_tokenize"]: lambda original: partial(_tokenize, original),
        }
    )
    patches.add_item(normalize_token._lookup, type, token_of_class)


def _new(
    original: Callable[..., Any], kind: Any, *given: Any, _determ_token: Any = None, **named: Any
) -> Any:
    """Make an expression; what is not an expression, a label or a number may be a collection."""
    if named:
        return original(kind, *given, _determ_token=_determ_token, **named)
    made: Any = object.__new__(kind)
    operands = [
        each if type(each) in PLAIN or isinstance(each, Expr) else _unpack_collections(each) for each in given
    ]
    if len(given) < len(parameters := kind._parameters):
        operands += map(kind._defaults.__getitem__, parameters[len(given) :])
    vars(made).update(_determ_token=_determ_token, operands=operands)
    made._name  # noqa: B018  # which Dask computes at once
    return made


def _token(original: Callable[[Any], str], other: Other, expr: Any) -> str:
    """Return the hash that the name of an expression ends with."""
    if not (token := expr._determ_token):
        try:
            token = expr._determ_token = _hash_of([type(expr), *expr.operands], other)
        except _TooDeepError:
            return original(expr)
    found: str = token
    return found


def token_of_read(original: Callable[[Any], str], facts_written: FactsWritten, expr: Any) -> str:
    """Return the hash that the name of a read of files ends with, of which facts about these are a part.

    Those are hundreds of values, which the reads of all selections of columns share.
    """
    if not (token := expr._determ_token):
        values = [funcname(type(expr)), expr.checksum, *expr.operands[:-1]]  # has collected the facts now
        at = 2 + expr._parameters.index("_dataset_info_cache")
        if at >= len(values):  # on Arrow's file systems Dask leaves them out
            return original(expr)
        try:
            facts = facts_written(values[at], lambda: _written(values[at], 0, _strict))
            before, after = values[:at], values[at + 1 :]
            written = [_written(each, 0, _strict) for each in (*before, *after)]
        except _TooDeepError:
            return original(expr)
        written.insert(at, facts)
        token = expr._determ_token = _md5_of(f"({', '.join(written)})")
    found: str = token
    return found


def _tokenize(original: Callable[..., str], *args: Any, **kwargs: Any) -> str:
    """Return the hash of any values."""
    try:
        return original(*args, **kwargs) if kwargs else _hash_of(args, _normalized)
    except _TooDeepError:
        return original(*args)


def _hash_of(values: Sequence[Any], other: Other) -> str:
    return _md5_of(_written_items(values, 0, other))


def _md5_of(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def _normalized(value: Any) -> str:
    return repr(value if isinstance(value, _IDENTITY_DISPATCH) else normalize_token(value))


def _described_or_strict(described: Callable[[Any], str | None], value: Any) -> str:
    """Write what describes a value, or what Dask hashes, which is an error if it differs each time."""
    text = described(value)
    return _strict(value) if text is None else text


def _strict(value: Any) -> str:
    if _ENSURE_DETERMINISTIC.get(_NEITHER) is not _NEITHER:  # part of what is hashed in a way of its own
        return _normalized(value)
    strict = _ENSURE_DETERMINISTIC.set(True)
    try:
        return _normalized(value)
    finally:
        _ENSURE_DETERMINISTIC.reset(strict)


def _written_items(values: Sequence[Any], level: int, other: Other) -> str:
    """Write what Dask hashes of values: a tuple of what it hashes of each."""
    items = ", ".join([_written(each, level, other) for each in values])
    return f"({items},)" if len(values) == 1 else f"({items})"


def _written(value: Any, level: int, other: Other) -> str:
    kind = type(value)
    if kind in PLAIN:
        return repr(value)
    if isinstance(value, Expr):
        return repr(value.__dask_tokenize__())
    if kind in _PICKLED:
        known = _known_token(value, normalize_token)
        return other(value) if known is None else known[1]
    if level > _MOST_LEVELS:
        raise _TooDeepError
    if kind is list or kind is tuple:
        return f"('{kind.__name__}', {_written_items(value, level + 1, other)})"
    if kind is dict:
        items = sorted(value.items(), key=lambda item: str(item[0]))
        return f"('dict', {_written_items(items, level + 1, other)})"
    if kind is MethodType:
        return f"({_written(value.__self__, level + 1, other)}, {value.__name__!r})"
    if kind is partial:
        return _written_items((value.func, value.args, value.keywords), level + 1, other)
    return other(value)


def token_of_class(kind: type) -> Any:
    """Return what Dask hashes of a class."""
    known = _known_token(kind, normalize_object)
    return normalize_object(kind) if known is None else known[0]


def _known_token(value: Any, normalize: Callable[[Any], Any]) -> tuple[Any, str] | None:
    """Return what Dask hashes of a class or function of its own, which is pickled once; None of others."""
    if (found := _TOKENS.get(value)) is not None:
        return found
    if str(value.__module__).partition(".")[0] not in _PACKAGES or not _is_where_it_says(value):
        return None
    token = normalize(value)
    return _TOKENS.setdefault(value, (token, repr(token)))


def _is_where_it_says(value: Any) -> bool:
    """Return whether a value is pickled as a name only; the wrapper of a function says to be that one."""
    if (name := getattr(value, "__qualname__", None)) is None:  # a method by its name, or no default
        return True
    found: Any = sys.modules.get(value.__module__)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value
