"""Fuse tasks without changing results, requested keys or barriers."""

from __future__ import annotations

import gc
import pickle
import sys
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from dask._expr import FinalizeCompute
from dask._task_spec import Alias, DataNode, Task, TaskRef, execute_graph
from dask.core import flatten
from dask.dataframe.dask_expr._collection import new_collection
from dask.dataframe.dask_expr._quantiles import RepartitionQuantiles
from dask.dataframe.dask_expr._reductions import TreeReduce
from dask.typing import Key
from distributed.shuffle._core import P2PBarrierTask, ShuffleId
from distributed.shuffle._shuffle import DataFrameShuffleSpec
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.client.planning import fusing
from dask_gpurt.client.planning.fusing import fuse
from dask_gpurt.dask_hooks.planning import fused_into, graph_of, keys_of, rebuild, shapes_of, with_operand
from dask_gpurt.shuffle import ShuffleSpec
from tests.helpers.planned import Planner

COMPUTATION = "computation-of-this"


def fuse_chains(tasks: Mapping[Key, Any], keys: set[Key]) -> dict[Key, Any]:
    return fusing.fuse_chains(tasks, keys, COMPUTATION)


def calls(*values: Any) -> tuple[Any, ...]:
    """Return the arguments that a task was called with, which identify the whole graph below it."""
    return values


def graph(tasks: Mapping[str, tuple[str, ...]]) -> dict[Key, Any]:
    """Return a graph of tasks by key, with the dependencies of each."""
    return {key: Task(key, calls, key, *map(TaskRef, needed)) for key, needed in tasks.items()}


def spec(own: bool) -> Any:
    """Return the spec of a shuffle by the runtime, or of one by Dask."""
    frame = pd.DataFrame({"key": [0]})
    described = DataFrameShuffleSpec(
        id=ShuffleId("shuffle"),
        npartitions=1,
        column="key",
        meta=frame,
        parts_out=1,
        disk=True,
        drop_column=True,
    )
    return ShuffleSpec.of(described, computation=COMPUTATION) if own else described


def barrier(key: str, *needed: str, own: bool = True) -> P2PBarrierTask:
    return P2PBarrierTask(key, calls, key, *map(TaskRef, needed), spec=spec(own))


def shuffled(
    inputs: Mapping[str, tuple[str, ...]], outputs: Mapping[str, tuple[str, ...]], own: bool = True
) -> dict[Key, Any]:
    """Return a graph whose ``transfer-…`` tasks feed a barrier, on which the other tasks may depend."""
    transfers = [key for key in inputs if key.startswith("transfer")]
    return graph(inputs) | {"barrier": barrier("barrier", *transfers, own=own)} | graph(outputs)


def parts(task: Any) -> set[Key]:
    """Return the keys of the tasks that are fused into a task."""
    return set(task.args[0]) if task.func.__name__ == "_execute_subgraph" else {task.key}


def test_a_read_is_fused_with_its_transfer_and_an_output_with_what_follows() -> None:
    fused = fuse_chains(
        shuffled(
            {"read-0": (), "read-1": (), "transfer-0": ("read-0",), "transfer-1": ("read-1",)},
            {
                "output-0": ("barrier",),
                "output-1": ("barrier",),
                "sum-0": ("output-0",),
                "sum-1": ("output-1",),
            },
        ),
        {"sum-0", "sum-1"},
    )
    assert fused.keys() == {"transfer-0", "transfer-1", "barrier", "sum-0", "sum-1"}
    assert isinstance(fused["barrier"], P2PBarrierTask)
    assert fused["barrier"].dependencies == {"transfer-0", "transfer-1"}
    assert fused["sum-0"].dependencies == {"barrier"}


