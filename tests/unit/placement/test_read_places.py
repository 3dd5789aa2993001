"""Find what tasks read, and the workers that keep it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import pandas as pd
import pyarrow.fs as pa_fs
import pytest

from dask_gpurt.dask_hooks.parquet_files import pieces_read
from dask_gpurt.memory.ledger import CACHED, ClusterMemory, Ledger
from dask_gpurt.memory.tiers import Tier


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
