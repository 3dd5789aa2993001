"""Run the runtime on two hosts with a network between them: paths and lost workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client, Event

import dask_gpurt
from tests.helpers.clusters import assert_same_partitions, by_tasks, counters, partitions
from tests.helpers.two_hosts import ADDRESSES, host_of, on_other_host, two_hosts

PARTS, ROWS = 8, 20_000


def make(part: int, waits: str | None = None, rows: int = ROWS) -> pd.DataFrame:
    if waits and part == PARTS - 1:
        Event(f"{waits}-reached").set()
        Event(waits).wait(timeout=60)
    random = np.random.default_rng(part)
    return pd.DataFrame({"key": random.integers(0, 9999, rows), "row": np.arange(rows) + part * rows})


def collection(**options: Any) -> Any:
    return dd.from_map(make, range(PARTS), meta=make(0).iloc[:0], **options)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def shuffle(df: Any) -> Any:
    return df.shuffle("key", ignore_index=True)


def shuffled(df: Any) -> list[pd.DataFrame]:
    return partitions(shuffle(df))


def assert_like_tasks(ours: list[pd.DataFrame], df: Any) -> None:
    assert_same_partitions(ours, by_tasks(shuffle, df), in_order=False, index=False)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Yield two hosts with two workers each, shared by tests that leave them unchanged."""
    with two_hosts(tmp_path_factory.mktemp("workers")) as client:
        yield client


@pytest.mark.slow
def test_a_shuffle_over_both(hosts: Client) -> None:
    df = collection()
    assert_like_tasks(shuffled(df), df)
    moved = counters(hosts)
    # With two workers each, half of all bytes cross hosts, and a quarter go to the neighbour.
    assert moved["exchange.bytes.comms"] == pytest.approx(2 * moved["exchange.bytes.shared-memory"], rel=0.2)
    for worker, known in dask_gpurt.report(hosts, connect=True)["workers"].items():
        for peer, path in known["paths"].items():
            if peer != worker:
                same = host_of(peer) == host_of(worker)
                assert path["path"] == ("shared-memory" if same else "comms"), (worker, peer, path)


@pytest.mark.nightly
def test_a_shuffle_over_both_by_ucx(tmp_path: Path) -> None:
    pytest.importorskip("distributed_ucxx", reason="UCX between hosts takes distributed-ucxx")
    with two_hosts(tmp_path, protocol="ucx") as client:
        df = collection()
        assert_like_tasks(shuffled(df), df)
        moved = counters(client)
        assert moved["exchange.bytes.comms"] == pytest.approx(
            2 * moved["exchange.bytes.shared-memory"], rel=0.2
        )
        workers = dask_gpurt.report(client)["workers"]
        assert {worker.partition("://")[0] for worker in workers} == {"ucx"}
        assert {host_of(worker) for worker in workers} == set(ADDRESSES)


@pytest.mark.nightly
def test_a_worker_on_the_other_host_is_killed(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as client:
        out = collection(waits="go").shuffle("key", ignore_index=True).persist()
        Event("go-reached", client=client).wait(timeout=60)
        victim = on_other_host(client)[0]
        client.run(die, workers=[victim], on_error="return")
        Event("go", client=client).set()
        ours = partitions(out)
        assert_like_tasks(ours, collection())
        assert len(client.nthreads()) == 3
