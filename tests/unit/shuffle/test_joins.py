"""Join in pieces with the same result as the whole join, whatever allocation fails."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
from dask.dataframe.multi import merge_chunk
from hypothesis import given
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal

from dask_gpurt.shuffle import joins
from dask_gpurt.shuffle.joins import PROBE_SIDES, join_in_pieces, merge_frames, with_categories_of
from tests.helpers.allocations import failing_allocations, larger_ones_fail, limited_gpu_memory, nth_fails
from tests.helpers.clusters import Library, canonical, to_pandas
from tests.helpers.examples import examples

KIB = 2**10


def side(rows: int, keys: int, seed: int, dtype: str) -> pd.DataFrame:
    """Return a frame with frequent keys, some null where possible, and a column of each kind."""
    random = np.random.default_rng(seed)
    key = pd.Series(random.integers(0, keys, rows))
    if dtype == "float64":
        key = key.astype(dtype).where(random.random(rows) < 0.9)
    elif dtype == "str":
        key = ("key " + key.astype(str)).astype(object).where(random.random(rows) < 0.9, None)
    return pd.DataFrame(
        {
            "key": key,
            "small": random.integers(0, 9, rows).astype("int8"),
            "flag": random.random(rows) < 0.5,
            "ratio": random.random(rows),
            "text": random.choice(["ant", "bee", "cat"], rows).astype(object),
            "when": pd.Timestamp("2013-01-01") + pd.to_timedelta(random.integers(0, 9, rows), "D"),
            "kind": pd.Categorical(random.choice(["x", "y"], rows), categories=["z", "y", "x"]),
        }
    )


def join_of(how: str, left: Any, right: Any, **options: Any) -> Any:
    meta = left.iloc[:0].merge(right.iloc[:0], on="key", how="inner" if how == "leftsemi" else how, **options)
    on = {"left_on": ["key"], "right_on": ["key"], "left_index": False, "right_index": False}
    return partial(merge_chunk, how=how, **on, result_meta=meta, suffixes=("_x", "_y"), **options)


class Memory:
    """Count the requests of a join that is short of memory."""

    def __init__(self) -> None:
        self.rooms = self.splits = 0

    def make_room(self) -> None:
        self.rooms += 1

    def on_split(self, error: MemoryError) -> None:
        self.splits += 1


def in_pieces(join: Any, left: Any, right: Any, how: str, memory: Memory) -> Any:
    return join_in_pieces(
        join, [left, right], PROBE_SIDES.get(how), make_room=memory.make_room, on_split=memory.on_split
    )


def assert_same(found: Any, wanted: Any, library: Library) -> None:
    if library.name == "pandas":
        assert_frame_equal(found, wanted, check_index_type="equiv")
    else:  # which promises no order
        rows = (canonical(to_pandas(frame), index=False) for frame in (found, wanted))
        assert_frame_equal(*rows)


@given(
    how=st.sampled_from(sorted(PROBE_SIDES)),
    rows=st.tuples(st.integers(0, 400), st.integers(0, 200)),
    keys=st.integers(1, 300),
    dtype=st.sampled_from(["int64", "float64", "str"]),
    seed=st.integers(0, 9),
    first=st.integers(0, 120),
    times=st.integers(1, 9),
)
@examples(15)
def test_whatever_allocations_fail_the_rows_are_the_same(
    library: Library,
    how: str,
    rows: tuple[int, int],
    keys: int,
    dtype: str,
    seed: int,
    first: int,
    times: int,
) -> None:
    left, right = (library.frame(side(count, keys, seed + at, dtype)) for at, count in enumerate(rows))
    options = (
        {"indicator": True} if how in ("left", "inner") and seed % 2 and library.name == "pandas" else {}
    )
    if how == "leftsemi":
        right = right[["key"]]
    join = join_of(how, left, right, **options)
    wanted, memory = join(left, right), Memory()
    on_host = library.name == "pandas"
    short = failing_allocations(nth_fails(first, times)) if on_host else limited_gpu_memory(first * KIB)
    with short as allocations:
        try:
            found = in_pieces(join, left, right, how, memory)
        except MemoryError:
            assert allocations.failed > 1, "once may be spilled for"
            return
    assert_same(found, wanted, library)
    assert memory.rooms <= allocations.failed


def selective(how: str) -> tuple[Any, Any]:
    """Return two sides; few rows of the large one have a match."""
    large, small = side(40_000, 1_000_000, 0, "int64"), side(100, 1_000_000, 1, "int64")
    small.loc[:49, "key"] = large["key"][::800].to_numpy()
    return large[["key", "ratio"]], small[["key"] if how == "leftsemi" else ["key", "small"]]


@pytest.mark.parametrize("how", ["inner", "leftsemi"])
def test_a_join_that_does_not_fit_is_made_of_pieces(how: str) -> None:
    """Memory is short for an array of the probe side's length; the result has few rows."""
    left, right = selective(how)
    join, memory = join_of(how, left, right), Memory()
    wanted = join(left, right)
    with failing_allocations(larger_ones_fail(100_000)):
        with pytest.raises(MemoryError):
            join(left, right)
        found = in_pieces(join, left, right, how, memory)
    assert len(found) >= 50
    assert_frame_equal(found, wanted)
    assert memory.splits >= 3, "320,000 bytes in less than 100,000 each"


