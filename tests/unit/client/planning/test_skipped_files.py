"""Check which files are left out because of what their footers say, and that no row is lost."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.client.planning.reads import lower, read_of
from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.client.planning.rules.skipped_files import SkipFiles
from tests.helpers.examples import examples
from tests.helpers.planned import value_of
from tests.helpers.rules import ONE_THREAD, tuned

FILES, ROWS = 9, 20
LARGE = 2**53 + 1
START = pd.Timestamp("2024-02-27")


pytestmark = pytest.mark.usefixtures("by_tasks")


def table() -> pd.DataFrame:
    """Return rows in the order of a number and of a time, which one file has none of and one file a few."""
    at = np.arange(FILES * ROWS)
    days = pd.Series(START + pd.to_timedelta(at // 4, "D")).astype("datetime64[us]")
    return pd.DataFrame(
        {
            "number": at - 50,
            "day": days.where((at // ROWS != 3) & ((at // ROWS != 4) | (at % 7 == 0))),
            "ratio": np.where(at % 5, at / 3, np.nan),
            "name": [f"n{i // 30}" for i in at],
            "key": at % 6,
        }
    )


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    folder = tmp_path_factory.mktemp("skipped")
    rows = table()
    for number in range(FILES):
        part = pa.Table.from_pandas(rows[number * ROWS : (number + 1) * ROWS], preserve_index=False)
        pq.write_table(part, folder / f"part.{number}.parquet", row_group_size=7)
    pq.write_table(part.slice(0, 0), folder / f"part.{FILES}.parquet")
    return lambda **options: dd.read_parquet(folder, **options)


def planned(result: Any) -> tuple[Any, list[int]]:
    """Return the lowered plan of a computation, and the number of files of each of its reads."""
    plan = SkipFiles().apply(tuned(result), Facts(ONE_THREAD))
    reads = {each._name: len(each._partitions) for each in map(read_of, plan.walk()) if each is not None}
    return lower(plan, "fused"), sorted(reads.values())


OPERATORS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
NUMBERS = (-51, -50, -31, -30, 9, 9.5, 10, 128, 129, 130, 1e300)
DAYS = tuple(START + pd.Timedelta(hours) for hours in ("-1h", "0h", "1us", "100D", "345D", "1056h", "9999h"))


def comparison(rows: Any, number: int, other: int, third: int) -> Any:
    """Return one of many conditions on a column."""
    compare = OPERATORS[other % len(OPERATORS)]
    chosen: list[Callable[[], Any]] = [
        lambda: compare(rows.number, NUMBERS[third % len(NUMBERS)]),
        lambda: compare(rows.day, DAYS[third % len(DAYS)]),
        lambda: rows.number.between(NUMBERS[other % 5], NUMBERS[third % len(NUMBERS)]),
        lambda: compare(rows.day, "2024-03-20"),
        lambda: compare(rows.ratio, 20.0),
        lambda: ~compare(rows.number, NUMBERS[third % len(NUMBERS)]),
        lambda: compare(rows.name, "n3"),
        lambda: rows.day.isnull(),
    ]
    return chosen[number % len(chosen)]()


_numbers = st.tuples(st.integers(0, 7), st.integers(0, 11), st.integers(0, 11))


@examples(15)
@given(first=_numbers, second=_numbers, third=_numbers, way=st.sampled_from(["and", "or", "twice", "both"]))
def test_no_row_is_lost(read: Callable[[], Any], first: Any, second: Any, third: Any, way: str) -> None:
    def program(rows: Any) -> Any:
        one, two = comparison(rows, *first), comparison(rows, *second)
        if way == "twice":
            return rows[one].key.count() + rows[two & comparison(rows, *third)].number.sum() * 1_000
        condition = one | (two & comparison(rows, *third)) if way == "or" else one & two
        chosen = rows[condition]
        chosen = chosen[comparison(chosen, *third)] if way == "both" else chosen
        return chosen.number.sum() * 1_000 + chosen.key.count()

    plan, _ = planned(program(read()))
    assert value_of(plan) == program(table())


@pytest.mark.parametrize(
    ("condition", "files"),
    [
        (lambda rows: rows.number < -30, 1),
        (lambda rows: (rows.number >= 10) & (rows.number < 30), 1),
        (lambda rows: rows.number.between(9, 10), 2),
        (lambda rows: rows.day == START, 1),
        (lambda rows: rows.day >= "2024-04-08", 1),
        (lambda rows: (rows.number < -30) | (rows.number > 128), 2),
        (lambda rows: rows.number > 1_000, 1),
        (lambda rows: rows.ratio > 1e9, FILES + 1),
        (lambda rows: rows.name == "none", FILES + 1),
        (lambda rows: rows.number > rows.number.mean() + 70, FILES + 1),
    ],
)
def test_files_are_left_out(read: Callable[[], Any], condition: Callable[[Any], Any], files: int) -> None:
    rows = read()
    assert planned(rows[condition(rows)].key.sum())[1] == [files]


@pytest.mark.parametrize(("filesystem", "files"), [("fsspec", 1), ("arrow", FILES + 1)])
def test_rows_keep_the_labels_that_they_have_where_all_files_are_read(
    read: Callable[..., Any], filesystem: str, files: int
) -> None:
    """Dask's read through Arrow numbers the rows of several files as one."""
    rows = read(filesystem=filesystem)
    chosen = rows[rows.number > 118][["number", "key"]]
    plan, found = planned(chosen)
    assert found == [files]
    pd.testing.assert_frame_equal(value_of(plan), chosen.compute())


def test_integers_that_floats_do_not_tell_apart_leave_no_file_out(tmp_path: Path) -> None:
    for at in range(2):
        pd.DataFrame({"number": [LARGE + at], "key": [at]}).to_parquet(tmp_path / f"{at}.parquet")
    rows = dd.read_parquet(tmp_path)
    assert planned(rows[rows.number > LARGE].key.sum())[1] == [2]