SHUFFLED = ({"read": (), "transfer": ("read",)}, {"output": ("barrier",), "sum": ("output",)})
#: Graphs of which no task is fused, with the key that is wanted and the computation.
LEFT: dict[str, tuple[dict[Key, Any], str, str]] = {
    # Another computation that needs the filter itself has a sum of the same name, which is a different task.
    "tasks that others may share": (
        graph({"read": (), "filter": ("read",), "sum": ("filter",)}),
        "sum",
        COMPUTATION,
    ),
    "a shuffle of Dask": (shuffled(*SHUFFLED, own=False), "sum", COMPUTATION),
    "a shuffle that others may share": (shuffled(*SHUFFLED), "sum", "another"),
    "inputs of two tasks": (
        shuffled(
            {"read": (), "transfer": ("read",), "other": ("read",)},
            {"output": ("barrier",), "sum": ("output",), "min": ("output",), "end": ("sum", "min", "other")},
        ),
        "end",
        COMPUTATION,
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_tasks_that_others_need_are_not_fused(name: str) -> None:
    tasks, wanted, computation = LEFT[name]
    assert fusing.fuse_chains(tasks, {wanted}, computation) == tasks


@st.composite
def graphs(draw: st.DrawFn) -> tuple[dict[Key, Any], set[Key]]:
    count = draw(st.integers(1, 12))
    tasks: dict[Key, Any] = {}
    for number in range(count):
        key = f"task-{number}"
        needed = draw(st.lists(st.sampled_from(list(tasks)), max_size=3, unique=True)) if tasks else []
        kind = draw(st.sampled_from(["task", "task", "task", "data", "alias", "barrier", "barrier"]))
        if kind == "data" or (kind == "alias" and not needed):
            tasks[key] = DataNode(key, number)
        elif kind == "alias":
            tasks[key] = Alias(key, needed[0])
        elif kind == "barrier":
            tasks[key] = barrier(key, *needed, own=draw(st.booleans()))
        else:
            tasks[key] = Task(key, calls, key, *map(TaskRef, needed))
    keys = draw(st.sets(st.sampled_from(list(tasks)), min_size=1))
    return tasks, keys


@given(graphs())
def test_fused_graphs_compute_the_same(drawn: tuple[dict[Key, Any], set[Key]]) -> None:
    tasks, keys = drawn
    expected = execute_graph(dict(tasks), keys=set(tasks))
    fused = fuse_chains(tasks, keys)
    found = execute_graph(dict(fused), keys=set(fused))
    assert keys <= fused.keys()
    for key in fused:
        assert found[key] == expected[key]
    barriers = {key for key, task in tasks.items() if isinstance(task, P2PBarrierTask)}
    for key in barriers & fused.keys():
        assert fused[key] is tasks[key]
    outputs = {key for key, task in tasks.items() if task.dependencies & barriers}
    transfers = {key for barrier in barriers for key in tasks[barrier].dependencies}
    for last, task in fused.items():
        if isinstance(task, Task):
            assert parts(task) == {last} or not barriers & parts(task)
            assert last not in transfers or not outputs & (parts(task) - {last})


# ---- plans ----------------------------------------------------------------------------------------


def tasks_of(plan: Any) -> dict[Key, Any]:
    return graph_of(plan)


def plan(*collections: Any) -> Any:
    expr = dask.base.collections_to_expr(collections)
    return FinalizeCompute(expr).optimize()


def table() -> Any:
    return dd.from_pandas(pd.DataFrame({"key": [0, 1, 0, 1], "value": [1, 2, 3, 4]}), npartitions=2)


def test_a_plan_without_shuffles_is_of_dask_alone() -> None:
    """So any scheduler can compute it without the runtime, also that of another client."""
    found = fuse(plan((table().value * 2 + 1).abs()))
    assert {type(expr).__module__.partition(".")[0] for expr in found.walk()} == {"dask"}


def sums(partitions: int, name: str = "total") -> Any:
    """Return the sums of groups, whose last step an operation on their index follows."""
    frame = pd.DataFrame({"key": [n % 3 for n in range(60)], "value": range(60)})
    found = dd.from_pandas(frame, npartitions=partitions, sort=False).groupby("key").value.sum()
    return found.rename(name).reset_index()


@pytest.mark.parametrize(("partitions", "tasks"), [(1, 1), (8, 9)])
def test_the_last_step_of_a_reduction_is_one_task_with_what_is_around_it(partitions: int, tasks: int) -> None:
    found = fuse(plan(sums(partitions)))
    graph = {key: node for key, node in tasks_of(found).items() if not isinstance(node, (DataNode, Alias))}
    assert len(graph) == tasks
    (computed,) = dask.get(tasks_of(pickle.loads(pickle.dumps(found))), list(flatten(keys_of(found))))
    expected = sums(partitions).compute(scheduler="sync")
    pd.testing.assert_frame_equal(computed, expected)


def test_a_reduction_of_several_steps_is_left() -> None:
    found = fuse(plan(sums(9)))
    assert len([expr for expr in found.walk() if isinstance(expr, TreeReduce)]) == 1
    (computed,) = dask.get(tasks_of(found), list(flatten(keys_of(found))))
    pd.testing.assert_frame_equal(computed, sums(9).compute(scheduler="sync"))


def test_reductions_that_are_combined_do_not_wait_for_each_other() -> None:
    both = sums(1).merge(sums(2, "other"), on="key")
    found = fuse(plan(both))
    (merged,) = [node for key, node in tasks_of(found).items() if "merge" in key[0]]  # type: ignore[index]
    assert len(merged.dependencies) == 2
    assert all("sum" in key[0] for key in merged.dependencies)  # type: ignore[index]
    (computed,) = dask.get(tasks_of(found), list(flatten(keys_of(found))))
    pd.testing.assert_frame_equal(computed, both.compute(scheduler="sync"))


def test_quantiles_are_those_of_the_sample_that_dask_draws() -> None:
    """A sort partitions by a sample, which Dask seeds by the names of expressions."""
    numbers = dd.from_pandas(pd.DataFrame({"key": [n * n % 997 for n in range(4000)]}), npartitions=4)
    quantiles = new_collection(RepartitionQuantiles(((numbers.key + 1) * 2).expr, 5))
    found = plan(quantiles)
    fused = fuse(found)
    assert len(tasks_of(fused)) < len(tasks_of(found))
    mine, other = (dask.get(tasks_of(each), list(flatten(keys_of(each)))) for each in (fused, found))
    assert mine[0].tolist() == other[0].tolist()


def test_the_scheduler_describes_no_part_of_a_plan(
    planner: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pd.DataFrame({"key": [0, 1], "name": ["a", "b"]}).to_parquet(tmp_path / "rows.parquet")
    table = dd.read_parquet(tmp_path / "rows.parquet")
    rows = table[table.key > 0]
    groups = (
        rows.assign(more=rows.key * 2 + 1).groupby("name").agg({"more": "sum", "key": "max"}).reset_index()
    )
    sent = pickle.dumps(plan(groups))
    parts = [part for expr in plan(groups).walk() for part in [expr, *fused_into(expr)]]
    # Reads are described by the facts about their files, which are sent.
    kinds = {kind for each in parts for kind in type(each).__mro__ if "parquet" not in kind.__module__}
    expected = tasks_of(plan(groups))
    del table, rows, groups, parts
    planner.cache.remove()
    gc.collect()  # as in another process
    for each in (vars(kind).get("_meta") for kind in kinds):
        if isinstance(each, cached_property):
            monkeypatch.setattr(each, "func", None)
    assert graph_of(pickle.loads(sent)).keys() == expected.keys()


def test_what_cannot_be_described_is_left_to_the_scheduler(planner: Planner) -> None:
    rows = dd.from_pandas(pd.DataFrame({"key": [2, 1]}), npartitions=1)
    lowered = rows.map_partitions(lambda frame: frame, meta=rows._meta)[["key"]].expr.lower_completely()

    class Odd(type(lowered)):  # type: ignore[misc]
        def _divisions(self) -> Any:
            raise ValueError("of no concern")

    *of_inputs, last = shapes_of(Odd(*lowered.operands))
    assert last is None
    assert None not in of_inputs


def test_an_input_of_several_partitions_is_computed_once() -> None:
    """Dask's own rule would recompute the small side of this join for each partition of the other side."""
    computed = []

    def small(number: int) -> pd.DataFrame:
        computed.append(number)
        return pd.DataFrame({"key": [0, 1], "other": [number, number]})

    meta = small(0).iloc[:0]
    computed.clear()
    with dask.config.set({"dataframe.convert-string": False}):  # no operation between the read and the join
        found = fuse(plan(table().merge(dd.from_map(small, [1], meta=meta), on="key")))
    (joined,) = dask.get(tasks_of(found), list(flatten(found.__dask_keys__())))
    assert len(joined) == 4
    assert computed == [1]


def test_tasks_fused_by_the_user_need_those_of_the_changed_plan() -> None:
    """``optimize()`` of a collection leaves fused operations, which refer to other tasks by name."""
    optimised = ((table().value * 2) + 1).optimize()
    changed = rebuild(optimised.expr, partial(with_operand, parameter="npartitions", value=1))
    assert changed._name != optimised.expr._name
    needed = set().union(*(task.dependencies for task in tasks_of(changed).values()))
    assert needed <= tasks_of(changed).keys()


def test_a_plan_of_many_steps_is_rebuilt() -> None:
    """A plan that Dask can compute is not too deep for Python's stack."""
    steps = table()
    for number in range(sys.getrecursionlimit()):
        steps = steps[["key", "value"]] if number % 2 else steps.rename(columns=str)
    changed = rebuild(steps.expr, partial(with_operand, parameter="columns", value=["key", "value"]))
    assert changed._name != steps.expr._name
    assert len(list(changed.walk())) == len(list(steps.expr.walk()))


def test_a_result_that_another_one_is_made_of_is_computed_once() -> None:
    doubled = table().value * 2
    found = fuse(plan(doubled, doubled + 1))
    first, second = dask.get(tasks_of(found), list(flatten(found.__dask_keys__())))
    assert second.equals(first + 1)


def test_other_collections_are_left_as_they_are() -> None:
    for collections in ([dask.delayed(sum)([1, 2])], [dask.delayed(sum)([1, 2]), dask.delayed(max)([1, 2])]):
        found = plan(*collections)
        assert fuse(found) is found
    with pytest.warns(UserWarning, match="mixed collections"):
        found = plan(dask.delayed(sum)([1, 2]), table())
    assert fuse(found) is found
