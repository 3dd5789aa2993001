"""Put the exchange under pressure: bounded pools, bounded transfers, every path, no deadlock."""

from __future__ import annotations

from typing import Any

import dask
import numpy as np
import pandas as pd
import pytest
from distributed import Client

import dask_gpurt
from tests.helpers.clusters import Library, assert_same_partitions, by_tasks, counters, partitions
from tests.helpers.nightly import nightly
from tests.helpers.shared_cluster import SharedCluster

PARTS, ROWS = 8, 40_000  # 640 kB each, in two columns


def inputs(rows: int = ROWS, seed: int = 3) -> list[pd.DataFrame]:
    random = np.random.default_rng(seed)
    return [
        pd.DataFrame({"key": random.integers(0, 9999, rows), "row": np.arange(rows) + part * rows})
        for part in range(PARTS)
    ]


def assert_like_tasks(library: Library, parts: list[pd.DataFrame]) -> None:
    def build(df: Any) -> Any:
        return df.shuffle("key", ignore_index=True)

    ours = partitions(build(library.collection(parts)))
    assert_same_partitions(ours, by_tasks(build, library.lazy(parts)), in_order=False, index=False)


def pools(client: Client) -> list[dict[str, int]]:
    workers = dask_gpurt.report(client)["workers"].values()
    return [pool for worker in workers for pool in worker["pools"].values()]


def test_a_pool_far_smaller_than_the_data_blocks_but_does_not_fail(
    shared_cluster: SharedCluster, library: Library
) -> None:
    """It holds a single piece of a shard."""
    with shared_cluster.client(library.name, exchange__pool="64 kiB") as client:
        assert_like_tasks(library, inputs())
        assert max(worker["counters"].get("exchange.pool.peak", 0) for worker in workers(client)) <= 2**16
        assert all(pool["used"] == 0 for pool in pools(client) if pool["capacity"])
        assert counters(client)["exchange.seconds.waiting-for-room"] > 0


def workers(client: Client) -> list[dict[str, Any]]:
    return list(dask_gpurt.report(client)["workers"].values())


@pytest.mark.parametrize("pool", ["auto", nightly("256 kiB")])
def test_without_a_mapping_bytes_take_the_comms_and_few_at_once(
    shared_cluster: SharedCluster, library: Library, pool: str
) -> None:
    settings = {"exchange__paths": ["comms"], "exchange__pool": pool, "exchange__inflight": "100 kiB"}
    with shared_cluster.client(library.name, **settings) as client:
        assert_like_tasks(library, inputs())
        found = counters(client)
        assert found["exchange.bytes.comms"] > 0
        assert "exchange.bytes.shared-memory" not in found
        assert "exchange.bytes.cuda-ipc" not in found
        shard = ROWS * 16 // 2
        for worker in workers(client):
            assert worker["counters"]["exchange.inflight.peak"] <= 100 * 2**10 + shard * 2
            assert "gpurt.exchange.paths" in str(worker["fallbacks"])


def test_a_row_larger_than_the_pool_is_an_error_that_names_the_setting(
    shared_cluster: SharedCluster, library: Library
) -> None:
    with shared_cluster.client(library.name, exchange__pool="64 kiB") as client:
        df = library.collection([pd.DataFrame({"key": [1], "text": ["x" * 300_000]}) for _ in range(2)])
        with pytest.raises(RuntimeError) as caught:
            df.shuffle("key").compute()
        assert "gpurt.exchange.pool" in str(caught.value.__cause__)
        assert_like_tasks(library, inputs(500))
        assert counters(client)["shuffle.runs"]


def test_the_threads_of_the_exchange_are_an_executor_of_the_worker(
    shared_cluster: SharedCluster, library: Library
) -> None:
    def thread() -> str:
        import threading

        return threading.current_thread().name

    with shared_cluster.client(library.name) as client:
        with dask.annotate(executor="gpurt-comm"):
            assert client.submit(thread, pure=False).result().startswith("gpurt-comm")
        dask_gpurt.disable(client)
        assert not any(client.run(lambda dask_worker: "gpurt-comm" in dask_worker.executors).values())
