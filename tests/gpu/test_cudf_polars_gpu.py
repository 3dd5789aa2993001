"""Run queries of cudf-polars on the workers of a cluster that has the runtime on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client

import dask_gpurt
from tests.helpers.clusters import cluster
from tests.helpers.gpus import cuda_devices

pytestmark = pytest.mark.gpu

polars = pytest.importorskip("polars", reason="polars is not installed")
engines = pytest.importorskip("cudf_polars.engine.dask", reason="cudf-polars is not installed")

FILES, ROWS, KEYS = 8, 50_000, 1_000


@pytest.fixture
def orders(tmp_path: Path) -> pd.DataFrame:
    """Write orders and their customers as Parquet files, and return all orders."""
    random = np.random.RandomState(0)
    parts = []
    for number in range(FILES):
        part = pd.DataFrame(
            {"customer": random.randint(0, KEYS, ROWS), "price": random.randint(0, 100, ROWS)}
        )
        part.to_parquet(tmp_path / f"orders-{number}.parquet", index=False)
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def by_shuffle(folder: Path) -> pd.DataFrame:
    """Sum the prices of each customer with dask_cudf, after a shuffle of the orders."""
    with dask.config.set({"dataframe.backend": "cudf"}):
        orders = dd.read_parquet(str(folder / "orders-*.parquet"))
    summed = orders.shuffle("customer").groupby("customer").price.sum(split_out=4)
    return as_table(summed.compute().to_pandas().reset_index())


def by_query(folder: Path, engine: Any) -> pd.DataFrame:
    """Sum the prices of each customer with cudf-polars."""
    orders = polars.scan_parquet(folder / "orders-*.parquet")
    query = orders.group_by("customer").agg(polars.col("price").sum())
    found = query.collect(engine=engine)
    return as_table(pd.DataFrame({name: found[name].to_numpy() for name in found.columns}))


def as_table(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.sort_values("customer").reset_index(drop=True).astype("int64")


def resource() -> str:
    """Return the class of the current resource of a worker."""
    import rmm

    return type(rmm.mr.get_current_device_resource()).__name__


def wait_until_guarded(client: Client) -> None:
    """Wait until the runtime has found the resource that the engine has set on each worker."""
    deadline = time.monotonic() + 10
    while (kinds := set(client.run(resource).values())) != {"GuardedResource"}:
        assert time.monotonic() < deadline, kinds
        time.sleep(0.05)  # the worker looks every 0.2 s, and reports nothing


@pytest.mark.skipif(cuda_devices() < 2, reason="LocalCUDACluster needs a GPU for each worker")
def test_queries_run_between_shuffles(orders: pd.DataFrame, tmp_path: Path) -> None:
    wanted = as_table(orders.groupby("customer").price.sum().reset_index())
    with cluster("cudf", workers=2) as client:
        pd.testing.assert_frame_equal(by_shuffle(tmp_path), wanted)
        # dask-cuda binds its workers to processors by itself.
        unbound = {"hardware_binding": engines.HardwareBindingPolicy(enabled=False)}
        small = {"max_rows_per_partition": ROWS // 2}
        with engines.DaskEngine(dask_client=client, executor_options=small, engine_options=unbound) as engine:
            wait_until_guarded(client)
            for _ in range(2):
                pd.testing.assert_frame_equal(by_query(tmp_path, engine), wanted)
                pd.testing.assert_frame_equal(by_shuffle(tmp_path), wanted)
        pd.testing.assert_frame_equal(by_shuffle(tmp_path), wanted)
        counters = dict(dask_gpurt.report(client)["counters"])
        assert counters["shuffle.rows"] >= 4 * len(orders)
        assert set(client.run(resource).values()) == {"GuardedResource"}
        dask_gpurt.disable(client)
        # The resource of the engine stays, as it would without the runtime.
        assert "GuardedResource" not in set(client.run(resource).values())
        dask_gpurt.enable(client)  # as the end of the cluster expects
