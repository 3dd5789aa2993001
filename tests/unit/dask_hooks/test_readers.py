"""Recognise tasks that begin with a reader of Dask or dask_cudf."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.machinery import ModuleSpec
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.dataframe.dask_expr.io.io import FusedParquetIO
from dask.dataframe.dask_expr.io.parquet import ReadParquetPyarrowFS
from distributed.protocol.pickle import dumps, loads

from dask_gpurt.dask_hooks import PatchSet, parquet_files
from dask_gpurt.dask_hooks.parquet_files import call_of
from dask_gpurt.dask_hooks.readers import READERS, STREAM_READERS, WRITERS, Readers
from dask_gpurt.dask_hooks.types import Task, TaskRef


@pytest.fixture
def patches() -> Iterator[PatchSet]:
    patches = PatchSet()
    yield patches
    patches.restore()


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def readers(patches: PatchSet, calls: list[str]) -> Readers:
    return wrapped(patches, calls, READERS)


@pytest.fixture
def writers(patches: PatchSet, calls: list[str]) -> Readers:
    return wrapped(patches, calls, WRITERS)


def wrapped(patches: PatchSet, calls: list[str], which: Any) -> Readers:
    """Wrap functions, and note their calls."""

    def wrap(reader: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            calls.append(reader.__qualname__)
            return reader(*args, **kwargs)

        return read

    found = Readers(patches, wrap, pytest.fail, which)
    found.wrap_imported()
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for kind in ("parquet", "csv"):
        (tmp_path / kind).mkdir()
    for part in range(3):
        frame = pd.DataFrame({"a": range(5), "b": 1.0, "c": "some text"})
        frame.to_parquet(tmp_path / "parquet" / f"{part}.parquet")
        frame.to_csv(tmp_path / "csv" / f"{part}.csv")
    return tmp_path


def roots(collection: Any) -> list[Any]:
    """Return the tasks of a graph without dependencies."""
    graph = collection.__dask_graph__()
    return [node for node in graph.values() if isinstance(node, Task) and not node.dependencies]


def made(folder: Path, how: str) -> Any:
    match how:
        case "parquet":
            return dd.read_parquet(folder / "parquet")
        case "arrow":
            return dd.read_parquet(folder / "parquet", filesystem="arrow")
        case "csv":
            return dd.read_csv(folder / "csv" / "*.csv")
        case "blocks":
            return dd.read_csv(folder / "csv" / "*.csv", blocksize=20)
    raise AssertionError(how)


HOW = ["parquet", "arrow", "csv", "blocks"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("of", ["alone", "with a function", "a column", "fused"])
def test_a_task_that_reads_first_begins_with_a_read(
    how: str, of: str, folder: Path, readers: Readers, calls: list[str]
) -> None:
    collection = made(folder, how)
    if of == "with a function":
        collection = collection.map_partitions(lambda frame: frame)
    elif of == "a column":
        collection = collection["a"]
    elif of == "fused":  # several files in one partition, since only one of their columns is read
        collection = collection[["a"]]
    found = roots(collection.optimize())
    assert found
    assert all(readers.begins_with_read(node) for node in found)
    calls.clear()
    assert len(collection.compute(scheduler="sync")) == 15
    assert calls


def test_a_task_that_calls_something_else_first_does_not(folder: Path, readers: Readers) -> None:
    read = dd.read_parquet(folder / "parquet")
    ours = dd.from_map(pd.read_parquet, [str(folder / "parquet" / "0.parquet")])
    numbers = dd.from_pandas(pd.DataFrame({"a": range(5)}), npartitions=1)
    for collection in (ours, ours.map_partitions(len), numbers.map_partitions(len)):
        assert not any(readers.begins_with_read(node) for node in roots(collection.optimize()))
    (reading,) = roots(read.partitions[0].optimize())
    assert not readers.begins_with_read(Task("sum", sum, [1, 2]))
    assert readers.begins_with_read(Task("outer", len, reading))
    both = Task("both", max, reading, Task("first", sum, [1]))
    assert not readers.begins_with_read(both)
    assert readers.begins_with_read(Task("partial", partial(reading.func), *reading.args))


@pytest.mark.parametrize("sent", [False, True])
def test_a_reader_from_before_it_was_wrapped_is_none(
    sent: bool, folder: Path, patches: PatchSet, calls: list[str]
) -> None:
    """Its calls pass no wrapper, after which the task would wait before it runs code of users."""
    nodes = roots(made(folder, "csv").optimize())
    readers = wrapped(patches, calls, READERS)
    if sent:
        nodes = cloudpickle.loads(cloudpickle.dumps(nodes))
    assert not any(readers.begins_with_read(node) for node in nodes)
    patches.restore()
    assert all(readers.begins_with_read(node) for node in roots(made(folder, "csv").optimize()))


class Proxy:
    """Forward attribute accesses to a target that is not available."""

    def __call__(self, *args: Any) -> Any:
        raise AssertionError("nothing is called in this test")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no connection, so no {name}")


@pytest.mark.parametrize(
    "function",
    [
        str.upper,
        (1).__add__,
        itemgetter(0),
        np.add,
        pytest.param(Proxy(), id="proxy"),
    ],
)
def test_any_callable_may_be_that_of_a_task(function: Any, folder: Path, readers: Readers) -> None:
    assert not readers.begins_with_read(Task("alone", function, "a"))
    (reading,) = roots(dd.read_parquet(folder / "parquet").partitions[0].optimize())
    assert readers.begins_with_read(Task("outer", function, reading))


def test_a_writer_is_wrapped_unless_it_calls_a_function_of_users(
    tmp_path: Path, writers: Readers, calls: list[str]
) -> None:
    frame = dd.from_pandas(pd.DataFrame({"a": range(5)}), npartitions=1)
    frame.to_parquet(tmp_path, compute_kwargs={"scheduler": "sync"})
    assert calls == ["ToParquetFunctionWrapper.__call__"]
    named = {"name_function": "named-{}.parquet".format}
    frame.to_parquet(tmp_path, compute_kwargs={"scheduler": "sync"}, **named)
    assert len(calls) == 1
    assert (tmp_path / "named-0.parquet").exists()


def test_a_task_ends_with_a_write_if_nothing_follows_it(tmp_path: Path, writers: Readers) -> None:
    frame = dd.from_pandas(pd.DataFrame({"a": range(5)}), npartitions=2)
    written = frame.to_parquet(tmp_path, compute=False).optimize()
    fused = next(task for task in written.__dask_graph__().values() if isinstance(task, Task))
    graph, last, *_ = fused.args
    assert writers.ends_with_write(fused)
    assert writers.ends_with_write(graph[last])
    assert not writers.begins_with_read(fused)
    after = Task("after", len, TaskRef(last))
    assert not writers.ends_with_write(Task.fuse(*graph.values(), after))
    assert not writers.ends_with_write(Task("after", len, graph[last]))


def test_a_task_with_inputs_may_begin_with_a_read(folder: Path, readers: Readers) -> None:
    """As one that reads, and joins with the partition of a small table."""
    (reading,) = roots(dd.read_parquet(folder / "parquet").partitions[0].optimize())
    joined = Task("joined", pd.merge, TaskRef(reading.key), TaskRef("small"))
    assert readers.begins_with_read(Task.fuse(reading, joined))
    prepared = Task("prepared", len, TaskRef("small"))
    both = Task("both", pd.merge, TaskRef(reading.key), TaskRef("prepared"))
    assert not readers.begins_with_read(Task.fuse(reading, prepared, both))


@pytest.mark.parametrize("converters", [None, {"a": int}])
def test_a_reader_that_calls_code_of_users_is_left_alone(
    folder: Path, readers: Readers, calls: list[str], converters: Any
) -> None:
    collection = dd.read_csv(folder / "csv" / "*.csv", converters=converters)
    calls.clear()
    assert collection.a.sum().compute(scheduler="sync") == 30
    assert ("pandas_read_text" in calls) is (converters is None)


def test_a_reader_that_is_not_as_it_is_known_is_left_alone_and_told_of_once(
    patches: PatchSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def another(fragment: Any, filters: Any, columns: Any, schema: Any, cached: bool = True) -> Any:
        raise AssertionError("nothing is read in this test")

    def wrap(reader: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: reader(*args, **kwargs)

    monkeypatch.setattr(ReadParquetPyarrowFS, "_fragment_to_table", staticmethod(another))
    told = list[str]()
    readers = Readers(patches, wrap, told.append)
    readers.wrap_imported()
    readers.wrap_imported()
    (difference,) = told
    assert "cached), expected (" in difference
    assert ReadParquetPyarrowFS._fragment_to_table is another
    reads = [
        Task("another", ReadParquetPyarrowFS._fragment_to_table, None, None, None, None),
        Task("as known", FusedParquetIO._load_multiple_files, [], [], None),
    ]
    assert [readers.begins_with_read(task) for task in reads] == [False, True]


def test_a_reader_of_a_library_is_wrapped_once_it_is_imported(
    patches: PatchSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand in for libcudf's, since it cannot be imported without a GPU."""

    def read_parquet(options: Any, stream: Any = None, mr: Any = None, parquet_metadatas: Any = None) -> Any:
        return options, stream

    def on_stream(reader: Callable[..., Any]) -> Callable[..., Any]:
        return lambda options: reader(options, "own stream")

    library = ModuleType("pylibcudf.io.parquet")
    library.__spec__ = ModuleSpec(library.__name__, None)
    vars(library)["read_parquet"] = read_parquet
    for name in ("pylibcudf", "pylibcudf.io"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    readers = Readers(patches, on_stream, pytest.fail, STREAM_READERS)
    readers.wrap_imported()
    assert library.read_parquet is read_parquet
    monkeypatch.setitem(sys.modules, library.__name__, library)
    readers.wrap_imported()
    assert library.read_parquet("options") == ("options", "own stream")
    patches.restore()
    assert library.read_parquet is read_parquet


def test_equal_reads_of_local_files_by_cudf_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pd.DataFrame({"a": [1, 2], "b": ["x", "y"]}).to_parquet(tmp_path / "0.parquet")
    frame = dd.read_parquet(tmp_path)

    def read(columns: list[str]) -> Any:
        (task,) = frame[columns].optimize().__dask_graph__().values()
        return task.func, task.args[0]

    reader, part = read(["a"])
    assert call_of((reader, part), {}) is None  # pandas reads
    monkeypatch.setattr(parquet_files, "_is_engine_of_cudf", lambda engine: True)
    call = call_of((reader, part), {})
    assert call is not None
    assert call_of(pickle.loads(pickle.dumps((reader, part))), {}) == call
    assert call_of(read(["a"]), {}) == call
    assert call_of((reader, [part]), {}) == call
    other = {**part, "piece": (part["piece"][0], [0], None)}
    for another in (read(["a", "b"]), (reader, other), (reader, [part, part])):
        assert call_of(another, {}) not in (None, call)
    pattern = {**part, "piece": (str(tmp_path / "*.parquet"), None, None)}
    reader.common_kwargs["of a user"] = lambda: None
    for unknown in ((reader, pattern), (reader, part), (len, part), (reader,)):
        assert call_of(unknown, {}) is None


@pytest.mark.parametrize("name", [None, "named"])
def test_tasks_that_read_are_pickled_without_the_metadata_of_columns(name: Any, tmp_path: Path) -> None:
    table = pd.DataFrame({"a": [1, 2], "b": ["x", "y"]}).rename_axis(columns=name)
    table.to_parquet(tmp_path / "0.parquet")
    frame = dd.read_parquet(tmp_path)
    (task,) = frame[["a"]].optimize().__dask_graph__().values()
    reader, part = task.func, task.args[0]
    assert list(reader.meta.columns) == ["a", "b"]
    found = loads(dumps(reader))
    assert not hasattr(found.meta, "dtypes")
    assert vars(found).keys() == vars(reader).keys()
    pd.testing.assert_frame_equal(found(part), reader(part))
    assert loads(dumps(found)).meta == found.meta  # again, by a scheduler


def test_tasks_that_read_are_pickled_as_they_are_if_dask_uses_more_of_the_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pd.DataFrame({"a": [1, 2]}).to_parquet(tmp_path / "0.parquet")
    (task,) = dd.read_parquet(tmp_path).optimize().__dask_graph__().values()
    monkeypatch.setattr(parquet_files, "uses_the_name_only", lambda: False)
    assert list(loads(dumps(task.func)).meta.columns) == ["a"]
