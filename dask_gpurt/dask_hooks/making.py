"""Make expressions as Dask does, with the same names, in less time, and lighter tasks of some of them.

The optimiser makes some thousand expressions for a query, each named by a hash of its operands. Most of these
are other expressions, labels and numbers, of which Dask finds out one by one that they are nothing special.

Dask's expression for a reduction makes the tasks of all of its steps. So nothing is fused with them, even if
there is one step only, and one task follows the other through the scheduler. Here the last step is an
operation on one partition::

    read and sum parts  ->  sum of sums  ->  reset_index          is done as one task

The metadata of joins travel with their tasks as bytes, of which workers make frames if they need them.

Decisions and their figures: ``docs/decisions/planning.md``.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from types import NoneType
from typing import Any

from dask._expr import Expr, _unpack_collections
from dask._task_spec import List, Task, TaskRef
from dask.core import flatten
from dask.dataframe.dask_expr._expr import Blockwise
from dask.dataframe.dask_expr._reductions import TreeReduce
from dask.dataframe.multi import merge_chunk
from dask.tokenize import normalize_object, normalize_token
from dask.typing import Key
from dask.utils import apply

from dask_gpurt.dask_hooks.comparison import Seam, differences
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


@cache
def _is_known(seam: Seam) -> bool:
    return seam.difference() is None


# ---- last steps of reductions ------------------------------------------------------------------------

#: The tasks of a reduction.
_STEPS = Seam("dask.dataframe.dask_expr._reductions:TreeReduce._layer", "self", bodies=("30af60bff27c",))


class LastStep(Blockwise):
    """Aggregate all partitions of a frame in one task, as a ``TreeReduce`` of few partitions does."""

    _parameters = TreeReduce._parameters
    _defaults = TreeReduce._defaults
    _name = TreeReduce._name

    @property
    def _meta(self) -> Any:
        return self.operands[self._parameters.index("_meta")]

    def _divisions(self) -> tuple[None, None]:
        return (None, None)

    def _task(self, name: Key, index: int) -> Task:
        parts = List(*map(TaskRef, flatten(self.frame.__dask_keys__())))
        return Task(name, apply, self.aggregate, List(parts), self.aggregate_kwargs)


def last_step(expr: Expr) -> Expr:
    """Return the only step of a reduction in place of one that has no others; others as they are."""
    if type(expr) is not TreeReduce or not _is_known(_STEPS):
        return expr
    is_only = expr.split_every is False or expr.frame.npartitions <= expr.split_every
    return LastStep(*expr.operands) if is_only else expr  # type: ignore[no-untyped-call]


# ---- metadata of joins ------------------------------------------------------------------------------

#: The argument of joins that is their metadata.
_META = "result_meta"
#: What asks it for dtypes and columns.
_JOIN = Seam("dask.dataframe.multi:merge_chunk", "lhs args result_meta kwargs", bodies=("b5312ef6cc60",))


class LateMetadata:
    """Stand in for an empty frame, which is made as soon as anything is asked of it."""

    def __init__(self, payload: bytes):
        self._payload = payload

    @cached_property
    def frame(self) -> Any:
        """Return the frame."""
        return pickle.loads(self._payload)

    def __getattr__(self, name: str) -> Any:
        if name == "frame" or name.startswith("__"):  # or it would ask for itself if it cannot be made
            raise AttributeError(name)
        return getattr(self.frame, name)

    def __dask_tokenize__(self) -> Any:
        return normalize_token(self.frame)

    def __reduce__(self) -> tuple[Any, ...]:
        return LateMetadata, (self._payload,)


def defer_metadata(graph: Mapping[Any, Any]) -> None:
    """Have the joins of a new graph, also those within fused tasks, get their metadata late."""
    late: dict[int, tuple[Any, LateMetadata]] = {}  # with the frames: an address may be used again
    left = [*graph.values()] if _is_known(_JOIN) else []
    while left:
        node = left.pop()
        if not isinstance(node, Task):
            continue
        if node.has_subgraph():
            left += node.args[0].values()
        elif node.func is merge_chunk and not isinstance(meta := node.kwargs[_META], LateMetadata):
            if id(meta) not in late:
                late[id(meta)] = meta, LateMetadata(pickle.dumps(meta, protocol=5))
            node.kwargs[_META] = late[id(meta)][1]
