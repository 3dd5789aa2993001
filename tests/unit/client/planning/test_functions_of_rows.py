"""Check that functions of rows are computed on columns, and that only the columns that they take are read."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask._expr import optimize_until

from dask_gpurt.client.planning.reads import read_of
from dask_gpurt.client.planning.rules.row_functions import ApplyOnColumns
from tests.helpers.clusters import canonical
from tests.unit.client.planning.test_filters import computation, corrected, ruled, value_of

__all__ = ["corrected"]

pytestmark = pytest.mark.usefixtures("by_tasks")


def trips(rows: int = 1_500) -> pd.DataFrame:
    at = np.arange(rows)
    return pd.DataFrame(
        {
            "zone": at % 7,
            "km": np.where(at % 11 == 0, np.nan, at * 13 % 97 / 5),
            "fare": at * 7 % 53 / 2,
            "kind": pd.array([None if i % 13 == 0 else f"k{i % 3}" for i in at], dtype="str"),
            "begun": pd.Timestamp("2026-01-01") + pd.to_timedelta(at * 31, "min"),
        }
    )


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Any]:
    folder = tmp_path_factory.mktemp("trips")
    dd.from_pandas(trips(), npartitions=3, sort=False).to_parquet(folder, write_index=False)
    return lambda: dd.read_parquet(folder)


def read_columns(plan: Any) -> set[str]:
    reads = map(read_of, optimize_until(plan, "tuned-logical").walk())
    return {name for read in reads if read is not None for name in read.columns}


def is_on_columns(plan: Any) -> bool:
    return any(isinstance(expr, ApplyOnColumns) for expr in plan.walk())


def far(row: Any) -> int:
    return 1 if row.km > 10 else 0


def as_series(rows: Any, function: Any, meta: Any) -> Any:
    return rows.apply(function, axis=1, meta=meta)


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "flag of rows": lambda rows: (
        rows.assign(far=as_series(rows, far, ("far", "int64"))).groupby("zone").far.sum()
    ),
    "of values": lambda rows: rows.kind.map(lambda kind: kind == "k1", meta=("kind", "bool")).sum(),
    "of all numbers": lambda rows: (
        rows[["zone", "fare"]].apply(lambda row: row.zone * row.fare, axis=1, meta=(None, "float64")).sum()
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_functions_are_computed_on_columns_with_the_same_result(read: Callable[[], Any], name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = PROGRAMS[name](read())
    plan, facts = ruled(result)
    assert is_on_columns(plan)
    assert any(note.rule == "RowFunctions" and note.done for note in facts.notes)
    expected = value_of(computation(result))
    found = value_of(plan)
    if isinstance(expected, (pd.DataFrame, pd.Series)):
        pd.testing.assert_frame_equal(*(canonical(each.to_frame()) for each in (found, expected)))
    else:
        assert found == pytest.approx(expected)  # sums of floats, by fewer partitions


def test_only_columns_that_a_function_takes_are_read(read: Callable[[], Any]) -> None:
    plan, _ = ruled(as_series(read(), far, ("far", "int64")))
    assert read_columns(plan) == {"km"}


def test_all_columns_are_read_for_a_function_of_the_whole_row(read: Callable[[], Any]) -> None:
    rows = read()[["zone", "fare"]]
    plan, _ = ruled(rows.apply(lambda row: row.max(), axis=1, meta=(None, "float64")))
    assert not is_on_columns(plan) or read_columns(plan) == {"zone", "fare"}


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (lambda rows: rows.zone.map({1: 2}, meta=("zone", "float64")), "no function"),
        (lambda rows: rows.zone.map(far, na_action="ignore", meta=("zone", "int64")), "other arguments"),
        (lambda rows: rows.zone.apply(max, args=(3,), meta=("zone", "int64")), "no function"),
        (
            lambda rows: rows.zone.map(lambda zone: print(zone), meta=("zone", "object")),
            "do more than compute",
        ),
    ],
)
def test_functions_that_are_left_have_a_reason(
    read: Callable[[], Any], program: Callable[[Any], Any], reason: str
) -> None:
    plan, facts = ruled(program(read()))
    assert not is_on_columns(plan)
    assert reason in " ".join(note.text for note in facts.notes if note.rule == "RowFunctions")


def test_times_of_several_units_have_that_of_the_row() -> None:
    times = pd.DataFrame({"begun": trips().begun.astype("M8[s]"), "ended": trips().begun.astype("M8[ns]")})
    result = as_series(dd.from_pandas(times, npartitions=1), lambda row: row.begun, (None, times.ended.dtype))
    plan, _ = ruled(result)
    assert value_of(plan).dtype == value_of(computation(result)).dtype == "M8[ns]"


def test_partitions_without_rows_have_no_columns_of_their_own() -> None:
    rows = dd.from_pandas(trips(), npartitions=3, sort=False)
    some = rows[rows.zone > 99]
    plan, _ = ruled(some.apply(lambda row: int(row.km), axis=1, meta=("km", "int64")))
    assert is_on_columns(plan)
    assert value_of(plan).ndim == 1
