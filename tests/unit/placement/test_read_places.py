"""Find what tasks read, and the workers that keep it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import pandas as pd
import pyarrow.fs as pa_fs
import pytest
from dask._task_spec import Task
from dask.dataframe.io.parquet.core import ParquetFunctionWrapper

from benchmarks.placement.decisions import BareState, headroom_of, topology_of
from dask_gpurt.dask_hooks.parquet_files import pieces_read
from dask_gpurt.memory.ledger import CACHED, ClusterMemory, Ledger
from dask_gpurt.memory.tiers import Tier
from dask_gpurt.observe import Metrics
from dask_gpurt.placement import Placement
from dask_gpurt.placement.reads import ReadPlaces


@pytest.mark.parametrize("way", ["fsspec", "arrow", "arrow, pickled"])
def test_what_is_read_of_local_files_is_known_where_it_is_kept(tmp_path: Path, way: str) -> None:
    for number in range(3):
        pd.DataFrame({"x": range(10)}).to_parquet(tmp_path / f"{number}.parquet")
    files: Any = "fsspec" if way == "fsspec" else pa_fs.LocalFileSystem()
    graph = dd.read_parquet(tmp_path, filesystem=files).optimize(fuse=False).dask
    specs = [spec for spec in graph.values() if spec.data_producer]
    if way == "arrow, pickled":
        specs = pickle.loads(pickle.dumps(specs))
    found = {piece for spec in specs for piece in pieces_read(spec, local=True)}
    assert {Path(path).name for path, _, _ in found} == {f"{number}.parquet" for number in range(3)}
    assert all(is_local for _, _, is_local in found)
    assert [piece for spec in specs for piece in pieces_read(spec, local=False)] == []


def test_workers_with_a_gpu_keep_local_files_and_all_keep_remote_ones() -> None:
    memory = ClusterMemory()
    for worker, pool in (("host", 0), ("gpu", None)):
        ledger = Ledger(dict.fromkeys(Tier, 100))
        ledger.shared_memory = pool
        memory.apply(worker, ledger.snapshot())
        assert not memory.has_cached(worker, local=pool is None)
        assert memory.has_gpus == (pool is None)
        ledger.set(Tier.DEVICE, CACHED, 7)
        message = ledger.changes()
        assert message is not None
        memory.apply(worker, message)
        assert [memory.has_cached(worker, local) for local in (False, True)] == [True, pool is None]
    memory.forget("gpu")
    ledger.set(Tier.DEVICE, CACHED, 0)
    ledger.set(Tier.HOST, CACHED, 7)  # bytes of remote files
    memory.apply("gpu", ledger.snapshot())
    assert [memory.has_cached("gpu", local) for local in (False, True)] == [True, False]
    memory.forget("gpu")
    assert not memory.has_gpus
    assert not memory.has_cached("gpu", local=True)


@pytest.mark.parametrize("first", [0, 1])
def test_reads_go_to_their_files_also_while_links_decide_about_all_else(first: int) -> None:
    state = BareState(6)
    places = ReadPlaces(state, lambda worker, local: True, lambda: True, pytest.fail)
    placement = Placement(state, topology_of(state), headroom_of(state), Metrics(), places.place)
    for part in (places, placement)[:: 1 - 2 * first]:
        part.bind()
    found = []
    for query in range(3):
        # Fewer tasks than workers, so that Dask does not queue them, in another order each time.
        files = list(range(5))[:: 1 - 2 * (query % 2)]
        graph = {f"read{query}-{file}": read_of(f"read{query}-{file}", file) for file in files}
        state.submit(graph, set(graph))
        done = state.run()
        for key, worker in done:
            places.transition(key, "memory", worker)
        found.append({key.partition("-")[2]: worker for key, worker in done})
    assert found[0] == found[1] == found[2]


def test_dask_chooses_by_its_own_methods_until_a_graph_reads_files_that_stay() -> None:
    state = BareState(2)
    places = ReadPlaces(state, lambda worker, local: True, lambda: True, pytest.fail)
    for name, task in {"x": Task("x", tuple), "read": read_of("read", 1)}.items():
        state.new_task(name, task, "released").run_spec = task
        places.on_graph([name, "forgotten"])
        assert ("is_rootish" in vars(state)) == (name == "read")
    places.unbind()
    assert "is_rootish" not in vars(state)


def read_of(key: str, file: int) -> Task:
    """Return a task that reads a file, as Dask makes it."""
    reader: Any = object.__new__(ParquetFunctionWrapper)
    reader.fs = None
    return Task(key, reader, {"piece": (f"/{file}", None, None)}, _data_producer=True)
