"""Compare TPC-H queries with DuckDB on small tables, break down their time, and compare planning."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import dask
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.budget import Logged, Step, budget
from benchmarks.tpch import planning_store
from benchmarks.tpch.figures import by_style, ratios, summarise
from benchmarks.tpch.measure import Run
from benchmarks.tpch.queries import QUERIES
from benchmarks.tpch.reference import WrongResultError, check, collected, computed, expected
from benchmarks.tpch.styles import CAREFUL, STYLES
from benchmarks.tpch.tables import FOLDER, ParquetTables, convert
from tests.helpers.nightly import only_by_day
from tests.helpers.tpch import small_tables


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> ParquetTables:
    return small_tables(tmp_path_factory.mktemp("tpch") / "tables", parts=4)


CASES = [(style, number) for style in STYLES for number in QUERIES]
#: The careful style has all kinds of queries; of the others two each are enough by day.
BY_DAY = [case for case in CASES if case[1] in ((3, 9, 13, 18, 21) if case[0] == CAREFUL else (11, 22))]


@pytest.mark.parametrize("case", only_by_day(CASES, BY_DAY))
def test_results_are_duckdbs(tables: ParquetTables, case: tuple[str, int]) -> None:
    style, number = case
    query, wanted = STYLES[style][number], expected(tables, [number])[number]
    assert len(wanted) > 0
    assert not wanted.isnull().any().any()
    with dask.config.set({"dataframe.shuffle.method": "tasks", "scheduler": "threads"}):
        check(query, collected(query, computed(query.build(tables))), wanted)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda frame: frame.iloc[1:], "rows"),
        (lambda frame: frame[frame.columns[::-1]], "columns"),
        (lambda frame: frame.assign(c_count=frame.c_count + 1), "c_count"),
        (lambda frame: frame.iloc[::-1], "order by custdist"),
    ],
)
def test_a_wrong_result_is_told(tables: ParquetTables, change: Any, reason: str) -> None:
    wanted = expected(tables, [13])[13]
    with pytest.raises(WrongResultError, match=reason):
        check(QUERIES[13], change(wanted), wanted)


def test_a_double_may_differ_by_rounding_only(tables: ParquetTables) -> None:
    wanted = expected(tables, [6])[6]
    check(QUERIES[6], wanted * (1 + 1e-12), wanted)
    with pytest.raises(WrongResultError, match="revenue"):
        check(QUERIES[6], wanted * (1 + 1e-6), wanted)


def test_decimals_become_the_nearest_doubles() -> None:
    cents = range(-1000, 100_000)
    column = pa.chunked_array([pa.array([Decimal(n) / 100 for n in cents], pa.decimal128(15, 2))])
    assert convert(column).to_pylist() == [n / 100 for n in cents]


# ---- times of a query, and repeated runs ----------------------------------------------------------

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


# ---- planning from the cache ----------------------------------------------------------------------


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
