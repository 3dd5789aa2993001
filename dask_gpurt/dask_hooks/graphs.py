"""Execute the graphs of fused tasks, and name the operation of each of their nodes.

Dask executes a fused task node by node: each is a call of a function of ``operator``, of a method, or of one
of Dask's own. Here these functions get names, so that who executes a graph need not know where Dask has them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from dask._task_spec import GraphNode, Task, TaskRef
from dask.dataframe.dask_expr._accessor import FunctionMap, PropertyMap
from dask.dataframe.dask_expr._expr import Assign, RenameFrame
from dask.dataframe.multi import merge_chunk
from dask.typing import Key
from dask.utils import methodcaller

from dask_gpurt.dask_hooks.comparison import Seam
from dask_gpurt.dask_hooks.patch import PatchSet
from dask_gpurt.dask_hooks.seams import EXECUTION

Graph = Mapping[Key, GraphNode]

#: The names of the functions that nodes call; methods are named ``.method``, and those of accessors
#: ``accessor.method``.
_NAMES: dict[Callable[..., Any], str] = {
    **{getattr(operator, name): name for name in ("getitem", "lt", "le", "gt", "ge", "eq", "ne")},
    **{getattr(operator, name): name for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")},
    **{getattr(operator, name): name for name in ("and_", "or_", "xor", "inv")},
    Assign.operation: "assign",
    RenameFrame.operation: "rename",
    merge_chunk: "merge",
}
_GROUPBY, _REDUCTIONS = "dask.dataframe.dask_expr._groupby", "dask.dataframe.dask_expr._reductions"
#: The names of methods of classes that tasks call, by module, class and method.
_OF_CLASSES = {
    ("dask_cudf._expr.groupby", "DecomposableCudfGroupbyAgg", "chunk"): "groupby",
    **{(_GROUPBY, kind, "chunk"): f"groupby-{kind.lower()}" for kind in ("Sum", "Count", "Min", "Max")},
    **{(_REDUCTIONS, kind, "chunk"): "reduction" for kind in ("Sum", "Count", "Min", "Max", "Any", "All")},
}
#: The operations that take no notice of an index.
_WITHOUT_INDEX = frozenset({"groupby", "reduction"})


_DASK_CUDF = "dask_cudf._expr.groupby:"
#: How dask_cudf aggregates partial aggregations in trees, and finishes, by the name of the operation.
_TREES = {
    "groupby-again": Seam(_DASK_CUDF + "_tree_node_agg", "df gb_cols dropna sort sep"),
    "groupby-end": Seam(
        _DASK_CUDF + "_finalize_gb_agg",
        "gb_in gb_cols aggs columns final_columns as_index dropna sort sep str_cols_out aggs_renames",
    ),
}
#: What dask_cudf makes variances of: counts, sums and sums of squares.
_VARIANCE = Seam(_DASK_CUDF + "_var_agg", "df col count_name sum_name pow2_sum_name ddof")


def name_operation(name: str, *functions: Callable[..., Any]) -> None:
    """Give functions that tasks call the name of the operation that they do."""
    _NAMES.update(dict.fromkeys(functions, name))


#: Functions that take no notice of the index of their frame, if their last argument is true.
_MAY_IGNORE_INDEX: set[Callable[..., Any]] = set()


def may_ignore_index(function: Callable[..., Any]) -> None:
    """Declare that a function takes no notice of the index of its frame, if its last argument is true."""
    _MAY_IGNORE_INDEX.add(function)


def ignores_index(node: GraphNode) -> bool:
    """Return whether a node takes no notice of the indexes of its frames."""
    if type(node) is not Task:
        return False
    if _is_one_of(node.func, _MAY_IGNORE_INDEX):
        return node.args[-1] is True
    return _name_of(node) in _WITHOUT_INDEX


def _is_one_of(function: Any, functions: set[Callable[..., Any]]) -> bool:
    try:
        return function in functions
    except TypeError:  # it cannot be hashed
        return False


class Operation(NamedTuple):
    """Describe the call that a node makes.

    ``name``: the name of the function.
    ``function``, ``args``, ``kwargs``: the call; arguments that are results of other nodes are references,
    with their key.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def operation_of(node: GraphNode) -> Operation | None:
    """Return the call that a node makes; None if its function has no name here, or an argument is a task."""
    if type(node) is not Task:
        return None
    if any(isinstance(each, GraphNode) for each in (*node.args, *node.kwargs.values())):
        return None
    name = _name_of(node)
    return None if name is None else Operation(name, node.func, node.args, node.kwargs)


