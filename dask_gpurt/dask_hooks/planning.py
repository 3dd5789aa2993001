"""Read expressions for planning, and make plans of others.

Dask shares one instance of equal expressions as long as it is referenced.
"""

from __future__ import annotations

import logging
import marshal
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import dask
import numpy as np
import pandas as pd
from dask._collections import new_collection
from dask._expr import Expr, FinalizeCompute, _ExprSequence, optimize_until
from dask._task_spec import DataNode, GraphNode, convert_legacy_graph
from dask.backends import detect_entrypoints
from dask.base import collections_to_expr
from dask.dataframe.dask_expr import _expr, _shuffle
from dask.dataframe.dask_expr._groupby import GroupbyAggregationBase, GroupByChunk
from dask.dataframe.dask_expr._merge import HashJoinP2P, Merge
from dask.dataframe.dask_expr._quantiles import RepartitionQuantiles
from dask.dataframe.dask_expr._reductions import Chunk, Max  # Min is one, too
from dask.dataframe.dask_expr._repartition import RepartitionSize
from dask.dataframe.dask_expr.io import parquet
from dask.dataframe.dask_expr.io.io import FromMap, FusedIO
from dask.delayed import Delayed
from dask.tokenize import TokenizationError, _tokenize_deterministic, tokenize
from dask.typing import Key
from fsspec.config import conf as fsspec_options

from dask_gpurt.dask_hooks import lighter_tasks, parquet_files
from dask_gpurt.dask_hooks.lighter_tasks import LastStep, defer_metadata
from dask_gpurt.dask_hooks.making import PLAIN
from dask_gpurt.dask_hooks.parquet_files import OF_FILES, has_options, version_of_files

__all__ = ["Expr"]  # and all that is defined here

logger = logging.getLogger(__name__)

#: Plans an expression up to a stage, as Dask does.
plan_as_dask: Callable[[Expr, Any], Expr] = optimize_until
#: The accessors of pandas. Others are registered by users, who may replace one under the same name.
_ACCESSORS = frozenset({"str", "dt", "cat", "list", "struct"})

#: All options of pandas, by group. Reading one through ``pd.get_option`` may warn that it is deprecated.
_PANDAS_OPTIONS: dict[str, Any] = vars(pd.options).get("d", {})

#: The settings of Dask that influence planning.
_CHOSEN = ("dataframe", "optimization", "annotations", "gpurt", "scheduler", "explicit-comms")


# ---- reading --------------------------------------------------------------------------------------


def name_of(expr: Expr) -> str:
    """Return the name of an expression. Expressions with equal names have equal results."""
    name: str = expr._name
    return name


def collection_of(expr: Expr) -> Any:
    """Return the collection of an expression, as users have it."""
    return new_collection(expr)


def operands_of(expr: Expr) -> Iterator[Any]:
    """Yield the operands of an expression, without cached facts about files."""
    kind: Any = type(expr)
    if not _has_facts(kind):
        return iter(expr.operands)
    return (operand for _, operand in _numbered_operands(expr))


def change_operands(expr: Expr, change: Callable[[Any], Any]) -> None:
    """Change the operands of an expression to equal ones; not its facts about files, which others share."""
    for position, operand in _numbered_operands(expr):
        if type(operand) not in PLAIN and not isinstance(operand, Expr):  # which nobody changes
            expr.operands[position] = change(operand)


@lru_cache(None)
def _has_facts(kind: Any) -> bool:
    return not OF_FILES.isdisjoint(kind._parameters)


def _numbered_operands(expr: Expr) -> Iterator[tuple[int, Any]]:
    names = expr._parameters
    for position, operand in enumerate(expr.operands):
        if position >= len(names) or names[position] not in OF_FILES:
            yield position, operand


def reads_more_than_operands(expr: Expr) -> bool:
    """Return whether the metadata of an expression may change although its name stays the same.

    ``from_map`` without ``meta`` calls its function, such as ``pandas.read_pickle``, on a file that may have
    changed. An accessor is looked up by its name, under which users may register another one.
    """
    if isinstance(expr, FromMap):
        return bool(expr.operand("user_meta") is FromMap._defaults["user_meta"])
    return "accessor" in expr._parameters and expr.operand("accessor") not in _ACCESSORS


