"""Share the files of planning's tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

from tests.helpers.planned import Planner


@pytest.fixture(scope="module", autouse=True)
def _collect_only_what_is_new() -> None:
    """Freeze existing objects: late in a run a garbage collection of them would take a second each."""
    gc.freeze()


@pytest.fixture(scope="module")
def by_tasks() -> Iterator[None]:
    """Compute in this thread, and shuffle by tasks."""
    with dask.config.set({"dataframe.shuffle.method": "tasks", "scheduler": "sync"}):
        yield


@pytest.fixture
def planner() -> Iterator[Planner]:
    """Use a planning cache, as for a cluster."""
    planner = Planner()
    planner.cache.install()
    with planner.used(), dask.config.set({"dataframe.shuffle.method": "tasks"}):
        yield planner
    planner.cache.remove()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a store that does not exist yet."""
    return tmp_path / "planning" / "results"


@pytest.fixture
def table(tmp_path: Path) -> str:
    """Write a small table; return its folder."""
    folder = str(tmp_path / "table")
    frame = pd.DataFrame({"key": np.arange(8) % 3, "value": np.arange(8)})
    dd.from_pandas(frame, npartitions=2).to_parquet(folder)
    return folder
