"""Check which left joins look rows up in distinct keys, and that results stay those of pandas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.client.planning.rules.anti_joins import DistinctKeys
from dask_gpurt.client.planning.rules.dependence import why_dependent
from dask_gpurt.client.planning.table_facts import FilesChangedError
from tests.helpers.examples import examples
from tests.helpers.rules import Read, assert_rows, computed, ruled, stored, tuned

pytestmark = pytest.mark.usefixtures("by_tasks")


def tables() -> dict[str, pd.DataFrame]:
    """Return two tables whose keys occur often, once, or not, with nulls among them."""
    at, of = np.arange(80), np.arange(50)
    names = [None if i % 7 == 0 else f"n{i % 12}" for i in at]
    left = pd.DataFrame({"key": at % 23, "ratio": np.where(at % 9, at % 17, np.nan), "name": names, "id": at})
    right = pd.DataFrame(
        {
            "key": of % 13,
            "ratio": np.where(of % 8, of % 11, np.nan),
            "name": [None if i % 5 == 0 else f"n{i % 8}" for i in of],
            "other": of % 13,
            "number": of,
            "gaps": [None if i % 4 else "gap" for i in of],
        }
    )
    return {"left": left, "right": right}


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    return stored(tmp_path_factory.mktemp("anti"), tables(), 4)


def looks_up_distinct_keys(plan: Any) -> bool:
    return any(isinstance(each, DistinctKeys) for each in plan.walk())


TESTS: dict[str, Callable[[Any], Any]] = {
    "number": lambda rows: rows.number.isnull(),
    "not number": lambda rows: ~rows.number.notnull(),
    "indicator": lambda rows: rows._merge == "left_only",
    "gaps": lambda rows: rows.gaps.isnull(),
    "ratio": lambda rows: rows.ratio_r.isnull(),
    "either": lambda rows: rows.number.isnull() | (rows.id < 9),
    "both": lambda rows: rows.number.isnull() & (rows.id > 9),
}
CERTAIN = {"number", "not number", "indicator", "both"}
LATER: dict[str, Callable[[Any], Any]] = {
    "all": lambda rows: rows.drop(columns="_merge"),
    "left": lambda rows: rows[["id", "name"]],
    "right": lambda rows: rows[["id", "number", "gaps"]],
    "sum": lambda rows: rows.groupby("id").key.sum().reset_index(),
}


@examples(12)
@given(
    on=st.sampled_from(["key", None, "ratio", ["key", "name"]]),
    test=st.sampled_from(sorted(TESTS)),
    later=st.sampled_from(sorted(LATER)),
    is_chosen=st.booleans(),
)
def test_rows_without_a_match_are_those_of_pandas(
    read: Read, on: Any, test: str, later: str, is_chosen: bool
) -> None:
    def program(left: Any, right: Any) -> Any:
        right = right[right.number > 20] if is_chosen else right
        names = {"on": on} if on else {"left_on": "key", "right_on": "other"}
        rows = left.merge(right, how="left", suffixes=("", "_r"), indicator=True, **names)
        rows = rows.assign(ratio_r=0.0) if "ratio_r" not in rows.columns else rows
        return LATER[later](rows[TESTS[test](rows)])

    plan, facts = ruled(program(read("left"), read("right")))
    assert looks_up_distinct_keys(plan) == (test in CERTAIN and on in ("key", None))
    assert_rows(computed(tuned(plan), facts), program(*tables().values()))


def test_rows_with_a_match_are_counted_once_where_they_are_used(read: Read) -> None:
    rows = read("left").merge(read("right")[["key", "number"]], on="key", how="left")
    plan, _ = ruled(rows[rows.number.isnull()].id.sum() + rows.id.sum())
    assert not looks_up_distinct_keys(plan)


def test_partitions_do_not_matter_to_distinct_keys(read: Read) -> None:
    rows = read("left").merge(read("right")[["key", "number"]], on="key", how="left")
    plan, _ = ruled(rows[rows.number.isnull()].id.sum())
    assert looks_up_distinct_keys(plan)
    assert why_dependent(tuned(plan)) is None


def test_a_file_that_has_nulls_by_then_is_noticed(tmp_path: Any) -> None:
    left, right = tables().values()
    right = right.assign(number=pd.array(right.number, dtype="Int64"))
    read = stored(tmp_path, {"left": left, "right": right})
    rows = read("left").merge(read("right"), on="key", how="left")
    plan, facts = ruled(rows[rows.number.isnull()].id.sum())
    with_nulls = right.assign(number=right.number.where(right.number > 3))
    with_nulls.to_parquet(tmp_path / "right" / "part.0.parquet")
    with pytest.raises(FilesChangedError):
        computed(tuned(plan), facts)
