"""Execute the graph of a fused task, node by node, on columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dask.typing import Key

from dask_gpurt.dask_hooks import graphs
from dask_gpurt.dask_hooks.graphs import Graph
from dask_gpurt.dask_hooks.types import GraphNode
from dask_gpurt.frames.programs.operations import apply
from dask_gpurt.frames.programs.values import Engine, Refused, Rows, Values

__all__ = ["CALLS", "Interpreter", "ProgramError", "call"]

#: Called with the number of nodes that ran on columns, and of those that were left to the library.
Counts = Callable[[int, int], object]
#: The operations whose rows the library has in any order.
_IN_ANY_ORDER = ("merge", "groupby")


class ProgramError(RuntimeError):
    """Columns could not be made a frame of their library."""


class _Failed(Exception):
    """An operation on columns has raised. The arguments are its name and the error."""


class Interpreter:
    """Execute graphs on the columns of one library.

    ``engine``: the operations on columns.
    ``failed``: called with the name of an operation and an unexpected error; the library runs that node
    instead.
    ``differed``: called with the name of an operation and the difference, of those that run through the
    library too.
    """

    def __init__(
        self,
        engine: Engine,
        failed: Callable[[str, Exception], object],
        differed: Callable[[str, str], object] = lambda name, difference: None,
    ) -> None:
        self.engine = engine
        self.failed = failed
        self.differed = differed

    def run(
        self,
        graph: Graph,
        result: Key,
        counted: Counts = lambda on_columns, left: None,
        *,
        check: bool = False,
    ) -> Any:
        """Return the result of a graph, as the library's frame if it is one.

        With `check`, each node that runs on columns runs through the library too, whose result is used if it
        differs.

        Raises ProgramError if the library's frame could not be made of columns. No node that needs it has
        run.
        """
        run = _Run(self, check)
        value = run.closed(run.execute(graph, result, {}))
        counted(run.on_columns, run.left)
        return value

    def call(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of a call as one operation, by its name."""
        run = _Run(self, check=False)
        opened = [value if (made := self.engine.opened(value)) is None else made for value in args]
        try:
            return run.closed(apply(self.engine, name, function, opened, kwargs))
        except Refused:
            return function(*args, **kwargs)
        except Exception as error:
            result = function(*args, **kwargs)
            self.failed(name, error)
            return result


class _Run:
    """Execute one fused task, and the fused tasks within it."""

    def __init__(self, interpreter: Interpreter, check: bool):
        self._interpreter, self._engine, self._check = interpreter, interpreter.engine, check
        self.on_columns = self.left = 0

    def execute(self, graph: Graph, result: Key, given: Mapping[Key, Any]) -> Any:
        """Return the result of a graph, of which some values are given."""
        order = list(graphs.in_order(graph, result, given))
        uses = Counter(each for key in order for each in graph[key].dependencies)
        values = dict(given)
        for key in order:
            node = graph[key]
            values[key] = self._value(node, values)
            for each in node.dependencies:
                uses[each] -= 1
                if not uses[each] and each != result:
                    del values[each]
        return values[result]

    def closed(self, value: Any, *, numbered: bool = False) -> Any:
        """Return a value as the library has it; with numbered rows if nobody asks for its index."""
        if not isinstance(value, (Rows, Values)):
            return value
        if numbered and value.made is None and value.domain.index is None:
            domain = self._engine.range(value.domain.length)
            return self.closed(replace(value, domain=domain))
        if value.made is None:
            try:
                value.made = self._engine.closed(value)
            except Exception as error:
                raise ProgramError(f"{type(error).__name__}: {error}") from error
        return value.made

    def _value(self, node: GraphNode, values: dict[Key, Any]) -> Any:
        if (inner := graphs.fused_graph_of(node)) is not None:
            graph, result, names = inner
            return self.execute(graph, result, {name: values[key] for name, key in names.items()})
        error: tuple[str, Exception] | None = None
        try:
            found = self._on_columns(node, values)
        except Refused:
            self.left += 1
            found = None
        except _Failed as failure:
            self.left += 1
            found, error = None, failure.args
        if found is None or self._check:
            numbered = graphs.ignores_index(node)
            plain = node({key: self.closed(values[key], numbered=numbered) for key in node.dependencies})
            if error is not None:  # the library has not failed as well
                self._interpreter.failed(*error)
            if found is None or self._differs(node, found, plain):
                return plain
        return found

    def _differs(self, node: GraphNode, found: Any, plain: Any) -> bool:
        operation = graphs.operation_of(node)
        assert operation is not None
        is_ordered = not operation.name.startswith(_IN_ANY_ORDER)
        difference = self._engine.difference(self.closed(found), plain, in_order=is_ordered)
        if difference is not None:
            self._interpreter.differed(operation.name, difference)
        return difference is not None

    def _on_columns(self, node: GraphNode, values: dict[Key, Any]) -> Rows | Values | None:
        """Return the value of a node that runs on columns; None if it is left to the library."""
        if (operation := graphs.operation_of(node)) is None:
            return None
        for key in node.dependencies:
            if not isinstance(values[key], (Rows, Values)):
                opened = self._engine.opened(values[key])
                if opened is not None:
                    values[key] = opened
        if not any(isinstance(values[key], (Rows, Values)) for key in node.dependencies):
            return None
        args, kwargs = graphs.arguments_of(operation, values.__getitem__)
        try:
            found = apply(self._engine, operation.name, operation.function, args, kwargs)
        except Refused:
            raise
        except Exception as error:
            raise _Failed(operation.name, error) from error
        self.on_columns += 1
        return found


# ---- calls of other rooms ----------------------------------------------------------------------------

#: Takes the name of an operation, a function, its arguments and keywords, and returns the result of the call.
Call = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
#: Those that run operations as programs in this process; the last one is used.
CALLS: list[Call] = []


def call(name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function of frames, as the operation of this name if this process runs programs."""
    return CALLS[-1](name, function, args, kwargs) if CALLS else function(*args, **kwargs)
