"""Start clusters in whose workers the test's own interposer caps kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from distributed import Client, LocalCluster

import dask_gpurt
from tests.helpers.clusters import QUICK, instrument
from tests.helpers.launches import Launches

FRAME = pd.DataFrame({"key": range(2000), "value": 0.5})


def shuffled() -> pd.DataFrame:
    result: pd.DataFrame = dd.from_pandas(FRAME, npartitions=4).shuffle("key").compute()
    return result


def assert_right(frame: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(frame.sort_values("key", ignore_index=True), FRAME, check_dtype=False)


Starting = Callable[[int | str], Client]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Starting]:
    """Start a cluster in this process, in a mode of overlap, with the test's own interposer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("dask_gpurt.worker.overlap.Interposer", Launches)
    Launches.made.clear()
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    opened: list[Any] = []

    def begin(mode: int | str) -> Client:
        with dask.config.set({**QUICK, "gpurt.overlap.mode": mode}):
            local = LocalCluster(protocol="tcp", **options)
            client = Client(local)
            opened[:] = [client, local]
            instrument(client)
            dask_gpurt.enable(client)
        return client

    yield begin
    dask_gpurt.disable(opened[0])
    for one in opened:
        one.close()
