"""Detect changes between two queries of the same name: of files, functions, settings and secrets."""

from __future__ import annotations

import copy
import datetime
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import fsspec
import fsspec.config
import numpy as np
import pandas as pd
import pytest
from dask.dataframe.dask_expr._accessor import Accessor
from fsspec.implementations.local import LocalFileSystem

from dask_gpurt.client.planning.files import has_version
from dask_gpurt.client.planning.store import Store
from dask_gpurt.dask_hooks.planning import settings
from tests.helpers.planned import Planner

pytestmark = pytest.mark.usefixtures("by_tasks")


def computed(make: Callable[[], Any]) -> tuple[list[str], dict[str, list[Any]]]:
    """Return the columns that Dask plans with, and the rows.

    Drops all references afterwards: Dask itself finds live expressions by name.
    """
    table = make().assign(new=1)
    found = list(table.columns), table.compute().to_dict("list")
    del table
    gc.collect()
    return found


# ---- files ----------------------------------------------------------------------------------------


class Sparing(LocalFileSystem):
    """Return no details of a file when it is listed by its own name, as file systems over HTTP do."""

    protocol = "gpurt-sparing"

    def ls(self, path: str, detail: bool = False, **options: Any) -> list[Any]:
        if os.path.isfile(self._strip_protocol(path)):
            raise FileNotFoundError(path)
        found: list[Any] = super().ls(path, detail, **options)
        return found


class Sizes(LocalFileSystem):
    """Return sizes of files only, as a server without ETags does."""

    protocol = "gpurt-sizes"

    def info(self, path: Any, **options: Any) -> dict[str, Any]:
        found = super().info(path, **options)
        return {name: found[name] for name in ("name", "size", "type")}


for _kind in (Sparing, Sizes):
    fsspec.register_implementation(_kind.protocol, _kind, clobber=True)


def write(path: Path, **columns: list[int]) -> None:
    pd.DataFrame(columns).to_parquet(path, compression=None)


@pytest.mark.usefixtures("planner")
@pytest.mark.parametrize("protocol", ["file", Sparing.protocol, Sizes.protocol, "arrow"])
@pytest.mark.parametrize("name", ["table.parquet", "*.parquet", ""])
def test_a_file_of_the_same_size_is_seen(tmp_path: Path, protocol: str, name: str) -> None:
    if protocol == "arrow" and "*" in name:
        pytest.skip("Arrow knows no patterns")
    options = {"path": f"{protocol}://{tmp_path}/{name}"}
    if protocol == "arrow":
        options = {"path": f"{tmp_path}/{name}", "filesystem": "arrow"}
    for number, column in ((1, "a"), (2, "a"), (1, "b")):
        write(tmp_path / "table.parquet", key=[number], **{column: [0]})
        columns, rows = computed(lambda: dd.read_parquet(**options))
        assert columns == ["key", column, "new"]
        assert rows["key"] == [number]


@pytest.mark.usefixtures("planner")
@pytest.mark.parametrize(("filesystem", "is_link"), [("fsspec", False), ("arrow", True)])
def test_a_file_in_a_folder_of_the_table_is_seen(tmp_path: Path, filesystem: str, is_link: bool) -> None:
    inner = tmp_path / "table" / "year=2026"
    folder = tmp_path / "elsewhere" if is_link else inner
    folder.mkdir(parents=True)
    if is_link:
        (tmp_path / "table").mkdir()
        os.symlink(folder, inner)
    for column in ("a", "b"):
        write(folder / "part.0.parquet", **{column: [1]})
        columns, rows = computed(lambda: dd.read_parquet(tmp_path / "table", filesystem=filesystem))
        assert columns[0] == next(iter(rows)) == column


@pytest.mark.usefixtures("planner")
def test_a_file_that_a_link_leads_to_is_seen(tmp_path: Path) -> None:
    (tmp_path / "table").mkdir()
    path = tmp_path / "elsewhere.parquet"
    os.symlink(path, tmp_path / "table" / "part.0.parquet")
    for first in (0, 100):
        write(path, key=[first, first + 9], value=[1, 2])
        table = dd.read_parquet(tmp_path / "table", index="key", calculate_divisions=True)
        assert table.divisions == (first, first + 9)
        assert len(table.loc[first:first].compute()) == 1


def test_a_link_that_leads_nowhere_is_no_obstacle(planner: Planner, tmp_path: Path) -> None:
    (tmp_path / "table").mkdir()
    write(tmp_path / "table" / "part.0.parquet", key=[1, 2])
    os.symlink(tmp_path / "nowhere", tmp_path / "table" / "_link")
    for _ in range(2):
        _, rows = computed(lambda: dd.read_parquet(tmp_path / "table"))
        assert rows["key"] == [1, 2]
    assert planner.count("files.reused") == 1


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({}, False),
        ({"name": "a", "size": 10, "type": "file"}, False),
        ({"size": 10, "mtime": 1700000000.0, "ino": 7}, False),
        ({"size": 10, "mtime": 1700000000.0, "created": 1700000000.25}, True),
        ({"modified": datetime.datetime(2026, 1, 1)}, False),
        ({"modified": datetime.datetime(2026, 1, 1, microsecond=5)}, True),
        ({"ETag": None}, False),
        ({"ETag": '"abc"'}, True),
    ],
)
def test_which_files_have_a_version(state: dict[str, Any], expected: bool) -> None:
    assert has_version(state) == expected


