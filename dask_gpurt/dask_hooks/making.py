"""Make expressions as Dask does, with the same names, in less time.

The optimiser makes some thousand expressions for a query, each named by a hash of its operands. Most of these
are other expressions, labels and numbers, of which Dask finds out one by one that they are nothing special.

Decisions and their figures: ``docs/decisions/planning.md``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from types import NoneType
from typing import Any

from dask._expr import Expr, _unpack_collections
from dask.tokenize import normalize_object, normalize_token

from dask_gpurt.dask_hooks.comparison import differences
from dask_gpurt.dask_hooks.patch import PatchSet
from dask_gpurt.dask_hooks.seams import MAKING

#: Types whose values are hashed as they are written.
PLAIN = frozenset([NoneType, bool, int, float, str])
#: The most levels of lists, tuples and dicts in an operand; what contains itself is left to Dask.
_MOST_LEVELS = 8
#: What Dask hashes of a class of its own, and as it is written, as a part of the name of each expression.
_TOKENS_OF_CLASSES: dict[type, tuple[Any, str]] = {}


class _UnknownError(Exception):
    """An operand is of another type."""


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
            MAKING["__dask_tokenize__"]: lambda original: partial(_token, original, described),
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


def _token(original: Callable[[Any], str], described: Callable[[Any], str | None], expr: Any) -> str:
    """Return the hash that the name of an expression ends with."""
    if not (token := expr._determ_token):
        try:
            text = _written_items([type(expr), *expr.operands], 0, described)
        except _UnknownError:
            return original(expr)
        token = expr._determ_token = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
    found: str = token
    return found


def _written_items(values: Sequence[Any], level: int, described: Callable[[Any], str | None]) -> str:
    """Write what Dask hashes of values: a tuple of what it hashes of each."""
    items = ", ".join([_written(each, level, described) for each in values])
    return f"({items},)" if len(values) == 1 else f"({items})"


def _written(value: Any, level: int, described: Callable[[Any], str | None]) -> str:
    kind = type(value)
    if kind in PLAIN:
        return repr(value)
    if isinstance(value, Expr):
        return repr(value.__dask_tokenize__())
    if kind is type:
        return _written_class(value)
    if level > _MOST_LEVELS:
        raise _UnknownError
    if kind is list or kind is tuple:
        return f"('{kind.__name__}', {_written_items(value, level + 1, described)})"
    if kind is dict:
        return f"('dict', {_written_items(sorted(value.items(), key=_text_of_key), level + 1, described)})"
    if (text := described(value)) is None:
        raise _UnknownError
    return text


def _text_of_key(item: tuple[Any, Any]) -> str:
    return str(item[0])


def token_of_class(kind: type) -> Any:
    """Return what Dask hashes of a class; its own are pickled once, and not for each expression."""
    found = _TOKENS_OF_CLASSES.get(kind)
    if found is None:
        token = normalize_object(kind)
        found = (token, repr(token))
        if str(kind.__module__).partition(".")[0] in ("dask", "dask_cudf", "dask_gpurt"):
            _TOKENS_OF_CLASSES[kind] = found
    return found[0]


def _written_class(kind: type) -> str:
    found = _TOKENS_OF_CLASSES.get(kind)
    if found is None:
        token_of_class(kind)
        if (found := _TOKENS_OF_CLASSES.get(kind)) is None:
            raise _UnknownError
    return found[1]