def _name_of(node: Task) -> str | None:
    function: Any = node.func
    if type(function) is methodcaller:
        return f".{function.method}"
    try:
        name = _NAMES.get(function)
    except TypeError:  # it cannot be hashed
        return None
    if name is not None:
        return name
    if function in (FunctionMap.operation, PropertyMap.operation):
        return f"{node.args[1]}.{node.args[2]}"
    of = getattr(function, "__self__", None)
    return _OF_CLASSES.get((of.__module__, of.__name__, function.__name__)) if isinstance(of, type) else None


def arguments_of(operation: Operation, value: Callable[[Key], Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call, with references replaced by values."""

    def given(argument: Any) -> Any:
        return value(argument.key) if isinstance(argument, TaskRef) else argument

    return [given(each) for each in operation.args], {k: given(v) for k, v in operation.kwargs.items()}


def fused_graph_of(node: GraphNode) -> tuple[Graph, Key, dict[Key, Key]] | None:
    """Return the graph of a fused task, its result, and which key of the graph is which input.

    None for other tasks, and for those of which an input is not the result of another task.
    """
    if not isinstance(node, Task) or not node.has_subgraph():
        return None
    graph, result, names, *inputs = node.args
    if not all(isinstance(each, TaskRef) for each in inputs):
        return None
    return graph, result, {name: each.key for name, each in zip(names, inputs, strict=True)}


def wrap_execution(patches: PatchSet, run: Callable[[Graph, Key, Callable[[], Any]], Any]) -> None:
    """Have a function execute the graphs of fused tasks.

    ``run``: takes the graph, the key of the result, and a function that returns the result as Dask does.
    Raises UnsupportedError if a function of Dask differs from the known one.
    """
    EXECUTION.require()

    def wrap(execute: Callable[..., Any]) -> Callable[..., Any]:
        def execute_graph(dsk: Any, cache: Any = None, keys: Any = None) -> Any:
            by_dask = partial(execute, dsk, cache=cache, keys=keys)
            if cache or not isinstance(dsk, dict) or not isinstance(keys, list) or len(keys) != 1:
                return by_dask()
            return {keys[0]: run(dsk, keys[0], lambda: by_dask()[keys[0]])}

        return execute_graph

    patches.replace(EXECUTION["execute_graph"], wrap)


def wrap_trees(patches: PatchSet, call: Callable[..., Any]) -> None:
    """Have a function aggregate the partial aggregations of dask_cudf, which has been imported.

    Sums of integers are squared as floats for variances: their squares as integers may wrap around.

    ``call``: takes the name of the operation, dask_cudf's function, its arguments and its keywords.
    Raises UnsupportedError if a function of dask_cudf differs from the known one.
    """

    def wrap(name: str, seam: Seam, aggregate: Callable[..., Any]) -> Callable[..., Any]:
        assert seam.parameters is not None
        _, *options = seam.parameters.split()

        def aggregated(frame: Any, *args: Any, **kwargs: Any) -> Any:
            return call(name, aggregate, (frame,), dict(zip(options, args, strict=False)) | kwargs)

        return aggregated

    def of_floats(variance: Callable[..., Any]) -> Callable[..., Any]:
        def computed(frame: Any, column: Any, count: str, total: str, *args: Any, **kwargs: Any) -> Any:
            floats = frame.assign(**{total: frame[total].astype("float64")})
            return variance(floats, column, count, total, *args, **kwargs)

        return computed

    wraps = {seam: partial(wrap, name, seam) for name, seam in _TREES.items()}
    patches.replace_all(wraps | {_VARIANCE: of_floats})


def in_order(graph: Graph, result: Key, given: Mapping[Key, Any]) -> Iterator[Key]:
    """Yield the keys that a result needs, each after those that it depends on, but not given ones."""
    done: set[Key] = set(given)
    left = [result]
    while left:
        key = left[-1]
        missing = [each for each in graph[key].dependencies if each not in done] if key not in done else []
        if missing:
            left.extend(missing)
            continue
        left.pop()
        if key not in done:
            done.add(key)
            yield key
