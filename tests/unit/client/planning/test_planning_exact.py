"""Check that plans from the cache equal Dask's, also where libraries are asked ahead."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from hypothesis import given

from dask_gpurt.frames import first_uses
from dask_gpurt.frames.registry import LIBRARIES, FrameLibrary
from tests.helpers.clusters import Library
from tests.helpers.examples import examples
from tests.helpers.planned import Planner, Step, computed, planned, programs, written


@pytest.fixture(scope="module")
def planner(library: Library, readers: list[Callable[[], Any]]) -> Iterator[Planner]:
    """Share one cache between all programs: entries of one are used by the next, while no setting changes."""
    planner = Planner()
    planner.cache.install()
    with dask.config.set({"dataframe.shuffle.method": "tasks", "dataframe.backend": library.name}):
        yield planner
    planner.cache.remove()


@pytest.fixture(scope="module")
def readers(library: Library, tmp_path_factory: pytest.TempPathFactory) -> list[Callable[[], Any]]:
    return written(tmp_path_factory.mktemp("tables"), library.name)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planning") / "results"


@examples(6)
@given(program=programs)
def test_programs_are_planned_and_computed_as_dask_does(
    planner: Planner, readers: list[Callable[[], Any]], program: list[Step], stored: Path
) -> None:
    """At first, again, and by the next process."""
    with warnings.catch_warnings(), dask.config.set(scheduler="sync"):
        warnings.simplefilter("ignore")
        gc.collect()  # otherwise Dask finds the previous run's expressions
        expected, result = planned(readers, program), computed(readers, program)
        with planner.used():
            plans = [planned(readers, program) for _ in range(2)]
            for _ in range(2):
                planner.begin_again(stored)
                gc.collect()
                plans.append(planned(readers, program))
            found = computed(readers, program)
    assert plans == [expected] * 4
    assert_same(found, result)


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, pd.DataFrame):
        pd.testing.assert_frame_equal(found, expected, check_exact=True)
    elif isinstance(expected, pd.Series):
        pd.testing.assert_series_equal(found, expected, check_exact=True)
    else:
        assert found == expected


KEPT = ("expressions.reused", "plans.reused", "files.reused")
LOADED = ("metadata.loaded", "plans.loaded", "files.loaded")
COMPUTED = ("metadata.computed", "plans.computed", "files.read")


def test_that_programs_use_what_was_kept_and_stored(
    planner: Planner, readers: list[Callable[[], Any]], stored: Path
) -> None:
    chosen = {"column": "key", "other": "name", "sides": "on", "how": "left", "suffixes": ("_x", "_y")}
    program: list[Step] = [("merge", 0, 2, chosen | {"indicator": False})]
    read = [readers[0], readers[2], readers[4]]

    def rises(*counted: str) -> list[bool]:
        before = [planner.count(what) for what in counted]
        planned(read, program)
        return [planner.count(what) > count for what, count in zip(counted, before, strict=True)]

    with planner.used():
        planner.begin_again(stored)
        assert planned(read, program)["errors"] == []
        assert all(rises(*KEPT))
        planner.begin_again(stored)
        gc.collect()
        assert rises(*LOADED, *COMPUTED) == [True] * 3 + [False] * 3
    assert planner.metrics.snapshot()["fallbacks"] == {}


# ---- libraries for GPUs are asked ahead -----------------------------------------------------------

EXPECTED_S = 30.0


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Register a library for GPUs, whose frames are those of pandas, and which this process has imported."""
    module: Any = ModuleType("toy")
    module.from_pandas = with_text_of_files
    monkeypatch.setitem(LIBRARIES, "toy", FrameLibrary("cuda", "toy.backend", "Table"))
    monkeypatch.setitem(sys.modules, "toy", module)
    yield module
    wait_for_threads()


def with_text_of_files(frame: pd.DataFrame) -> pd.DataFrame:
    """Give text the dtype that it has in files that are read."""
    return frame.astype({label: "string[pyarrow]" for label in frame if frame[label].dtype == "str"})


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "gpurt-ask-ahead":
            thread.join(EXPECTED_S)


def program(folder: Path) -> Any:
    sales = pd.DataFrame({"shop": [1, 2], "price": [0.5, 1.5], "off": [0.1, 0.0]})
    sales.to_parquet(folder / "sales.parquet")
    pd.DataFrame({"id": [1, 2], "town": ["a", "b"]}).to_parquet(folder / "shops.parquet")
    sold, shops = (dd.read_parquet(folder / f"{name}.parquet") for name in ("sales", "shops"))
    rows = sold[sold.price > 0.7].merge(shops, left_on="shop", right_on="id")
    rows = rows.assign(value=rows.price * (1 - rows.off))
    return rows[["town", "value"]].groupby("town").agg({"value": "sum"}).reset_index()


def test_a_program_asks_nothing_that_was_asked_ahead(planner: Planner, toy: Any, tmp_path: Path) -> None:
    planner.cache.ask_ahead()
    wait_for_threads()
    asked = planner.count("metadata.computed")
    assert asked > 0
    assert program(tmp_path).columns.to_list() == ["town", "value"]
    assert planner.count("metadata.computed") == asked


def test_nothing_is_asked_of_libraries_on_the_host(planner: Planner) -> None:
    planner.cache.ask_ahead()
    assert "gpurt-ask-ahead" not in [thread.name for thread in threading.enumerate()]


def test_nothing_is_asked_where_the_runtime_does_not_plan(planner: Planner, toy: Any) -> None:
    planner.usable = False
    planner.cache.ask_ahead()
    wait_for_threads()
    assert planner.count("metadata.computed") == 0


def test_a_library_that_cannot_be_asked_is_left_to_the_first_query(
    planner: Planner, toy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    del toy.from_pandas
    with caplog.at_level(logging.DEBUG, logger=first_uses.__name__):
        planner.cache.ask_ahead()
        wait_for_threads()
    assert "toy cannot be used here" in caplog.text
