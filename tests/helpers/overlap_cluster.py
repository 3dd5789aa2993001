"""Start clusters whose compute is confined by the test's own interposer."""

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
from tests.helpers.actuators import Launches
from tests.helpers.clusters import QUICK, instrument

FRAME = pd.DataFrame({"key": range(2000), "value": 0.5})


def shuffled() -> pd.DataFrame:
    frame = dd.from_pandas(FRAME, npartitions=4).shuffle("key")
    result: pd.DataFrame = frame.map_partitions(doubled).compute()
    return result


def doubled(part: pd.DataFrame) -> pd.DataFrame:
    return part.assign(value=part["value"] * 2)


def assert_right(frame: pd.DataFrame) -> None:
    expected = FRAME.assign(value=1.0)
    pd.testing.assert_frame_equal(frame.sort_values("key", ignore_index=True), expected, check_dtype=False)


Starting = Callable[..., Client]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Starting]:
    """Start a cluster in this process with the test's own interposer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("dask_gpurt.worker.residency.Interposer", Launches)
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    opened: list[Any] = []

    def begin(**settings: Any) -> Client:
        nested = {f"gpurt.overlap.{name}": value for name, value in settings.items()}
        nested["gpurt.overlap.residency"] = "auto"
        with dask.config.set({**QUICK, **nested}):
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
