"""Compare Dask's planning with planning from the cache."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import dask

from benchmarks.tpch.planning_cache import KEPT, figures_of, metadata_calls, take_turns
from benchmarks.tpch.queries import QUERIES
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
