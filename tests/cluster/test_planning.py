"""With the runtime on, a client keeps what it plans with; results are those of Dask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import pytest
from distributed import Client

import dask_gpurt
from tests.helpers.clusters import Library, cluster
from tests.helpers.planned import tables

PLANS = "planning.plans.reused"


def query(path: Path, library: str) -> Any:
    with dask.config.set({"dataframe.backend": library}):
        table = dd.read_parquet(path)
    sums = table.groupby("key")["ratio"].sum(split_out=2).reset_index()
    return table[table.small > 0].merge(sums, on="key", suffixes=("", "_sum"), broadcast=False)


def result(path: Path, library: str) -> Any:
    found = query(path, library).compute()
    found = found.to_pandas() if hasattr(found, "to_pandas") else found
    return found[["key", "ratio", "ratio_sum"]].sort_values(["key", "ratio"]).reset_index(drop=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    table = tables(rows=60)[0][["key", "small", "ratio"]]
    dd.from_pandas(table, npartitions=4).to_parquet(tmp_path / "table")
    return tmp_path / "table"


def reused(client: Client) -> float:
    return float(dask_gpurt.report(client).counters.get(PLANS, 0))


def test_plans_are_reused_and_give_the_same(client: Client, library: Library, path: Path) -> None:
    before = reused(client)
    # A setting that changes, as the backend, has everything dropped.
    with dask.config.set({"dataframe.backend": library.name}):
        first, second = result(path, library.name), result(path, library.name)
    assert reused(client) > before
    with dask.config.set({"dataframe.shuffle.method": "tasks"}):
        expected = result(path, library.name)
    for found in (first, second):
        assert found.equals(expected) or (found - expected).abs().max().max() < 1e-9


def test_that_it_can_be_switched_off(path: Path) -> None:
    with dask.config.set({"gpurt.planning.cache": False}), cluster("pandas") as client:
        before = reused(client)
        assert result(path, "pandas").equals(result(path, "pandas"))
        assert reused(client) == before


def test_that_nothing_is_kept_once_the_runtime_is_off(path: Path) -> None:
    with cluster("pandas") as client:
        enabled = result(path, "pandas")
        before = reused(client)
        dask_gpurt.disable(client)
        with dask.config.set({"dataframe.shuffle.method": "tasks"}):
            assert result(path, "pandas").equals(enabled)
        dask_gpurt.enable(client)
        assert reused(client) == before
        assert result(path, "pandas").equals(enabled)
        assert reused(client) == before  # it was dropped
