"""Fuse the tasks of a computation: what runs one after the other on one partition becomes one task.

Dask fuses in ``persist`` and in ``optimize()``, and leaves ``compute()`` as it is (see distributed#8833).
Each projection, comparison and product of a query is a task of its own then, with a result that is kept,
measured and told to the scheduler. Here ``compute()`` is fused by Dask's own rule for operations on one
partition each, and after that by chains, across expressions that Dask's rule does not join: what only a
transfer needs is made within the transfer, and what is made of an output alone within the output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from dask.core import flatten
from dask.typing import Key

from dask_gpurt.dask_hooks.graph import GraphNode, Task
from dask_gpurt.dask_hooks.planning import Expr, fuse_blockwise, graph_of, is_of_dataframes, keys_of
from dask_gpurt.dask_hooks.shuffle import P2PBarrierTask

Graph = Mapping[Key, GraphNode]


def fuse(plan: Expr) -> Expr:
    """Fuse the tasks of a plan whose result goes to the client; return what is not of dataframes as it is.

    Parameters
    ----------
    plan
        An expression that is optimised, or a sequence of them.
    """
    if not is_of_dataframes(plan):
        return plan
    return FusedChains(fuse_blockwise(plan))  # type: ignore[no-untyped-call]


class FusedChains(Expr):
    """Fuse the chains in the graph of a plan, where it becomes a graph: on the scheduler."""

    _parameters = ["plan"]

    def __dask_keys__(self) -> list[Any]:
        """Return the keys of the plan, which stay as they are."""
        return keys_of(self.plan)

    def __dask_graph__(self) -> dict[Key, GraphNode]:
        """Return the graph of the plan, with chains fused."""
        return fuse_chains(graph_of(self.plan), set(flatten(keys_of(self.plan))))

    def __dask_annotations__(self) -> dict[str, dict[Key, object]]:
        """Return the annotations of the plan: dataframes have none."""
        found: dict[str, dict[Key, object]] = self.plan.__dask_annotations__()
        return found


def fuse_chains(graph: Graph, keys: Collection[Key]) -> dict[Key, GraphNode]:
    """Fuse tasks of which each needs nothing but the one before, and nothing else needs that.

    A chain has the key of its last task, so that all others find it. Barriers stay alone, and so does
    whatever is not a task that computes. An output of a shuffle and a transfer of the next one are not
    fused: outputs have an owner, and each run knows its own by the barrier that they depend on.

    Parameters
    ----------
    graph
        Tasks by key.
    keys
        Those whose results are asked for: they end a chain.

    Returns
    -------
    The tasks that are left, by key. Those that nothing asks for are left out.
    """
    needed = _needed(graph, keys)
    dependents = Counter(key for node in needed.values() for key in node.dependencies)
    barriers = {key for key, node in needed.items() if isinstance(node, P2PBarrierTask)}
    before: dict[Key, Key] = {}
    for key, node in needed.items():
        if not _can_join(node) or len(node.dependencies) != 1:
            continue
        (producer,) = node.dependencies
        alone = dependents[producer] == 1 and producer not in keys
        if alone and producer in needed and _can_join(needed[producer]):
            before[key] = producer
    transfers = {key for barrier in barriers for key in needed[barrier].dependencies}
    for transfer in transfers & before.keys():
        if _is_output(needed, _first(before, transfer), barriers):
            del before[transfer]
    inner = set(before.values())
    return {key: _fused(needed, before, key) for key in needed if key not in inner}


def _needed(graph: Graph, keys: Collection[Key]) -> dict[Key, GraphNode]:
    """Return the tasks that the results depend on. What futures refer to is not in the graph."""
    needed: dict[Key, GraphNode] = {}
    left = list(keys)
    while left:
        if (key := left.pop()) not in needed and key in graph:
            needed[key] = graph[key]
            left.extend(graph[key].dependencies)
    return {key: node for key, node in graph.items() if key in needed}


def _can_join(node: GraphNode) -> bool:
    return isinstance(node, Task) and not node.block_fusion


def _first(before: Mapping[Key, Key], key: Key) -> Key:
    while key in before:
        key = before[key]
    return key


def _is_output(graph: Graph, key: Key, barriers: Collection[Key]) -> bool:
    return not graph[key].dependencies.isdisjoint(barriers)


def _fused(graph: Graph, before: Mapping[Key, Key], key: Key) -> GraphNode:
    chain = list(_chain(before, key))
    return graph[key] if len(chain) == 1 else Task.fuse(*(graph[each] for each in chain), key=key)


def _chain(before: Mapping[Key, Key], key: Key) -> Iterator[Key]:
    yield key
    while key in before:
        key = before[key]
        yield key
