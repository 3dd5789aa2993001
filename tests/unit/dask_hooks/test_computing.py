"""Tell planners whether a computation goes to a scheduler of this process."""

from __future__ import annotations

from typing import Any

import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from dask.dataframe.dask_expr._shuffle import Shuffle

from dask_gpurt.dask_hooks.computing import runs_locally
from dask_gpurt.dask_hooks.patch import PatchSet

FRAME = pd.DataFrame({"key": [1, 2, 3, 4], "row": range(4)})


@pytest.fixture
def heard() -> Any:
    """Return a list that records ``runs_locally()`` whenever a shuffle is lowered."""
    said: list[bool] = []
    patches = PatchSet()

    def listening(original: Any) -> Any:
        def lower(expr: Any) -> Any:
            said.append(runs_locally())
            return original(expr)

        return lower

    patches.put(Shuffle, "_lower", listening)
    yield said
    patches.restore()


@pytest.mark.parametrize("scheduler", ["sync", "threads", dask.get])
def test_a_computation_on_a_scheduler_of_this_process_is_local(heard: list[bool], scheduler: Any) -> None:
    with dask.config.set({"dataframe.shuffle.method": "tasks"}):
        shuffled = dd.from_pandas(FRAME, npartitions=2).shuffle("key")
        for compute in (dask.compute, dask.persist, type(shuffled).compute, type(shuffled).persist):
            heard.clear()
            compute(shuffled, scheduler=scheduler)
            assert set(heard) == {True}


def test_planning_alone_is_not_local(heard: list[bool]) -> None:
    with dask.config.set({"dataframe.shuffle.method": "tasks"}):
        dd.from_pandas(FRAME, npartitions=2).shuffle("key").optimize()
    assert set(heard) == {False}
