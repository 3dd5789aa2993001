"""Infer on the scheduler which output of a shuffle a task assembles, whatever Dask has fused it with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import dask.array as da
from dask._task_spec import Task
from distributed.shuffle._core import P2PBarrierTask

from dask_gpurt.shuffle.spec import outputs_of


def rechunked(chunks: tuple[int, int]) -> dict[Any, Any]:
    """Return the tasks of a rechunk of one chunk into many."""
    whole = da.ones((8, 12), chunks=(8, 12)).rechunk(chunks, method="p2p")
    (layer,) = (layer for name, layer in whole.dask.layers.items() if name == whole.name)
    return dict(layer)


def barrier_of(*graphs: dict[Any, Any], fused: Any = ()) -> Any:
    """Return the barrier of the first graph as the scheduler holds it, with all its dependents."""
    nodes = {key: node for graph in graphs for key, node in graph.items()}
    (barrier,) = (node for node in graphs[0].values() if isinstance(node, P2PBarrierTask))
    dependents = [node for node in (*nodes.values(), *fused) if barrier.key in node.dependencies]
    return SimpleNamespace(
        run_spec=barrier, dependents=[SimpleNamespace(key=node.key, run_spec=node) for node in dependents]
    )


def test_chunks_are_numbered_by_their_grid() -> None:
    found = {task.key[1:]: output for task, output in outputs_of(barrier_of(rechunked((4, 4))))}
    assert found == {(row, column): 3 * row + column for row in range(2) for column in range(3)}


def test_an_output_is_found_in_what_it_is_fused_with() -> None:
    graph = rechunked((4, 4))
    last = max(key for key in graph if isinstance(key, tuple) and key[0].startswith("rechunk-p2p"))
    more = Task("more", sum, graph[last].ref())
    fused = Task.fuse(graph[last], more, key="more")
    assert {task.key: output for task, output in outputs_of(barrier_of(graph, fused=[fused]))}["more"] == 5


def test_an_output_of_another_rechunk_is_not_taken_for_ones_own() -> None:
    """A task may have chunks of two rechunks, each with its own grid of indices."""
    mine, other = rechunked((4, 4)), rechunked((8, 3))
    first = min(key for key in mine if isinstance(key, tuple) and key[0].startswith("rechunk-p2p"))
    last = max(key for key in other if isinstance(key, tuple) and key[0].startswith("rechunk-p2p"))
    both = Task("both", lambda left, right: None, mine[first].ref(), other[last].ref())
    fused = Task.fuse(mine[first], other[last], both, key="both")
    found = {task.key: output for task, output in outputs_of(barrier_of(mine, fused=[fused]))}
    assert found["both"] == 0
    assert {
        output for task, output in outputs_of(barrier_of(other, fused=[fused])) if task.key == "both"
    } == {3}
