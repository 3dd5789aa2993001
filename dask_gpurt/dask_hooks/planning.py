"""Read expressions for planning, and replace how they are made, optimised and described.

Dask has one instance of equal expressions for as long as that is referenced, and not beyond.
The replacements see each expression when it is made, each optimisation, and the metadata of the operations
that are most frequent. They are put on Dask's classes, for all clients of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import Any

import dask
import numpy as np
from dask._expr import Expr, FinalizeCompute, SingletonExpr, _ExprSequence
from dask._task_spec import DataNode, GraphNode, convert_legacy_graph
from dask.dataframe.dask_expr import _shuffle
from dask.dataframe.dask_expr._expr import Assign, Blockwise, Filter, Projection, optimize_blockwise_fusion
from dask.dataframe.dask_expr._expr import Expr as FrameExpr
from dask.dataframe.dask_expr._groupby import DecomposableGroupbyAggregation, GroupbyAggregation
from dask.dataframe.dask_expr._merge import Merge
from dask.dataframe.dask_expr._quantiles import RepartitionQuantiles
from dask.dataframe.dask_expr.io import parquet
from dask.delayed import Delayed
from dask.tokenize import tokenize
from dask.typing import Key
from dask.utils import methodcaller

from dask_gpurt.dask_hooks.patch import PatchSet, Wrap
from dask_gpurt.dask_hooks.seams import PLANNING

__all__ = [
    "Expr",
    "deferred_values",
    "files_read",
    "fuse_blockwise",
    "graph_of",
    "is_computation",
    "is_method_name",
    "is_of_dataframes",
    "is_shared",
    "keys_of",
    "known_of_files",
    "metadata",
    "name_of",
    "operands_of",
    "rebuild",
    "replace_planning",
    "settings",
    "tell_of_files",
    "with_operand",
    "with_seed",
]

#: A replacement that gets the original as its first argument.
Replacement = Callable[..., Any]

#: Operands in which an expression caches facts about files; its name follows from the files themselves.
_OF_FILES = frozenset({"_dataset_info_cache", "_pq_length_stats"})

#: Operands that do not influence these facts.
_OF_COLUMNS = frozenset({"columns", "_partitions", "_series"})

#: The operations whose metadata follow from their operands and from the metadata of their inputs alone, with
#: the class that says how. An exact class is meant where a subclass may read more.
_DESCRIBED: dict[str, Callable[[type], bool]] = {
    "Merge._meta": lambda kind: issubclass(kind, Merge),
    "Projection._meta": lambda kind: kind is Projection,
    "Blockwise._meta": lambda kind: kind is Filter,
    "Assign._meta": lambda kind: kind is Assign,
    "ApplyConcatApply._meta": lambda kind: kind is DecomposableGroupbyAggregation,
    "GroupbyAggregation._meta": lambda kind: kind is GroupbyAggregation,
}


# ---- reading --------------------------------------------------------------------------------------


def name_of(expr: Expr) -> str:
    """Return the name of an expression: equal names, equal results."""
    return str(expr._name)


def operands_of(expr: Expr) -> Iterator[Any]:
    """Yield the operands of an expression, without cached facts about files."""
    names = expr._parameters
    for position, operand in enumerate(expr.operands):
        if position >= len(names) or names[position] not in _OF_FILES:
            yield operand


def files_read(expr: Expr) -> dict[str, Any]:
    """Return the operands of an expression that reads files by which it finds out about them."""
    given = zip(expr._parameters, expr.operands, strict=False)
    return {name: operand for name, operand in given if name not in _OF_FILES | _OF_COLUMNS}


def known_of_files(expr: Expr) -> dict[str, Any] | None:
    """Return the facts about files that an expression that reads them has cached; None without any."""
    found: dict[str, Any] | None = expr.operand("_dataset_info_cache")
    return found


def tell_of_files(expr: Expr, known: dict[str, Any]) -> None:
    """Give an expression that reads files the facts that another one has collected."""
    expr._dataset_info_cache = known


def is_shared(expr: Expr) -> bool:
    """Return whether Dask makes one instance of equal expressions of this kind."""
    return isinstance(expr, SingletonExpr)


def metadata(expr: Expr) -> Any:
    """Return the empty frame that describes the result."""
    return expr._meta


def deferred_values(operand: Any) -> list[Any] | None:
    """Return the values of a ``Delayed`` that only wraps them, as ``isin`` has it; None for all else."""
    if not isinstance(operand, Delayed):
        return None
    tasks = dict(operand.dask).values()
    values = [task.value for task in tasks if isinstance(task, DataNode)]
    return values if len(values) == len(tasks) else None


def is_method_name(operand: Any) -> bool:
    """Return whether an operand is ``dask.utils.M.something``: a function by the name of a method."""
    return type(operand) is methodcaller


def is_computation(expr: Expr) -> bool:
    """Return whether the result of an expression goes to the client, as that of ``compute`` does."""
    return isinstance(expr, FinalizeCompute)


def is_of_dataframes(plan: Expr) -> bool:
    """Return whether a plan, or each one of a sequence, is of dataframes."""
    plans = plan.operands if isinstance(plan, _ExprSequence) else [plan]
    return all(isinstance(each, FrameExpr) for each in plans)


def rebuild(plan: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """Change each expression of a plan, those that it is made of first.

    Parameters
    ----------
    change
        Returns what is put in the place of an expression, or the same one.
    """
    changed: dict[str, Expr] = {}
    left = [plan]
    while left:  # not by recursion: plans are deeper than Python's stack where Dask still computes them
        expr = left[-1]
        needed = [each for each in _made_of(expr) if name_of(each) not in changed]
        if needed:
            left.extend(needed)
            continue
        left.pop()
        if name_of(expr) not in changed:
            changed[name_of(expr)] = change(_with_changed(expr, changed))
    return changed[name_of(plan)]


def _made_of(expr: Expr) -> Iterator[Expr]:
    for operand in expr.operands:
        if isinstance(operand, Expr):
            yield operand
        elif _is_group(operand):
            yield from operand


def _is_group(operand: Any) -> bool:
    """Return whether an operand is the list of operations that ``optimize()`` has fused."""
    return isinstance(operand, list) and bool(operand) and isinstance(operand[0], Expr)


def _with_changed(expr: Expr, changed: Mapping[str, Expr]) -> Expr:
    """Return an expression of what is put in the place of its operands; the same one if that is the same."""
    if all(name_of(changed[name_of(each)]) == name_of(each) for each in _made_of(expr)):
        return expr
    operands: list[Any] = []
    for operand in expr.operands:
        if isinstance(operand, Expr):
            operands.append(changed[name_of(operand)])
        elif _is_group(operand):
            operands.append([changed[name_of(each)] for each in operand])
        else:
            operands.append(operand)
    return type(expr)(*operands)


def with_operand(expr: Expr, parameter: str, value: Hashable) -> Expr:
    """Return an expression with another value of a parameter; the same one where it has no such parameter."""
    other: Expr = expr.substitute_parameters({parameter: value})
    return other


def with_seed(expr: Expr) -> Expr:
    """Return a sample for quantiles with the seed that Dask takes for it; any other expression as it is.

    Dask takes it from the names of the operands, and these are others once operations have been fused.
    """
    if type(expr) is not RepartitionQuantiles or expr.random_state is not None:
        return expr
    return with_operand(expr, "random_state", int(tokenize(expr.operands), 16) % np.iinfo(np.int32).max)


class _Broadcast(FrameExpr):
    """Keep what all partitions of another expression need out of its tasks, while these are fused."""

    _parameters = ["frame"]

    @property
    def _meta(self) -> Any:
        return self.frame._meta

    def _divisions(self) -> tuple[Any, ...]:
        divisions: tuple[Any, ...] = self.frame.divisions
        return divisions


def fuse_blockwise(plan: Expr) -> Expr:
    """Fuse the operations of a plan on one partition each, as ``optimize(fuse=True)`` does.

    Dask also fuses a single partition that several others need, as the small side of a join, with each of
    them, depending on the order in which it comes to them. Here it is computed once, as without fusing: it
    may take long, and may come out differently each time.
    """
    fused: Expr = optimize_blockwise_fusion(rebuild(plan, _set_apart))
    return rebuild(fused, lambda expr: expr.frame if isinstance(expr, _Broadcast) else expr)


def _set_apart(expr: Expr) -> Expr:
    if not isinstance(expr, Blockwise) or expr.npartitions == 1:
        return expr
    single = [isinstance(each, Blockwise) and each.npartitions == 1 for each in expr.operands]
    if not any(single):
        return expr
    operands = [
        _Broadcast(each) if apart else each  # type: ignore[no-untyped-call]
        for each, apart in zip(expr.operands, single, strict=True)
    ]
    return type(expr)(*operands)


def keys_of(plan: Expr) -> list[Any]:
    """Return the keys of the results of a plan, in lists of lists for a sequence."""
    keys: list[Any] = plan.__dask_keys__()
    return keys


def graph_of(plan: Expr) -> dict[Key, GraphNode]:
    """Return the tasks of a plan by key."""
    graph: dict[Key, GraphNode] = convert_legacy_graph(plan.__dask_graph__())
    return graph


def settings() -> tuple[str, ...]:
    """Return the settings that influence planning; equal ones give equal plans and equal metadata."""
    chosen = dask.config.config
    method = str(vars(_shuffle)["get_default_shuffle_method"]())
    return (
        method,
        repr(chosen.get("dataframe")),
        repr(chosen.get("optimization")),
        repr(chosen.get("annotations")),
        repr(chosen.get("gpurt")),
    )


# ---- replacing ------------------------------------------------------------------------------------


def replace_planning(
    patches: PatchSet,
    *,
    made: Replacement,
    optimise: Replacement,
    describe: Replacement,
    look_at_files: Replacement,
    file_plans: int,
) -> None:
    """Replace how expressions are made, optimised and described, and how files are looked at.

    Parameters
    ----------
    made
        Called as ``made(original, kind, *operands, **keywords)``, for the expression.
    optimise
        Called as ``optimise(original, expr, stage)``, for the optimised expression.
    describe
        Called as ``describe(original, expr)``, for the metadata of a join, projection, filter, assignment or
        groupby, which depend on nothing but operands and the metadata of the inputs.
    look_at_files
        Called as ``look_at_files(original, expr)``, for the facts that a read of Parquet files through fsspec
        needs.
    file_plans
        For how many sets of files and filters Dask keeps the statistics of their footers.

    Raises
    ------
    UnsupportedError
        When one of these is not as it is known; nothing is replaced.
    """
    wraps: dict[Any, Wrap] = {
        PLANNING["__new__"]: lambda original: partial(made, original),
        PLANNING["optimize_until"]: lambda original: partial(optimise, original),
        PLANNING["_dataset_info"]: lambda original: partial(look_at_files, original),
    }
    for seam in PLANNING.seams:
        if (concerns := _DESCRIBED.get(seam.short)) is not None:
            wraps[seam] = partial(_where, concerns, describe)
    PLANNING.require()
    patches.replace_all(wraps)
    patches.add_item(vars(parquet), PLANNING["_CACHED_PLAN_SIZE"].attribute, file_plans)


def _where(
    concerns: Callable[[type], bool], describe: Replacement, original: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    def described(expr: Any) -> Any:
        return describe(original, expr) if concerns(type(expr)) else original(expr)

    return described
