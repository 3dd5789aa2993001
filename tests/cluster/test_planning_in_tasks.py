"""Plan and compute dataframes in tasks, on workers with several threads."""

from __future__ import annotations

import json
import sys
from functools import cached_property

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client, get_client, wait

import dask_gpurt
from benchmarks.common.waiting import thread_stacks
from tests.helpers.clusters import cluster
from tests.helpers.waiting import LIMIT_S

TASKS = 4


def sort_and_join(number: int) -> int:
    """Compute dataframes on the cluster that this task is part of, by a plan that computes divisions too."""
    get_client()
    left = pd.DataFrame({"k": np.arange(400) % 10, "x": np.arange(400)[::-1] + number})
    right = pd.DataFrame({"k": np.arange(10), "y": np.arange(10)})
    joined = dd.from_pandas(left, npartitions=4).merge(dd.from_pandas(right, npartitions=2), on="k")
    return int(joined.sort_values("x").y.sum().compute())


def run_tasks(client: Client) -> None:
    """Check the results of tasks that compute dataframes; if they hang, fail with the workers' stacks."""
    tasks = client.map(sort_and_join, range(TASKS), pure=False)
    try:
        wait(tasks, timeout=2 * LIMIT_S)
    except TimeoutError:
        pytest.fail(json.dumps(client.run(thread_stacks), indent=1).replace("\\n", "\n"))
    assert client.gather(tasks) == [1_800] * TASKS


def test_tasks_compute_dataframes_on_workers_with_several_threads() -> None:
    with cluster(workers=1, threads=4) as client:
        if sys.version_info < (3, 12):  # the first Python without a lock for all instances
            assert not any(client.run(_reads_as_python_does).values())
        run_tasks(client)
        dask_gpurt.disable(client)
        assert all(client.run(_reads_as_python_does).values())


def _reads_as_python_does() -> bool:
    return not hasattr(vars(cached_property)["__get__"], "__wrapped__")
