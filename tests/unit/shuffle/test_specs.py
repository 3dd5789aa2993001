"""Describe a shuffle: what an output looks like is known before the first row."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import dask.array as da
import pandas as pd
import pytest
from dask._task_spec import Task
from distributed.shuffle._core import P2PBarrierTask, ShuffleId
from distributed.shuffle._shuffle import DataFrameShuffleSpec

from dask_gpurt.device.host import HostDevice
from dask_gpurt.frames import Hashed, column_names
from dask_gpurt.frames.pandas import PandasTable
from dask_gpurt.shuffle import ShuffleSpec
from dask_gpurt.shuffle.spec import outputs_of
from tests.helpers.clusters import Library

TARGET = "_partitions"


def described(meta: Any, *, drop_column: bool = True) -> DataFrameShuffleSpec:
    return DataFrameShuffleSpec(
        id=ShuffleId("shuffle"),
        disk=True,
        npartitions=2,
        column=TARGET,
        meta=meta,
        parts_out=2,
        drop_column=drop_column,
    )


def output(spec: ShuffleSpec) -> Any:
    """Return the empty output as pandas."""
    found = pickle.loads(spec.meta)
    return found if isinstance(found, pd.DataFrame) else found.to_pandas()


def test_an_output_has_all_columns_but_that_of_the_targets(library: Library) -> None:
    frame = pd.DataFrame({"name": ["a"], TARGET: [0], "value": [0.5]}, index=pd.Index([7], name="id"))
    meta = library.frame(frame)
    spec = ShuffleSpec.of(described(meta))
    assert spec.columns == column_names(meta) == ("name", TARGET, "value")
    pd.testing.assert_frame_equal(output(spec), frame[["name", "value"]][:0])
    kept = ShuffleSpec.of(described(meta, drop_column=False), ignore_index=True)
    pd.testing.assert_frame_equal(output(kept), frame[:0].reset_index(drop=True))


@pytest.mark.parametrize("labels", [["a", "a", TARGET], [0, 0.5, TARGET], [("a", "b"), None, TARGET]])
def test_labels_may_be_anything_and_be_equal(labels: list[Any]) -> None:
    frame = pd.DataFrame([[1, 2, 0]])
    frame.columns = pd.Index(labels, dtype="object", tupleize_cols=False, name="labels")
    spec = ShuffleSpec.of(described(frame))
    assert spec.columns == tuple(labels)
    pd.testing.assert_frame_equal(output(spec), frame.drop(columns=TARGET)[:0])


# ---- partitions without rows, and outputs without rows ------------------------------------------------

TABLES: Any = SimpleNamespace(table=lambda frame: PandasTable(HostDevice(1 << 20)))
META = pd.DataFrame({"k": pd.Series(dtype="int64"), TARGET: pd.Series(dtype="int64")})


def test_an_input_without_rows_may_have_any_columns() -> None:
    """Some functions return other columns for no rows, as in the chunks of ``groupby().value_counts()``."""
    spec, other = ShuffleSpec.of(described(META)), pd.DataFrame({"index": [1.5]})
    hashed = Hashed(other[:0], ("k",), other[:0], META[["k"]], lambda rows: rows[["k"]])
    for data in (other[:0], hashed):
        found = spec.input(data, 0, TABLES)
        assert found.split([[0], [1]]) == [None, None]
        assert found.empty() is None
    with pytest.raises(ValueError, match=r"missing .*'k'.*, unexpected \['index'\]"):
        spec.input(other, 0, TABLES)


@pytest.mark.parametrize("dtype", ["int64", "int32", "float64", "Int64", "str", object, "category"])
@pytest.mark.parametrize("ignore_index", [True, False])
def test_an_output_without_rows_has_the_dtypes_of_the_first_input(dtype: Any, ignore_index: bool) -> None:
    """As with ``tasks``; that of the collection may be a guess of the user's."""
    spec = ShuffleSpec.of(described(META), ignore_index=ignore_index)
    rows = pd.DataFrame({"k": pd.Series([1, 2]).astype(dtype)}).set_index(pd.Index([7.5, 8], name="label"))
    empty = spec.input(rows.assign(**{TARGET: 0}), 0, TABLES).empty()
    found, _ = spec.assembler(TABLES).assemble([], empty)
    expected = rows[:0].reset_index(drop=True) if ignore_index else rows[:0]
    pd.testing.assert_frame_equal(found, expected)
    assert (empty is None) == (dtype == "int64" and ignore_index), "what the spec tells is not sent"


def test_an_output_without_rows_has_all_columns_though_the_first_input_lacks_one() -> None:
    spec = ShuffleSpec.of(described(META.assign(v=0.5)), any_columns=True)
    lacking = pd.DataFrame({"k": ["text"], TARGET: [0]})
    assert spec.input(lacking, 0, TABLES).empty() is None


# ---- which output of a shuffle a task assembles, whatever Dask has fused it with ---------------------


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