def metadata(expr: Expr) -> Any:
    """Return the empty frame that describes the result."""
    return expr._meta


def set_metadata(expr: Expr, frame: Any) -> None:
    """Set the metadata of an expression, which are a cached property, to what they are known to be."""
    vars(expr)["_meta"] = frame


def token_of(expr: Expr) -> str | None:
    """Return the token that the name of an expression ends with; None if it has not been computed."""
    token: str | None = vars(expr).get("_determ_token")
    return token


def set_token(expr: Expr, token: str) -> None:
    """Set the token of an expression to what it is known to be."""
    vars(expr)["_determ_token"] = token


def described_in_tasks(plan: Expr) -> Iterator[Any]:
    """Yield those whose metadata tasks get: joins, and the sides of those that shuffle both."""
    for expr in bottom_up(plan, _made_of):
        if isinstance(expr, Merge):
            yield from (expr, expr.left, expr.right) if isinstance(expr, HashJoinP2P) else (expr,)


def shapes_of(plan: Expr) -> tuple[Any, ...]:
    """Return the divisions, or their number if they are unknown, and dimensions of all parts of a plan.

    None for dimensions that making the graph does not need, and for what has no divisions.
    """
    return tuple(
        _shape_of(expr) if isinstance(expr, _expr.Expr) else None for expr in bottom_up(plan, _made_of)
    )


def _shape_of(expr: Any) -> tuple[Any, int | None] | None:
    try:
        divisions = expr.divisions
        is_unknown = all(each is None for each in divisions)
        inputs = (each for each in expr.dependencies() if isinstance(each, _expr.Expr))
        # Dask compares them with those of single partitions, which may be for all partitions.
        is_compared = len(divisions) == 2 or any(each.npartitions == 1 for each in inputs)
        return len(divisions) if is_unknown else divisions, expr.ndim if is_compared else None
    except Exception as error:  # its graph may be made without, or fails as with Dask
        logger.debug("the scheduler describes %s itself: %r", name_of(expr), error)
        return None


def set_shapes(plan: Expr, known: Iterable[Any]) -> None:
    """Set what :func:`shapes_of` has returned, for which Dask computes metadata as it makes the graph."""
    for expr, shape in zip(bottom_up(plan, _made_of), known, strict=True):
        if shape is not None:
            divisions, dimensions = shape
            vars(expr)["divisions"] = (None,) * divisions if isinstance(divisions, int) else divisions
            if dimensions is not None:
                vars(expr)["ndim"] = dimensions


def deferred_values(operand: Any) -> list[Any] | None:
    """Return the values of a ``Delayed`` that only wraps them, as that of ``isin``; else None."""
    if not isinstance(operand, Delayed):
        return None
    tasks = dict(operand.dask).values()
    values = [task.value for task in tasks if isinstance(task, DataNode)]
    return values if len(values) == len(tasks) else None


def with_deferred_values(operand: Delayed, change: Callable[[Any], Any]) -> Delayed:
    """Return a ``Delayed`` that only wraps values, with each of them changed."""
    graph = {key: DataNode(key, change(node.value)) for key, node in dict(operand.dask).items()}
    return Delayed(operand.key, graph)


def content_of(expr: Expr) -> str | None:
    """Return a token of an expression that is the same in other processes; None if there is none.

    An expression's name is not: that of a Parquet read contains a hash of strings, which Python salts. In
    other processes an equal token has to stand for an equal result. So all inputs have to be Parquet files,
    whose checksum counts, or values. A ``Delayed`` that the user has named may have another value there, and
    options of a file system, also those of fsspec's configuration, may be secrets, which should not end up in
    a file.
    """
    tokens: dict[str, str] = {}
    for node in bottom_up(expr):
        if not node.dependencies() and not _is_known_input(node):
            return None
        operands = [tokens[name_of(each)] if isinstance(each, Expr) else each for each in operands_of(node)]
        if type(node) is _expr.Isin and isinstance(node.operands[1], _expr._DelayedExpr):
            operands[1] = _in_any_order(node.operands[1])
        try:
            token = _tokenize_deterministic(type(node), version_of_files(node), operands)
        except TokenizationError:
            return None
        tokens[name_of(node)] = token
    return tokens[name_of(expr)]


