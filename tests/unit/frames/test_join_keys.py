"""Rows of a join that match no key of the other side are left out, and no others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.frames import join_keys
from dask_gpurt.frames.join_keys import all_keys, can_look_up, distinct_keys, rows_with_keys

ON, OTHER_ON = ["a", "b"], ["x", "y"]
keys = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=40)


def frame(rows: list[tuple[int, int]], on: list[str]) -> pd.DataFrame:
    found = pd.DataFrame(rows, columns=on, dtype="int64")
    return found.assign(**{f"row of {on[0]}": np.arange(len(rows))})


def filtered(left: pd.DataFrame, parts: list[pd.DataFrame]) -> pd.DataFrame:
    collected = all_keys(*(distinct_keys(part, OTHER_ON) for part in parts))
    kept: pd.DataFrame = rows_with_keys(left, ON, collected)
    return kept


@settings(deadline=None)
@given(keys, st.lists(keys, min_size=1, max_size=3))
def test_a_join_has_the_same_rows_in_the_same_order(
    left_rows: list[tuple[int, int]], right_parts: list[list[tuple[int, int]]]
) -> None:
    left, parts = frame(left_rows, ON), [frame(rows, OTHER_ON) for rows in right_parts]
    right = pd.concat(parts, ignore_index=True)
    kept = filtered(left, parts)
    assert set(zip(left.a, left.b, strict=True)) & set(zip(right.x, right.y, strict=True)) <= set(
        zip(kept.a, kept.b, strict=True)
    )
    for how in ("inner", "right"):
        options: Any = {"how": how, "left_on": ON, "right_on": OTHER_ON}
        pd.testing.assert_frame_equal(kept.merge(right, **options), left.merge(right, **options))


def test_only_rows_of_other_keys_are_left_out() -> None:
    left, right = frame([(n % 10, 1) for n in range(100)], ON), frame([(3, 1), (7, 1)], OTHER_ON)
    assert sorted(filtered(left, [right]).a.unique()) == [3, 7]


def test_missing_dates_match_missing_dates() -> None:
    dates = pd.to_datetime(["2026-01-01", None, "2026-01-03"])
    left, right = pd.DataFrame({"when": dates}), pd.DataFrame({"when": dates[1:2]})
    kept = rows_with_keys(left, ["when"], all_keys(distinct_keys(right, ["when"])))
    assert len(kept.merge(right, on="when")) == len(left.merge(right, on="when")) == 1


def test_there_are_too_many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_keys, "MAX_KEYS", 5)
    left, many = frame([(n, 1) for n in range(9)], ON), frame([(n, 1) for n in range(6)], OTHER_ON)
    assert distinct_keys(many, OTHER_ON) is None
    assert all_keys(distinct_keys(many[:4], OTHER_ON), distinct_keys(many[4:], OTHER_ON)) is None
    assert filtered(left, [many]) is left


def test_most_rows_of_a_sample_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_keys, "SAMPLE_ROWS", 10)
    left, right = frame([(n % 10, 1) for n in range(100)], ON), frame([(n, 1) for n in range(9)], OTHER_ON)
    assert filtered(left, [right]) is left
    assert len(filtered(left, [right[:2]])) == 20


@pytest.mark.parametrize(
    ("dtype", "other", "can"),
    [
        ("int64", "int64", True),
        ("int64", "int32", False),
        ("float64", "float64", False),
        ("datetime64[ns]", "datetime64[ns]", True),
        ("category", "category", False),
        ("bool", "bool", True),
        ("Int64", "Int64", False),
    ],
)
def test_keys_have_to_be_comparable(dtype: str, other: str, can: bool) -> None:
    left, right = (
        pd.DataFrame({"a": pd.Series([], dtype=dtype)}),
        pd.DataFrame({"x": pd.Series([], dtype=other)}),
    )
    assert can_look_up(left, ["a"], right, ["x"]) == can
