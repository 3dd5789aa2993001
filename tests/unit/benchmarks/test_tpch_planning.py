"""Compare Dask's planning with planning from the cache."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import dask
import pytest

from benchmarks.tpch import planning_store
from benchmarks.tpch.planning_cache import KEPT, figures_of, metadata_calls, take_turns
from benchmarks.tpch.queries import QUERIES
from benchmarks.tpch.tables import FOLDER
from dask_gpurt.observe import Metrics
from tests.helpers.tpch import small_tables


def test_planning_is_compared_in_turns(tmp_path: Path) -> None:
    tables, query = small_tables(tmp_path / "tables", parts=2), QUERIES[6]
    with dask.config.set({"dataframe.shuffle.method": "tasks"}):
        seconds = take_turns([query], tables, 2, Metrics(), perf_counter)
        asked = metadata_calls([query], tables, KEPT)
    assert {name: len(turns) for name, turns in seconds.items()} == dict.fromkeys(seconds, 2)
    assert asked["first"] > asked["warm"] == 0
    figures = figures_of(seconds, [6])
    assert figures["ratios"]["warm"]["n"] == 2
    assert [each["query"] for each in figures["queries"]] == [6]


@pytest.mark.nightly
def test_first_runs_are_compared_in_processes_of_their_own(tmp_path: Path) -> None:
    directory = small_tables(tmp_path, parts=2).directory
    found = planning_store.take_turns([6, 12], directory, FOLDER, "pandas", turns=1)
    ((filled,), (loaded,)) = found[planning_store.FILLED], found[planning_store.LOADED]
    assert filled["counters"]["planning.plans.computed"] == loaded["counters"]["planning.plans.loaded"] == 2
    assert "planning.plans.computed" not in loaded["counters"]
    assert found[planning_store.DASK][0]["counters"] == {}
    assert all(not run["fallbacks"] for runs in found.values() for run in runs)
    figures = planning_store.figures_of(found, [6, 12])
    assert [each["query"] for each in figures["queries"]] == [6, 12]
    assert set(figures["ratios"]) == {"dask", "kept", "filled"}
