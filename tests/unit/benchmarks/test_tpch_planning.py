"""Compare Dask's planning with planning from the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tpch import planning_store
from benchmarks.tpch.tables import FOLDER
from tests.helpers.tpch import small_tables


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