def _is_known_input(expr: Expr) -> bool:
    if isinstance(expr, _expr._DelayedExpr):
        values = deferred_values(expr.operands[0]) or []
        return [name_of(expr)] == [f"delayed-{_tokenize_deterministic(value)}" for value in values]
    if isinstance(expr, (parquet.ReadParquetFSSpec, parquet.ReadParquetPyarrowFS)):
        return not has_options(expr)
    return isinstance(expr, _expr.Literal)


def _in_any_order(values: Expr) -> list[Any]:
    """Return the values of an ``isin``, sorted: Dask takes them from a set, whose order is random."""
    return [
        (str(found.dtype), sorted(map(repr, found.tolist()))) if isinstance(found, np.ndarray) else found
        for found in deferred_values(values.operands[0]) or ()
    ]


def is_computation(expr: Expr) -> bool:
    """Return whether the result of an expression goes to the client, as with ``compute``."""
    return isinstance(expr, FinalizeCompute)


def is_sequence(plan: Expr) -> bool:
    """Return whether a plan is of several results."""
    return isinstance(plan, _ExprSequence)


def in_sequence(*results: Expr) -> Expr:
    """Return a plan of several results."""
    sequence: Expr = _ExprSequence(*results)
    return sequence


def is_of_dataframes(plan: Expr) -> bool:
    """Return whether a plan, or each plan of a sequence, is of dataframes."""
    plans = plan.operands if is_sequence(plan) else [plan]
    return all(isinstance(each, _expr.Expr) for each in plans)


def measures_partitions(plan: Expr) -> bool:
    """Return whether a plan repartitions by size.

    Dask computes the sizes of partitions while it lowers the plan, and keeps them with the expression. A
    rebuilt one would compute them again as its graph is made, on the one thread of the scheduler that makes
    the graph of that computation too: it would wait for itself.
    """
    return any(isinstance(each, RepartitionSize) for each in plan.walk())


def optimise(collection: Any) -> Expr:
    """Return the plan by which ``collection.compute()`` gets its result."""
    plan: Expr = FinalizeCompute(collections_to_expr([collection])).optimize()
    return plan


def fused_into(expr: Expr) -> Sequence[Expr]:
    """Return the operations that Dask has fused into one, the last one first; none for any other."""
    parts: Sequence[Expr] = expr.exprs if isinstance(expr, _expr.Fused) else ()
    return parts


