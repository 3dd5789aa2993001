"""Break down the time of a TPC-H query, and summarise repeated runs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.budget import Logged, Step, budget
from benchmarks.tpch.figures import by_style, ratios, summarise
from benchmarks.tpch.measure import Run

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


def test_a_contender_that_fails_has_no_time() -> None:
    runs = [Run(1, name, 0, turn, seconds=2.0 + turn) for name in ("gpurt", "tasks") for turn in range(3)]
    runs += [Run(2, "gpurt", 0, 0, seconds=1.0), Run(2, "gpurt", 0, 1, seconds=1.0)]
    runs += [Run(2, "tasks", 0, 0, error="MemoryError()")]
    figures = summarise(runs)
    assert [(each["query"], each["contender"]) for each in figures if each["errors"]] == [(2, "tasks")]
    assert "warm" not in figures[-1]
    assert ratios(runs, "gpurt")["tasks"]["queries"] == 1


def test_styles_are_compared_with_the_careful_one_and_with_others() -> None:
    def runs(contender: str, style: str, *seconds: float) -> list[Run]:
        return [Run(1, contender, 0, turn, one, style=style) for turn, one in enumerate(seconds)]

    every = [*runs("gpurt", "careful", 4.0, 2.0), *runs("gpurt", "sql", 5.0, 3.0)]
    every += runs("cudf-polars", "careful", 2.0, 1.0)
    warm = {(of["contender"], of["style"]): of for of in by_style(every) if of["warm"]}
    assert warm["gpurt", "sql"]["ratios"] == pytest.approx({"careful": 1.5, "cudf-polars": 3.0})
    assert warm["gpurt", "careful"]["ratios"] == pytest.approx({"cudf-polars": 2.0})
    assert {of["sum"] for of in by_style(every) if not of["warm"]} == {4.0, 5.0, 2.0}
