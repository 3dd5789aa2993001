"""Find what tasks read, and the workers that keep it."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import pandas as pd
import pyarrow.fs as pa_fs
import pytest
from dask._task_spec import Task, TaskRef
from dask.dataframe.io.parquet.core import ParquetFunctionWrapper

from benchmarks.simulate.clock import Clock
from benchmarks.simulate.scheduler import VirtualScheduler
from dask_gpurt.dask_hooks.parquet_files import pieces_read
from dask_gpurt.scheduler.read_places import ReadPlaces

PER_HOST = 8
NBYTES = 64 << 20


class BareState(VirtualScheduler):
    """Dask's scheduler with simulated workers; it keeps the messages to them."""

    def __init__(self, workers: int, threads: int = 1):
        with dask.config.set({"distributed.scheduler.work-stealing": False}):
            super().__init__(Clock(), 0.0, _no_listener)
        self.sent: deque[tuple[str, Any]] = deque()
        for number in range(workers):
            host, device = divmod(number, PER_HOST)
            address = f"tcp://10.{host // 250}.{host % 250}.1:{device + 1}"
            self.join(address, threads, 80 << 30, partial(self._keep, address))

    def _keep(self, address: str, *messages: dict[str, Any]) -> None:
        self.sent.extend((address, m["key"]) for m in messages if m["op"] == "compute-task")

    def run(self) -> list[tuple[Any, str]]:
        """Finish the sent tasks in order; return the worker of each task."""
        done = []
        while self.sent:
            address, key = self.sent.popleft()
            self.finish(key, address)
            done.append((key, address))
        return done

    def finish(self, key: Any, address: str, nbytes: int = NBYTES) -> None:
        """Complete the fetches and the run of a task on a worker."""
        ts, ws = self.tasks[key], self.workers[address]
        for dts in ts.dependencies:
            self.add_replica(dts, ws)
        self.handle_task_finished(
            key=key,
            worker=address,
            stimulus_id="finish",
            run_id=ts.run_id,
            metadata={},
            nbytes=nbytes,
            type=b"",
            typename="int",
            startstops=[{"action": "compute", "start": 0.0, "stop": 0.1}],
        )


def _no_listener(*messages: Any) -> None:
    """Drop reports to the client."""


@pytest.mark.parametrize("way", ["fsspec", "arrow", "arrow, pickled"])
def test_what_is_read_of_local_files_is_known_where_it_is_kept(tmp_path: Path, way: str) -> None:
    for number in range(3):
        pd.DataFrame({"x": range(10)}).to_parquet(tmp_path / f"{number}.parquet")
    files: Any = "fsspec" if way == "fsspec" else pa_fs.LocalFileSystem()
    graph = dd.read_parquet(tmp_path, filesystem=files).optimize(fuse=False).dask
    specs = [spec for spec in graph.values() if spec.data_producer]
    if way == "arrow, pickled":
        specs = pickle.loads(pickle.dumps(specs))
    found = {piece for spec in specs for piece, columns in pieces_read(spec, local=True) if columns == ["x"]}
    assert {Path(path).name for path, _, _ in found} == {f"{number}.parquet" for number in range(3)}
    assert all(is_local for _, _, is_local in found)
    assert [piece for spec in specs for piece in pieces_read(spec, local=False)] == []


def test_reads_go_to_their_files_in_any_order() -> None:
    state = BareState(16)
    places = ReadPlaces(state, list(state.workers), pytest.fail)
    places.bind()
    found = []
    for query in range(3):
        files = list(range(40))[:: 1 - 2 * (query % 2)]  # in another order each time
        graph = {f"read{query}-{file}": read_of(f"read{query}-{file}", file) for file in files}
        state.submit(graph, set(graph))
        done = state.run()
        for key, worker in done:
            places.transition(key, "memory", worker)
        found.append({key.partition("-")[2]: worker for key, worker in done})
    assert found[0] == found[1] == found[2]


def test_dask_chooses_by_its_own_methods_until_a_graph_reads_files_that_stay() -> None:
    state = BareState(2)
    places = ReadPlaces(state, list(state.workers), pytest.fail)
    for name, task in {"x": Task("x", tuple), "read": read_of("read", 1)}.items():
        state.new_task(name, task, "released").run_spec = task
        places.on_graph([name, "forgotten"])
        assert ("is_rootish" in vars(state)) == (name == "read")
    places.unbind()
    assert "is_rootish" not in vars(state)


