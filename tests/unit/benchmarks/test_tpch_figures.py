"""Break down the time of a TPC-H query, and summarise repeated runs."""

from __future__ import annotations

import gc
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.tpch.cudf_polars import read_records
from benchmarks.tpch.figures import ratios, spread, summarise
from benchmarks.tpch.measure import Run
from benchmarks.tpch.pauses import take
from dask_gpurt.tools.bench.budget import Logged, Step, budget, gaps

durations = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=8)


def steps_of(worker: str, thread: int, durations: list[tuple[int, int]]) -> list[Step]:
    """Return tasks of a thread, given the pause before each one and its length."""
    steps, now = [], 10.0
    for pause, length in durations:
        steps.append(Step("kind", "compute", (worker, thread), now + pause, now + pause + length))
        now += pause + length
    return steps


@given(st.lists(durations, min_size=1, max_size=3), st.integers(0, 2))
def test_all_time_of_the_threads_is_busy_or_a_gap(threads: list[Any], idle: int) -> None:
    steps = [
        step
        for number, of_thread in enumerate(threads)
        for step in steps_of(f"worker-{number}", 0, of_thread)
    ]
    ended = max(step.stop for step in steps) + 1
    there = len(threads) + idle
    available = {f"worker-{number}": 1 for number in range(there)}
    spent = budget(1.0, 2.0, ended, Logged([(3.0, 4.0)], steps), available)
    assert sum(spent["seconds"].values()) == pytest.approx(ended - 1.0)
    span = spent["seconds"]["computing"]
    busy = sum(step.stop - step.start for step in steps)
    assert spent["thread_busy"] * there * span == pytest.approx(busy)
    assert spent["gaps"]["seconds_a_thread"] * there + busy == pytest.approx(there * span)
    assert sum(of["count"] for of in spent["tasks"].values()) == len(steps)


@given(st.lists(durations, min_size=1, max_size=4), st.integers(1, 4))
def test_a_gap_is_a_time_with_fewer_tasks_than_threads(threads: list[Any], there: int) -> None:
    """On one worker, whose tasks may run on more threads than it has slots, as when some have left them."""
    steps = [step for number, of in enumerate(threads) for step in steps_of("worker", number, of)]
    first, last = (
        int(of(ends)) for of, ends in ((min, [s.start for s in steps]), (max, [s.stop for s in steps]))
    )
    running = [sum(step.start <= at < step.stop for step in steps) for at in range(first, last)]
    found = gaps(steps, first, last, {"worker": there})
    assert found["seconds_a_thread"] * there == pytest.approx(sum(max(0, there - n) for n in running))
    runs = [
        len(list(times))
        for slot in range(1, there + 1)
        for is_free, times in groupby(n < slot for n in running)
        if is_free
    ]
    assert (found["count"], found["longest"]) == (len(runs), max(runs, default=0))


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


def test_a_run_tells_what_may_have_delayed_it() -> None:
    waits = {"thread_busy": 0.7, "gaps": {"longest": 0.3}, "collections": {"workers": 0.25}, "seconds": {}}
    runs = [Run(1, "gpurt", 0, 1, seconds=2.0, budget=waits), Run(1, "gpurt", 0, 2, error="KeyError()")]
    (figure,) = summarise([Run(1, "gpurt", 0, 0, seconds=3.0), *runs])
    assert [(run["turn"], run.get("longest_gap")) for run in figure["runs"]] == [(0, None), (1, 0.3)]
    assert figure["runs"][1]["collections"] == {"workers": 0.25}


def test_collections_are_timed_since_the_last_look() -> None:
    try:
        take()
        gc.collect()
        assert take() > 0
        assert take() == 0
    finally:
        gc.callbacks[:] = [each for each in gc.callbacks if type(each).__name__ != "Collections"]