def rebuild(plan: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """Rebuild a plan bottom up, with each expression replaced.

    ``change``: takes an expression and returns its replacement, or the same expression.
    """
    return rebuild_from(plan, lambda _, expr: change(expr))


def rebuild_from(plan: Expr, change: Callable[[Expr, Expr], Expr]) -> Expr:
    """Rebuild a plan bottom up; the function takes each expression as it was and with replaced operands."""
    changed: dict[str, Expr] = {}  # those that became others
    for expr in bottom_up(plan, _made_of):
        found = change(expr, _with_changed(expr, changed))
        if found is not expr:
            changed[name_of(expr)] = found
    return changed.get(name_of(plan), plan)


def bottom_up(plan: Expr, parts: Callable[[Any], Iterable[Expr]] = Expr.dependencies) -> Iterator[Any]:
    """Yield each expression of a plan once, after its parts, in an order that depends on the plan only."""
    seen: set[str] = set()
    left = [(plan, False)]
    while left:  # iterative: Dask computes plans that are too deep for Python's recursion limit
        expr, is_next = left.pop()
        if (name := name_of(expr)) in seen:
            continue
        if is_next:
            seen.add(name)
            yield expr
        else:
            left.append((expr, True))
            left += [(each, False) for each in parts(expr)]


def _made_of(expr: Expr) -> list[Expr]:
    if isinstance(expr, FusedIO):  # the read of single files is a part of it
        return []
    parts: list[Expr] = []
    for operand in expr.operands:
        if isinstance(operand, Expr):
            parts.append(operand)
        elif type(operand) is list and _is_group(operand):
            parts += operand
    return parts


def _is_group(operand: Any) -> bool:
    """Return whether an operand is a list of operations fused by ``optimize()``."""
    return isinstance(operand, list) and bool(operand) and isinstance(operand[0], Expr)


def _with_changed(expr: Expr, changed: Mapping[str, Expr]) -> Expr:
    """Return an expression with its operands replaced; the same expression if none of them changed."""
    if not changed:
        return expr
    replaced = ((name_of(each), changed.get(name_of(each))) for each in _made_of(expr))
    if all(new is None or name_of(new) == name for name, new in replaced):
        return expr
    operands: list[Any] = []
    for operand in expr.operands:
        if isinstance(operand, Expr):
            operands.append(changed.get(name_of(operand), operand))
        elif _is_group(operand):
            operands.append([changed.get(name_of(each), each) for each in operand])
        else:
            operands.append(operand)
    return type(expr)(*operands)


def with_operand(expr: Expr, parameter: str, value: Hashable) -> Expr:
    """Return an expression with another value of a parameter; unchanged if it has no such parameter."""
    other: Expr = expr.substitute_parameters({parameter: value})
    return other


def with_seed(expr: Expr) -> Expr:
    """Return a sample for quantiles with its seed made explicit; any other expression unchanged.

    Dask derives the seed from the names of the operands, which fusing would change.
    """
    if type(expr) is not RepartitionQuantiles or expr.random_state is not None:
        return expr
    return with_operand(expr, "random_state", int(tokenize(expr.operands), 16) % np.iinfo(np.int32).max)


class PlanWrapper(Expr):
    """Compute the plan that is the operand ``plan`` in another way, with its keys and its annotations."""

    def __dask_keys__(self) -> list[Any]:
        """Return the keys of the plan."""
        return keys_of(self.plan)

    def __dask_annotations__(self) -> dict[str, dict[Key, object]]:
        """Return the annotations of the plan; dataframes have none."""
        found: dict[str, dict[Key, object]] = self.plan.__dask_annotations__()
        return found


def shuffled_by_index(binary: Any) -> Any:
    """Return an operation on two frames of which both are shuffled by their index."""
    number = max(frame.npartitions for frame in binary.args)
    frame, other = (
        _shuffle.RearrangeByColumn(each, None, number, index_shuffle=True)
        for each in (binary.frame, binary.other)
    )
    return binary._op(frame, binary.op, other, *binary.operands[3:])


def with_rows_in_order(groups: Any, lowered: Any) -> Any:
    """Return a lowered function of groups that takes rows as they come, and does not sort by their index."""
    return lowered.substitute_parameters({"dask_func": groups._shuffle_grp_func(False)})


def prepare() -> None:
    """Do what the first plan of a process would wait for: look for backends, and compare Dask's functions."""
    if dask.config.get("dataframe.backend", None) not in (None, "pandas"):
        detect_entrypoints("dask.dataframe.backends")  # which Dask keeps; it imports none of them
    lighter_tasks.compare()
    parquet_files.uses_the_name_only()
    if "dask_cudf" in sys.modules:
        parquet_files.difference_of_cudf()


def fuse_blockwise(plan: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """Fuse the blockwise operations of a plan, as ``optimize(fuse=True)`` does, with each replaced before.

    Dask finds one group at a time, and rebuilds the plan for each. Depending on the order of traversal, it
    also fuses a single partition that several others need, such as the small side of a join, into each of
    them. Here it is computed once, as without fusing, since it may be slow or not deterministic.

    ``change``: takes an expression and returns its replacement, which has as many partitions.
    """
    groups = _groups(plan)
    single: dict[str, Expr] = {}

    def fused(old: Expr, expr: Expr) -> Expr:
        found = single[name_of(old)] = change(expr)
        group = [single[name] for name in groups.get(name_of(old), ())]
        if len(group) < 2:
            return found
        inside = set(map(name_of, group))
        outside = [each for part in group for each in part.dependencies() if name_of(each) not in inside]
        return _expr.Fused(group, *outside)

    return rebuild_from(plan, fused)


def _groups(plan: Expr) -> dict[str, list[str]]:
    """Return the operations that become one, by the last of them, which is the first of the list.

    An operation is fused with those that need it if these are all fused into one, of as many partitions. The
    last step of a reduction is fused with operations that need nothing else, which do not wait for others.
    """
    groups: dict[str, list[str]] = {}
    last_of: dict[str, Expr] = {}
    inputs: dict[str, set[str]] = {}
    needed_by: dict[str, set[str]] = {}
    for expr in reversed([*bottom_up(plan)]):
        name = name_of(expr)
        lasts = {name_of(last_of[each]) for each in needed_by.get(name, ())}
        last = last_of[next(iter(lasts))] if len(lasts) == 1 else expr
        if last is not expr and not (
            _expr.is_valid_blockwise_op(expr)
            and _expr.is_valid_blockwise_op(last)
            and expr.npartitions == last.npartitions
            and (not isinstance(expr, LastStep) or inputs[name_of(last)] <= {name})
        ):
            last = expr
        last_of[name] = last
        groups.setdefault(name_of(last), []).append(name)
        outside = inputs.setdefault(name_of(last), set())
        outside |= set(map(name_of, expr.dependencies()))
        outside.discard(name)
        for each in expr.dependencies():
            needed_by.setdefault(name_of(each), set()).add(name)
    return groups


def keys_of(plan: Expr) -> list[Any]:
    """Return the keys of a plan's results, as nested lists for a sequence."""
    keys: list[Any] = plan.__dask_keys__()
    return keys


def graph_of(plan: Expr) -> dict[Key, GraphNode]:
    """Return the tasks of a plan by key."""
    for expr in () if isinstance(plan, PlanWrapper) else plan.walk():  # which may set what is known first
        for each in expr.exprs if isinstance(expr, _expr.Fused) else [expr]:
            if is_frame_of_chunks(each):
                vars(each)["ndim"] = 2
    graph: dict[Key, GraphNode] = convert_legacy_graph(plan.__dask_graph__())
    defer_metadata(graph)
    return graph


def is_frame_of_chunks(expr: Expr) -> bool:
    """Return whether an expression has aggregates of the columns of a single partition, as a frame.

    Dask asks the library how many dimensions it has, which aggregates an example for that, and cudf finds no
    extremes of integers without rows. Of several partitions nothing is asked: a scheduler may have neither
    the library nor the files.
    """
    expr = next(iter(fused_into(expr)), expr)
    is_chunk = (type(expr) is Chunk and issubclass(expr.kind, Max)) or (
        type(expr) is GroupByChunk and issubclass(expr.kind, GroupbyAggregationBase)
    )
    return is_chunk and expr.frame.npartitions == 1 and expr.frame.ndim == 2


def default_shuffle_method() -> str:
    """Return the default shuffle method, considering replacements."""
    return str(vars(_shuffle)["get_default_shuffle_method"]())


def settings() -> tuple[str, ...]:
    """Return the settings that influence planning. Equal settings give equal plans and equal metadata.

    In addition to settings of Dask, pandas and cudf, these include the choice of the shuffle method: with a
    local ``scheduler``, or dask-cuda's ``explicit-comms``, Dask runs the shuffles. The options that fsspec is
    configured with count, since facts about files include the file system.
    """
    chosen = dask.config.config
    return (
        default_shuffle_method(),
        *(_text_of(chosen.get(name)) for name in _CHOSEN),
        repr(_PANDAS_OPTIONS.get("mode", {}).get("string_storage")),
        _text_of(_PANDAS_OPTIONS.get("future")),
        _text_of(fsspec_options),
        *_options_of_cudf(),
    )


def _text_of(setting: Any) -> str:
    """Return the ``repr`` of a setting, which is needed for each expression that a user makes."""
    try:
        return _text_of_plain(marshal.dumps(setting, 2))  # without references: the same for equal values
    except ValueError:  # it holds something else than plain values
        return repr(setting)


@lru_cache(64)
def _text_of_plain(setting: bytes) -> str:
    return repr(marshal.loads(setting))


def _options_of_cudf() -> Iterator[str]:
    """Yield the options of cudf that influence dtypes, if it has been imported."""
    if (option := getattr(sys.modules.get("cudf"), "get_option", None)) is not None:
        for name in ("default_integer_bitwidth", "default_float_bitwidth", "mode.pandas_compatible"):
            yield repr(option(name))
