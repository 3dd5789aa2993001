"""Check that secrets of file systems do not outlive the process that has them."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import fsspec
import fsspec.config
import pytest
from fsspec.implementations.local import LocalFileSystem

from dask_gpurt.client.planning.store import Store
from tests.helpers.planned import Planner


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
            planner.kept = Store(path, planner.metrics)
            for token, begins in (("one", False), ("two", False), ("three", True)):
                if begins:
                    planner.begin_again(path)
                monkeypatch.setattr(TokenFiles, "valid", token)
                monkeypatch.setitem(fsspec.config.conf, "token", {"token": token})
                read = dd.read_parquet(f"token://{table}")
                assert read[read.key > 1].key.sum().compute(scheduler="sync") == 4
                del read
                gc.collect()
            planner.kept.save()
    finally:
        planner.cache.remove()
    assert not any(token in path.read_bytes() for token in (b"one", b"two", b"three"))
