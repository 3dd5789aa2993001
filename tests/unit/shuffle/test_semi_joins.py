"""Check that a semi join whose right side shrinks first gives Dask's result, or its error."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
from dask.dataframe.multi import merge_chunk
from hypothesis import given
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal

from dask_gpurt.shuffle import joins
from dask_gpurt.shuffle.joins import merge_frames

DTYPES = (
    *("int64", "int8", "uint16", "float64", "float32", "bool", "Int64", "str", "string[pyarrow]", "object"),
    *("datetime64[us]", "timedelta64[ns]", "category", "mixed"),
)


def keys(dtype: str, rows: int, distinct: int, nulls: bool, random: np.random.Generator) -> pd.Series[Any]:
    """Return a column of a dtype, with keys that occur often, and nulls where it can have any."""
    number = pd.Series(random.integers(0, distinct, rows))
    absent = random.random(rows) < (0.2 if nulls else 0)
    match dtype:
        case "float64" | "float32":
            found = number.astype(dtype).where(~absent)
            return found.mask((number == 0) & (random.random(rows) < 0.5), -0.0)
        case "int64" | "int8" | "uint16" | "bool":
            return number.astype(dtype)
        case "Int64":
            return number.astype(dtype).mask(absent)
        case "datetime64[us]":
            return (pd.Timestamp("2013-01-01") + pd.to_timedelta(number, "D")).astype(dtype).mask(absent)
        case "timedelta64[ns]":
            return pd.to_timedelta(number, "D").astype(dtype).mask(absent)
        case "mixed":  # the same number, the string, or a null of either kind
            found = number.astype(object).where(random.random(rows) < 0.5, number.astype("str"))
            return found.mask(absent, random.choice([None, np.nan])).astype(object)
        case "category":
            return number.map("k{}".format).astype("str").mask(absent).astype(dtype)
    return number.map("k{}".format).astype(dtype).mask(absent, None)


@st.composite
def semi_joins(draw: st.DrawFn) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, Any]]:
    """Draw two sides and the options of a join; often such that the right side can shrink."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, 2))
    rows = draw(st.sampled_from([0, 1, 5, 40])), draw(st.sampled_from([0, 1, 12, 80, 400]))
    distinct, nulls = draw(st.sampled_from([1, 4, 60])), draw(st.booleans())
    left_on = [f"key-{n}" for n in range(count)]
    right_on = draw(st.sampled_from([left_on, [f"other-{n}" for n in range(count)]]))
    dtypes = [draw(st.sampled_from(DTYPES)) for _ in range(count)]
    others = [draw(st.sampled_from([dtype, dtype, dtype, "int64", "object"])) for dtype in dtypes]
    left = {on: keys(dtypes[at], rows[0], distinct, nulls, random) for at, on in enumerate(left_on)}
    right = {on: keys(others[at], rows[1], distinct, nulls, random) for at, on in enumerate(right_on)}
    if draw(st.booleans()):
        left["row"] = pd.Series(np.arange(rows[0]))
        left["kind"] = keys("category", rows[0], 3, nulls, random)
    if draw(st.booleans()):
        right["row"] = pd.Series(np.arange(rows[1]) % 3)  # Dask drops duplicates of whole rows
        right["kind"] = keys("object", rows[1], 3, nulls, random)
    frames = pd.DataFrame(left), pd.DataFrame(right)
    if draw(st.booleans()):
        frames[0].index = pd.Index(np.arange(rows[0]) * 3, name="left")
        frames[1].index = pd.Index([f"r{n}" for n in range(rows[1])], name="right")
    if draw(st.booleans()):
        frames = (
            frames[0].sort_values(left_on, key=_orderable),
            frames[1].sort_values(right_on, key=_orderable),
        )
    options = {
        "how": "leftsemi",
        "left_on": left_on if draw(st.booleans()) or count > 1 else left_on[0],
        "right_on": right_on if draw(st.booleans()) or count > 1 else right_on[0],
        "left_index": False,
        "right_index": False,
        "suffixes": draw(st.sampled_from([("_x", "_y"), ("", "_right")])),
        "indicator": draw(st.booleans()),
    }
    return *frames, options


def _orderable(column: pd.Series[Any]) -> pd.Series[Any]:
    return column if column.dtype.kind in "iufbmM" else column.astype("str")


def joined(join: Any, left: pd.DataFrame, right: pd.DataFrame, options: dict[str, Any]) -> Any:
    """Return the result of a join, or its error."""
    try:
        meta = left.iloc[:2].merge(right.iloc[:2], **options | {"how": "left"}).iloc[:0]
        return join(left.copy(), right.copy(), result_meta=meta, **options)
    except Exception as error:
        return type(error), str(error)


@given(semi_join=semi_joins())
def test_the_result_is_dasks(semi_join: tuple[pd.DataFrame, pd.DataFrame, dict[str, Any]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, found = joined(merge_chunk, *semi_join), joined(merge_frames, *semi_join)
    if isinstance(expected, pd.DataFrame):
        assert_frame_equal(found, expected, check_exact=True, check_column_type=True, check_index_type=True)
        assert type(found.index) is type(expected.index)
    else:
        assert found == expected


@pytest.mark.parametrize("dtype", sorted({*DTYPES} - {"bool", "Int64", "object", "category", "mixed"}))
def test_rows_of_the_right_side_without_a_match_are_not_joined(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing the duplicates of all of them takes most of the time of a semi join."""
    random, on = np.random.default_rng(0), {"left_on": ["key"], "right_on": ["key"]}
    right = pd.DataFrame({"key": keys(dtype, 400, 90, True, random)})
    left = right.iloc[[7, 9, 9]]
    rows_joined: list[int] = []

    def counting(left: Any, right: Any, **options: Any) -> Any:
        rows_joined.append(len(right))
        return merge_chunk(left, right, **options)

    monkeypatch.setattr(joins, "merge_chunk", counting)
    found = merge_frames(left, right, how="leftsemi", result_meta=left.iloc[:0], **on)
    assert list(found["key"].astype("str")) == list(left["key"].astype("str"))
    assert 2 <= rows_joined[0] < 100


@pytest.mark.parametrize("how", ["inner", "left"])
def test_other_joins_get_the_whole_right_side(how: str) -> None:
    left, right = pd.DataFrame({"key": [1]}), pd.DataFrame({"key": [1, 1, 2, 3]})
    found = merge_frames(left, right, how=how, left_on=["key"], right_on=["key"], result_meta=left.iloc[:0])
    assert len(found) == 2