@pytest.mark.parametrize("way", ["fsspec", "arrow"])
def test_columns_of_several_files_are_known(tmp_path: Path, way: str) -> None:
    for number in range(4):
        pd.DataFrame({name: range(10) for name in "abcdef"}).to_parquet(tmp_path / f"{number}.parquet")
    files: Any = "fsspec" if way == "fsspec" else pa_fs.LocalFileSystem()
    graph = dd.read_parquet(tmp_path, filesystem=files)[["b", "d"]].sum().optimize().dask
    reads = [spec for spec in graph.values() if isinstance(spec, Task) and spec.data_producer]
    found = [pieces_read(spec, local=True) for spec in reads]
    assert max(map(len, found)) > 1
    assert len({piece for reads in found for piece, _ in reads}) == 4
    assert {tuple(columns) for reads in found for _, columns in reads} == {("b", "d")}


def test_reads_of_other_groups_of_files_do_not_move_what_is_read_in_these() -> None:
    state = BareState(2)
    places = ReadPlaces(state, list(state.workers), pytest.fail)
    places.bind()
    # By other columns Dask reads more or fewer files at once.
    queries = {"ab": [(0, 1), (2, 3)], "ac": [(0, 1, 2, 3)]}
    held: set[tuple[str, int, str]] = set()
    for turn in range(2):
        for columns, groups in queries.items():
            of = {f"{columns}-{turn}-{number}": group for number, group in enumerate(groups)}
            state.submit({key: read_of(key, *group, columns=columns) for key, group in of.items()}, set(of))
            for key, worker in state.run():
                needed = {(worker, file, name) for file in of[key] for name in columns}
                assert not turn or needed <= held
                held |= needed
                places.transition(key, "memory", worker)


def test_of_workers_with_the_same_columns_the_one_with_fewer_tasks_gets_a_read() -> None:
    state = BareState(3)
    places = ReadPlaces(state, list(state.workers), pytest.fail)
    places.bind()
    one, two, other = state.workers
    for number, (worker, columns) in enumerate([(one, "ab"), (two, "ab"), (other, "b")]):
        read(state, places, f"read-{number}", worker, columns)
    graph = {f"again-{number}": read_of(f"again-{number}", 0, columns="a") for number in range(6)}
    state.submit(graph, set(graph))
    assert sorted(worker for worker, _ in state.sent) == sorted([one, two] * 3)


def test_reads_that_look_for_values_go_to_their_files() -> None:
    state = BareState(4)
    places = ReadPlaces(state, list(state.workers), pytest.fail)
    places.bind()
    home = list(state.workers)[3]
    read(state, places, "read", home, "ab")
    # Values to look for, or a small table to join, in a task that Dask has fused with the read.
    graph = {"values": Task("values", tuple), "again": read_of("again", 0, columns="a", needs=["values"])}
    state.submit(graph, {"again"})
    assert [worker == home for _, worker in state.run()] == [False, True]


def test_what_steals_a_read_has_to_read_its_files_first() -> None:
    state = BareState(3)
    places = ReadPlaces(state, list(state.workers), pytest.fail)
    read(state, places, "unnoticed", list(state.workers)[1], "a")
    places.bind()
    home = next(iter(state.workers))
    read(state, places, "read", home, "ab")
    graph = {"again": read_of("again", 0, columns="a"), "plain": Task("plain", tuple)}
    state.submit(graph, set(graph))
    again, plain = (state.tasks[key] for key in graph)
    again.prefix.duration_average = 2.0
    assert [state.get_comm_cost(again, ws) for ws in state.workers.values()] == [0, 6.0, 6.0]
    assert [state.get_comm_cost(plain, ws) for ws in state.workers.values()] == [0, 0, 0]


def read(state: BareState, places: ReadPlaces, key: str, worker: str, columns: str) -> None:
    """Note that a worker has read a file."""
    graph = {key: read_of(key, 0, columns=columns)}
    state.submit(graph, set(graph))
    state.run()
    places.transition(key, "memory", worker)


def read_of(key: str, *files: int, columns: str = "", needs: Sequence[str] = ()) -> Task:
    """Return a task that reads files, as Dask makes it; with inputs it is one of several that are fused."""
    reader: Any = object.__new__(ParquetFunctionWrapper)
    reader.fs, reader._columns = None, list(columns)
    parts = [{"piece": (f"/{file}", None, None)} for file in files]
    if not needs:
        return Task(key, reader, parts, _data_producer=True)
    inner = Task(f"inner-{key}", reader, parts, _data_producer=True)
    return Task.fuse(inner, Task(key, sorted, TaskRef(inner.key), *map(TaskRef, needs)))
