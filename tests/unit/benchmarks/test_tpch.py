"""Compare TPC-H queries with DuckDB, on small tables for which every query returns rows."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import dask
import pyarrow as pa
import pytest

from benchmarks.tpch.queries import QUERIES
from benchmarks.tpch.reference import WrongResultError, check, collected, computed, expected
from benchmarks.tpch.styles import CAREFUL, STYLES
from benchmarks.tpch.tables import ParquetTables, convert
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
