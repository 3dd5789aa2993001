"""Check that secrets of file systems do not outlive the process that has them."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import fsspec
import fsspec.config
import numpy as np
import pandas as pd
import pytest
from fsspec.implementations.local import LocalFileSystem

from dask_gpurt.planning.store import Store
from tests.helpers.planned import Planner


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "planning" / "results"


@pytest.fixture
def table(tmp_path: Path) -> str:
    folder = str(tmp_path / "table")
    frame = pd.DataFrame({"key": np.arange(8) % 3, "value": np.arange(8)})
    dd.from_pandas(frame, npartitions=2).to_parquet(folder)
    return folder


class TokenFiles(LocalFileSystem):
    """Local files that open with the current token only."""

    protocol = "token"
    valid = ""

    def __init__(self, token: str = "", **options: Any):
        super().__init__(**options)
        self.token = token

    def open(self, *args: Any, **options: Any) -> Any:
        if self.token != self.valid:
            raise PermissionError(f"{self.token!r} is not valid")
        return super().open(*args, **options)


def test_tokens_of_file_systems_that_fsspec_configures_are_neither_stored_nor_used_later(
    table: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("token", TokenFiles, clobber=True)
    planner = Planner()
    planner.cache.install()
    try:
        with planner.used():
            planner.store = Store(path, planner.metrics)
            for token, begins in (("one", False), ("two", False), ("three", True)):
                if begins:
                    planner.begin_again(path)
                monkeypatch.setattr(TokenFiles, "valid", token)
                monkeypatch.setitem(fsspec.config.conf, "token", {"token": token})
                read = dd.read_parquet(f"token://{table}")
                assert read[read.key > 1].key.sum().compute(scheduler="sync") == 4
                del read
                gc.collect()
            planner.store.save()
    finally:
        planner.cache.remove()
    assert not any(token in path.read_bytes() for token in (b"one", b"two", b"three"))
