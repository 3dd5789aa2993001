"""Check that plans from the cache equal Dask's, also where libraries are asked ahead."""

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
