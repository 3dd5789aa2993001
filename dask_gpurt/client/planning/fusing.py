"""Fuse chains of tasks on one partition into single tasks.

Dask fuses in ``persist`` and ``optimize()``, but not in ``compute()`` (see distributed#8833). There each
projection, comparison and product of a query is a separate task, whose result is stored, measured and
reported to the scheduler. Here ``compute()`` fuses blockwise operations by Dask's own rule, and then chains
around shuffles, which Dask's rule does not cover: tasks that only a transfer needs are fused into the
transfer, and tasks that need only an output are fused with the output.

Decisions and their figures: ``docs/decisions/planning.md``.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping

from dask.core import flatten
from dask.typing import Key

from dask_gpurt.client.planning.catalogue.schema import Schema, frame_of, known_schema
from dask_gpurt.dask_hooks import planning
from dask_gpurt.dask_hooks.lighter_tasks import last_step
from dask_gpurt.dask_hooks.planning import Expr, PlanWrapper
from dask_gpurt.dask_hooks.shuffle import P2PBarrierTask
from dask_gpurt.dask_hooks.types import GraphNode, Task
from dask_gpurt.shuffle import ShuffleSpec

#: The parameter that makes an expression specific to one computation.
OWN_COMPUTATION = "computation"

Graph = Mapping[Key, GraphNode]


def fuse(plan: Expr) -> Expr:
    """Fuse the tasks of a plan whose result goes to the client.

    Plans of other than dataframes, and those that repartition by size, are unchanged.

    ``plan``: an optimised expression, or a sequence of expressions.
    """
    if not planning.is_of_dataframes(plan) or planning.measures_partitions(plan):
        return plan
    name = planning.name_of(plan)
    plan = planning.rebuild(
        plan, planning.with_seed
    )  # or a sort would divide rows into other partitions than Dask does
    plan = planning.rebuild(plan, last_step)
    own: list[Expr] = []

    def with_computation(expr: Expr) -> Expr:
        changed = planning.with_operand(expr, OWN_COMPUTATION, name)
        own.extend([changed] * (changed is not expr))
        return changed

    fused = planning.fuse_blockwise(plan, with_computation)
    # Without a shuffle of the runtime there are no chains to fuse, and any scheduler can compute the plan.
    return FusedChains(described(fused), name) if own else fused  # type: ignore[no-untyped-call]


def described(plan: Expr) -> Expr:
    """Return a plan with what its graph is made of; unchanged if it has that, or is not of dataframes."""
    if (
        isinstance(plan, PlanWrapper)
        or not planning.is_of_dataframes(plan)
        or planning.measures_partitions(plan)
    ):
        return plan
    found = (known_schema(each) or planning.metadata(each) for each in planning.described_in_tasks(plan))
    return DescribedPlan(plan, tuple(map(pickle.dumps, found)), planning.shapes_of(plan))  # type: ignore[no-untyped-call]


class DescribedPlan(PlanWrapper):
    """Make the graph of a plan, on the scheduler, of what the client knows from planning.

    The operands are the plan, the pickled schemas, or metadata, of what tasks get these of, and the divisions
    and dimensions of each of its parts. Otherwise the scheduler would compute the metadata of most of these,
    with the library of frames, in three quarters of the time for a graph.
    """

    _parameters = ["plan", "metadata", "shapes"]

    def __dask_graph__(self) -> dict[Key, GraphNode]:
        """Return the graph of the plan."""
        for expr, known in zip(planning.described_in_tasks(self.plan), self.metadata, strict=True):
            if "_meta" not in vars(expr):
                found = pickle.loads(known)
                planning.set_metadata(expr, frame_of(found) if isinstance(found, Schema) else found)
        planning.set_shapes(self.plan, self.shapes)
        return planning.graph_of(self.plan)


class FusedChains(PlanWrapper):
    """Fuse the chains of a plan when its graph is created, on the scheduler."""

    _parameters = ["plan", OWN_COMPUTATION]

    def __dask_graph__(self) -> dict[Key, GraphNode]:
        """Return the graph of the plan, with chains fused."""
        return fuse_chains(
            planning.graph_of(self.plan), set(flatten(planning.keys_of(self.plan))), self.computation
        )


def fuse_chains(graph: Graph, keys: Collection[Key], computation: str) -> dict[Key, GraphNode]:
    """Fuse chains of tasks in which each task is the only dependency and the only dependent of its neighbour.

    A chain gets the key of its last task, so that its dependents find it. Another computation may have a task
    with the same key but need an intermediate result that is hidden here. So chains may only end in tasks
    that no other computation has: transfers of this computation's own shuffles, and tasks that depend on
    them.

    Barriers, and nodes that do not compute, are never fused. An output of a shuffle is not fused with a
    transfer of the next one: outputs have an owner, and each run identifies its outputs by the barrier that
    they depend on.

    ``graph``: tasks by key.
    ``keys``: the keys of requested results, which always end a chain.
    ``computation``: identifies the computation; shuffles with this value are its own.
    """
    needed = needed_tasks(graph, keys)
    dependents: dict[Key, list[Key]] = {key: [] for key in needed}
    for key, node in needed.items():
        for producer in node.dependencies & needed.keys():
            dependents[producer].append(key)
    barriers = {key: node for key, node in needed.items() if isinstance(node, P2PBarrierTask)}
    own = [key for key, node in barriers.items() if _is_own(node, computation)]
    transfers = {key for barrier in own for key in needed[barrier].dependencies}
    before: dict[Key, Key] = {}
    for key in needed:
        producer = _only_producer(needed, key)
        if producer is not None and len(dependents[producer]) == 1 and producer not in keys:
            before[key] = producer
    for transfer in transfers & before.keys():
        if _is_output(needed, _first(before, transfer), barriers):
            del before[transfer]
    ends = needed.keys() - set(before.values())
    fused: dict[Key, GraphNode] = {}
    for end in ends & (transfers | _following(own, dependents)):
        fused[end] = _fused(needed, list(_chain(before, end)))
        ends.remove(end)
    for end in ends:  # other computations may share these tasks: leave them unfused
        fused.update((key, needed[key]) for key in _chain(before, end))
    return fused


def needed_tasks(graph: Graph, keys: Iterable[Key]) -> dict[Key, GraphNode]:
    """Return the tasks that results depend on. Dependencies on futures are not in the graph."""
    needed: dict[Key, GraphNode] = {}
    left = list(keys)
    while left:
        if (key := left.pop()) not in needed and key in graph:
            needed[key] = graph[key]
            left.extend(graph[key].dependencies)
    return {key: node for key, node in graph.items() if key in needed}


def _following(barriers: Collection[Key], dependents: Mapping[Key, Collection[Key]]) -> set[Key]:
    """Return the tasks that depend on barriers, directly or indirectly."""
    found: set[Key] = set()
    left = list(barriers)
    while left:
        new = set(dependents[left.pop()]) - found
        found |= new
        left.extend(new)
    return found


def _is_own(barrier: P2PBarrierTask, computation: str) -> bool:
    return isinstance(barrier.spec, ShuffleSpec) and barrier.spec.computation == computation


def _only_producer(graph: Graph, key: Key) -> Key | None:
    """Return the only dependency of a task, if both can be part of a chain."""
    if not _computes(graph[key]) or len(graph[key].dependencies) != 1:
        return None
    (producer,) = graph[key].dependencies
    return producer if producer in graph and _computes(graph[producer]) else None


def _computes(node: GraphNode) -> bool:
    return isinstance(node, Task) and not node.block_fusion


def _first(before: Mapping[Key, Key], key: Key) -> Key:
    while key in before:
        key = before[key]
    return key


def _is_output(graph: Graph, key: Key, barriers: Collection[Key]) -> bool:
    return not graph[key].dependencies.isdisjoint(barriers)


def _fused(graph: Graph, chain: list[Key]) -> GraphNode:
    end = chain[0]
    return graph[end] if len(chain) == 1 else Task.fuse(*(graph[key] for key in chain), key=end)


def _chain(before: Mapping[Key, Key], key: Key) -> Iterator[Key]:
    yield key
    while key in before:
        key = before[key]
        yield key
