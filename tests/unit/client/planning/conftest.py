"""Share the files of planning's tests."""

from __future__ import annotations

import gc
from pathlib import Path

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest


@pytest.fixture(scope="module", autouse=True)
def _collect_only_what_is_new() -> None:
    """Freeze existing objects: late in a run a garbage collection of them would take a second each."""
    gc.freeze()


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
