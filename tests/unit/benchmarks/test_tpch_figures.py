"""Break down the time of a TPC-H query, and summarise repeated runs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.tpch.cudf_polars import read_records
from benchmarks.tpch.figures import ratios, spread, summarise
from benchmarks.tpch.measure import Run
from dask_gpurt.bench.budget import Logged, Step, budget

durations = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=8)


@given(st.lists(durations, min_size=1, max_size=3), st.integers(0, 2))
def test_all_time_of_the_threads_is_busy_or_a_gap(threads: list[Any], idle: int) -> None:
    steps = []
    for number, of_thread in enumerate(threads):
        now = 10.0
        for pause, length in of_thread:
            steps.append(Step("kind", "compute", ("worker", number), now + pause, now + pause + length))
            now += pause + length
    ended = max(step.stop for step in steps) + 1
    there = len(threads) + idle
    spent = budget(1.0, 2.0, ended, Logged([(3.0, 4.0)], steps), there)
    assert sum(spent["seconds"].values()) == pytest.approx(ended - 1.0)
    span = spent["seconds"]["computing"]
    busy = sum(step.stop - step.start for step in steps)
    assert spent["thread_busy"] * there * span == pytest.approx(busy)
    assert spent["gaps"]["seconds_a_thread"] * there + busy == pytest.approx(there * span)
    assert sum(of["count"] for of in spent["tasks"].values()) == len(steps)


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [([3.0, 1.0, 2.0], 1.0, 3.0), (list(range(1, 7)), 1, 6), (list(range(1, 10)), 2, 8)],
)
def test_an_interval_has_the_median_with_95_percent(values: list[float], low: float, high: float) -> None:
    found = spread(values)
    assert (found["low"], found["high"], found["n"]) == (low, high, len(values))


def test_a_contender_that_fails_has_no_time() -> None:
    runs = [Run(1, name, 0, turn, seconds=2.0 + turn) for name in ("gpurt", "tasks") for turn in range(3)]
    runs += [Run(2, "gpurt", 0, 0, seconds=1.0), Run(2, "gpurt", 0, 1, seconds=1.0)]
    runs += [Run(2, "tasks", 0, 0, error="MemoryError()")]
    figures = summarise(runs)
    assert [(each["query"], each["contender"]) for each in figures if each["errors"]] == [(2, "tasks")]
    assert "warm" not in figures[-1]
    assert ratios(runs, "gpurt")["tasks"]["queries"] == 1


def test_runs_of_cudf_polars_are_read() -> None:
    of_query = [
        {"query": 3, "iteration": 0, "status": "success", "duration": 1.5, "statistics": None},
        {"query": 3, "iteration": 1, "status": "error", "traceback": "Traceback\n  ...\nMemoryError: 8 GiB"},
    ]
    first, second = read_records({"records": {"3": of_query}}, round_number=1)
    assert (first.query, first.round, first.turn, first.seconds, first.error) == (3, 1, 0, 1.5, "")
    assert second.error == "MemoryError: 8 GiB"
