"""Use two clusters from one process, one without the runtime: each computation goes by its own client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client, LocalCluster

import dask_gpurt

ROWS = 400
FRAME = pd.DataFrame({"key": np.arange(ROWS) % 7, "row": np.arange(ROWS)})


@pytest.fixture(scope="module")
def clients() -> Iterator[tuple[Client, Client]]:
    """Return a client with the runtime, and a plain one."""
    with ExitStack() as stack:
        served, plain = (
            stack.enter_context(
                Client(
                    stack.enter_context(
                        LocalCluster(
                            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
                        )
                    ),
                    set_as_default=False,
                )
            )
            for _ in range(2)
        )
        dask_gpurt.enable(served)
        yield served, plain
        dask_gpurt.disable(served)


WAYS: dict[str, Callable[[Client, Any], Any]] = {
    "compute": lambda client, frame: client.compute(frame).result(),
    "persist": lambda client, frame: client.compute(client.persist(frame)).result(),
    "scheduler": lambda client, frame: frame.compute(scheduler=client),
    "get": lambda client, frame: dask.compute(frame, scheduler=client.get)[0],
    "current": lambda client, frame: frame.compute(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("current", ["served", "plain"])
def test_each_computation_goes_by_its_client(clients: tuple[Client, Client], current: str, way: str) -> None:
    served, plain = clients
    with served.as_current() if current == "served" else plain.as_current():
        runs = dask_gpurt.report(served)["counters"].get("shuffle.runs", 0)
        for client in (plain, served) if way != "current" else [served if current == "served" else plain]:
            shuffled = dd.from_pandas(FRAME, npartitions=3).shuffle("key")
            found = WAYS[way](client, shuffled)
            assert sorted(found.row) == list(range(ROWS))
        expected = runs + (way != "current" or current == "served")
        assert dask_gpurt.report(served)["counters"].get("shuffle.runs", 0) == expected