# ---- functions and accessors ----------------------------------------------------------------------


@pytest.mark.usefixtures("planner")
@pytest.mark.parametrize("enforced", [False, True])
def test_a_function_that_reads_is_asked_again(tmp_path: Path, enforced: bool) -> None:
    path = tmp_path / "table.pickle"
    for column in ("a", "b"):
        pd.DataFrame({column: [1]}).to_pickle(path)
        columns, rows = computed(lambda: dd.from_map(pd.read_pickle, [str(path)], enforce_metadata=enforced))
        assert columns == list(rows) == [column, "new"]


@pytest.mark.filterwarnings("ignore:registration of accessor")
@pytest.mark.usefixtures("planner")
def test_an_accessor_that_is_registered_again_is_seen(tmp_path: Path) -> None:
    write(tmp_path / "table.parquet", key=[1, 2])
    try:
        for dtype in ("int64", "float32"):
            _register(dtype)
            planned, found = _dtypes_of_cast(tmp_path / "table.parquet")
            assert planned == found == dtype
    finally:
        for owner in (pd.Series, dd.Series):
            del owner.gpurt_test
            owner._accessors.discard("gpurt_test")


def _dtypes_of_cast(path: Path) -> list[str]:
    cast = dd.read_parquet(path).key.gpurt_test.cast().to_frame()
    found = [str(table.dtypes["key"]) for table in (cast.assign(new=1), cast.compute())]
    del cast
    gc.collect()
    return found


def _register(dtype: str) -> None:
    @pd.api.extensions.register_series_accessor("gpurt_test")
    class Cast:
        def __init__(self, series: pd.Series):
            self._series = series

        def cast(self) -> pd.Series:
            return self._series.astype(dtype)

    @dd.extensions.register_series_accessor("gpurt_test")
    class OfDask(Accessor):
        _accessor_name = "gpurt_test"
        _accessor_methods = ("cast",)
        _accessor_properties = ()


# ---- operands that are changed in place -----------------------------------------------------------


@pytest.mark.usefixtures("planner")
@pytest.mark.parametrize(
    ("query", "given", "change"),
    [
        (lambda table, given: table[given], ["b", "a"], lambda given: given.reverse()),
        (lambda table, given: table.rename(columns=given), {"a": "x"}, lambda given: given.update(a="y")),
        (lambda table, given: table.replace(given), {1: 10}, lambda given: given.update({1: 20})),
        (lambda table, given: table.a.isin(given), [1], lambda given: given.append(2)),
        (lambda table, given: table.a.isin(given), np.array([1]), lambda given: given.fill(2)),
        (lambda table, given: table.a.isin(given), {1}, lambda given: given.add(2)),
        (
            lambda table, given: table.groupby("b").agg(given),
            {"a": ["sum"]},
            lambda given: given["a"].append("max"),
        ),
        (lambda table, given: table.assign(**given), {"d": 1}, lambda given: given.update(d=2)),
        (lambda table, given: table.set_index("a", divisions=given), [1, 2, 3], lambda given: given.pop(1)),
    ],
)
def test_what_is_planned_first_is_not_what_it_becomes(
    tmp_path: Path, query: Callable[..., Any], given: Any, change: Callable[[Any], object]
) -> None:
    """A fresh query with the operands of an earlier one has its result, whatever became of those."""
    write(tmp_path / "part.0.parquet", a=[1, 2, 3], b=[1, 1, 2], c=[7, 8, 9])

    def found(operand: Any) -> Any:
        lazy = query(dd.read_parquet(tmp_path), operand)
        columns = list(getattr(lazy, "columns", [])) if lazy.ndim == 2 else []
        # Another query on the same expression finds it, too.
        return columns, lazy.compute().to_dict(), lazy.count().compute() if lazy.ndim == 1 else None

    first, same = copy.deepcopy(given), copy.deepcopy(given)
    expected = found(first)
    change(first)
    gc.collect()
    assert found(same) == expected


# ---- settings -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_no_setting_warns_as_it_is_read() -> None:
    assert settings() == settings()


@pytest.mark.usefixtures("planner")
def test_options_of_pandas_count(tmp_path: Path) -> None:
    write(tmp_path / "table.parquet", key=[1, 2])
    for storage in ("python", "pyarrow"):
        with pd.option_context("mode.string_storage", storage):
            table = dd.read_parquet(tmp_path / "table.parquet").astype({"key": "string"})
            table = table.assign(new=table.key)
            assert [dtype.storage for dtype in table.dtypes] == [storage] * 2


# ---- secrets of file systems do not outlive the process that has them -----------------------------


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
    planner: Planner, table: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("token", TokenFiles, clobber=True)
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
    assert not any(token in path.read_bytes() for token in (b"one", b"two", b"three"))