def test_an_outer_join_is_tried_again_and_not_split() -> None:
    left, right = selective("outer")
    memory = Memory()
    join = join_of("outer", left, right)
    with failing_allocations(larger_ones_fail(100_000)) as allocations, pytest.raises(MemoryError):
        in_pieces(join, left, right, "outer", memory)
    assert (allocations.failed, memory.rooms, memory.splits) == (2, 1, 0)


@pytest.mark.parametrize("how", ["left", "right", "outer"])
def test_a_side_without_rows_has_the_categories_of_the_other(how: str) -> None:
    """Dask describes unknown categories as strings, whatever they are."""
    rows = pd.DataFrame({"key": pd.Categorical([3, 5, 3]), "row": [0, 1, 2]})
    unknown = pd.DataFrame({"key": pd.Categorical([], categories=["__UNKNOWN_CATEGORIES__"])})
    meta = unknown.assign(row=0).merge(unknown.assign(other=0), on="key")
    join = partial(merge_chunk, how=how, left_on=["key"], right_on=["key"], result_meta=meta)
    none = unknown.assign(other=0)
    left, right = (none, rows) if how == "right" else (rows, none)
    with pytest.raises(TypeError, match="dtype of categories"):
        join(left, right)
    joined = join(with_categories_of(right, left), with_categories_of(left, right))
    assert sorted(joined["key"]) == [3, 3, 5]
    assert joined["key"].dtype == rows["key"].dtype


def test_a_side_without_rows_keeps_the_categories_that_it_has() -> None:
    rows = pd.DataFrame({"key": [1, 2], "kind": pd.Categorical(["a", "b"])})
    none = pd.DataFrame({"key": [3], "kind": pd.Categorical(["c"])}).iloc[:0]
    assert with_categories_of(rows, none) is none


@pytest.mark.parametrize("rows", [20, 0])
def test_groups_by_two_keys_are_joined_by_their_index(library: Library, rows: int) -> None:
    left, right = (side(20, 3, seed, "int64").groupby(["key", "text"])[["ratio"]].sum() for seed in (0, 1))
    left, right = left.iloc[:rows], right.rename(columns={"ratio": "other"})
    options = {"left_index": True, "right_index": True, "how": "inner"}
    meta = library.frame(left.merge(right, **options).iloc[:0])
    found = merge_frames(library.frame(left), library.frame(right), result_meta=meta, **options)
    assert_frame_equal(to_pandas(found).sort_index(), left.merge(right, **options), check_index_type=False)


# ---- semi joins, whose right side shrinks first ------------------------------------------------------

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
