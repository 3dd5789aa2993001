"""Check that plans from the cache equal Dask's: each name, dtype, category, index and key."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import pandas as pd
import pytest
from hypothesis import given

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


@examples(6)
@given(program=programs)
def test_programs_are_planned_as_dask_does(
    planner: Planner, readers: list[Callable[[], Any]], program: list[Step]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()  # otherwise Dask finds the previous run's expressions
        expected = planned(readers, program)
        with planner.used():
            first = planned(readers, program)
            again = planned(readers, program)
    assert first == expected
    assert again == expected


@examples(6)
@given(program=programs)
def test_programs_are_planned_by_the_next_process_as_dask_does(
    planner: Planner, readers: list[Callable[[], Any]], program: list[Step], stored: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
        expected = planned(readers, program)
        with planner.used():
            planner.begin_again(stored)
            planned(readers, program)
            planner.begin_again(stored)
            gc.collect()
            found = planned(readers, program)
    assert found == expected


def test_that_programs_use_what_was_stored(
    planner: Planner, readers: list[Callable[[], Any]], stored: Path
) -> None:
    chosen = {"column": "key", "other": "name", "sides": "on", "how": "left", "suffixes": ("_x", "_y")}
    program: list[Step] = [("merge", 0, 2, chosen | {"indicator": False})]
    read = readers[0], readers[2], readers[4]
    with planner.used():
        planner.begin_again(stored)
        planned(list(read), program)
        planner.begin_again(stored)
        before = {what: planner.count(what) for what in (*LOADED, *COMPUTED)}
        gc.collect()
        planned(list(read), program)
    assert all(planner.count(what) > before[what] for what in LOADED)
    assert all(planner.count(what) == before[what] for what in COMPUTED)
    assert planner.metrics.snapshot()["fallbacks"] == {}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planning") / "results"


LOADED = ("metadata.loaded", "plans.loaded", "files.loaded")
COMPUTED = ("metadata.computed", "plans.computed", "files.read")


@examples(6)
@given(program=programs)
def test_fused_programs_have_the_same_results(
    planner: Planner, readers: list[Callable[[], Any]], program: list[Step]
) -> None:
    with warnings.catch_warnings(), dask.config.set(scheduler="sync"):
        warnings.simplefilter("ignore")
        expected = computed(readers, program)
        with planner.used():
            found = computed(readers, program)
    assert type(found) is type(expected)
    if isinstance(expected, pd.DataFrame):
        pd.testing.assert_frame_equal(found, expected, check_exact=True)
    elif isinstance(expected, pd.Series):
        pd.testing.assert_series_equal(found, expected, check_exact=True)
    else:
        assert found == expected


def test_that_programs_use_what_was_kept(planner: Planner, readers: list[Callable[[], Any]]) -> None:
    chosen = {"column": "key", "other": "name", "sides": "on", "how": "left", "suffixes": ("_x", "_y")}
    program: list[Step] = [("merge", 0, 2, chosen | {"indicator": False})]
    read = readers[0], readers[2], readers[4]
    with planner.used():
        assert planned(list(read), program)["errors"] == []
        before = {what: planner.count(what) for what in REUSED}
        planned(list(read), program)
    assert all(planner.count(what) > before[what] for what in REUSED)


REUSED = ("expressions.reused", "plans.reused", "files.reused")
