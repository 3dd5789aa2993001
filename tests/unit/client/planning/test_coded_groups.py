"""Check that groups by numbers are those by keys, in their order, from files and from memory."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.dataframe.dispatch import concat
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.client.planning.reads import CodedRead, lower
from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.client.planning.rules.coded_groups import CodedChunk, CodedGroups
from dask_gpurt.dask_hooks.dictionary_reads import is_supported, with_dictionaries
from tests.helpers.examples import examples
from tests.helpers.planned import value_of
from tests.helpers.rules import ONE_THREAD, tuned

KEYS = {
    "number": st.integers(-3, 3),
    "far": st.sampled_from([-(2**62), 0, 1, 2**62]),
    "short": st.integers(-128, 127),
    "name": st.sampled_from(["b", "a", "é", "Z", "", None]),
    "word": st.sampled_from(["yes", "no"]),
}
AGGREGATIONS: list[Any] = [
    {"value": ["mean", "std", "count"]},
    {"value": "sum", "other": ["min", "max", "size"], "text": "count"},
    {"text": ["first", "last", "max"], "flag": "count"},
    {"value": "count", "other": "count"},
    *("sum", "mean", "count", "size", "first", "min"),
]


pytestmark = pytest.mark.usefixtures("by_tasks")


def planned(result: Any) -> tuple[Any, Facts]:
    """Return the plan of a computation after the rule, and what the rule has noted."""
    facts = Facts(ONE_THREAD)
    return lower(CodedGroups().apply(tuned(result), facts), "simplified-physical"), facts


def has(plan: Any, kind: type) -> bool:
    return any(isinstance(expr, kind) for expr in plan.walk())


def check(result: Any) -> Any:
    """Check that the rule's plan has the result of Dask; return the plan."""
    plan, _ = planned(result)
    try:
        expected = result.compute()
    except Exception as error:  # such as of a text that is averaged
        with pytest.raises(type(error)):
            value_of(plan)
        return plan
    found = value_of(plan)
    equal = pd.testing.assert_frame_equal if expected.ndim == 2 else pd.testing.assert_series_equal
    equal(found, expected, check_exact=True)
    assert list(found.index.names) == list(expected.index.names)
    return plan


@st.composite
def parts(draw: st.DrawFn) -> list[pd.DataFrame]:
    """Draw the rows of partitions, of which some have none."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=2, max_size=5))
    total = sum(lengths)
    columns = {name: draw(st.lists(key, min_size=total, max_size=total)) for name, key in KEYS.items()}
    words = draw(st.sampled_from(["str", "string[pyarrow]", "string[python]"]))
    dtypes = {"number": "int64", "far": "int64", "short": "int8", "name": words, "word": words}
    frame = pd.DataFrame(columns).astype(dtypes)
    values = st.lists(st.sampled_from([0.1, 0.2, 1e9, np.nan]), min_size=total, max_size=total)
    frame["value"] = np.array(draw(values), dtype="float64")
    frame["other"] = np.arange(total)
    frame["text"] = frame["name"].where(frame.number > 0)
    frame["flag"] = pd.array(frame.number > 0, dtype="boolean")
    frame.index = frame.index[::-1]
    return [frame.iloc[start:end] for start, end in pairwise(np.cumsum([0, *lengths]))]


BY = st.lists(st.sampled_from([*KEYS]), min_size=1, max_size=3, unique=True)
OPTIONS = st.fixed_dictionaries({}, optional={"sort": st.booleans(), "observed": st.booleans()})


def grouped(frame: Any, by: list[str], arg: Any, options: dict[str, Any], split_out: int | None) -> Any:
    groups = frame.groupby(by if len(by) > 1 else by[0], **options)
    split = {} if split_out is None or options.get("sort") else {"split_out": split_out}
    if isinstance(arg, dict):
        return groups.agg(arg, **split)
    groups = groups if arg != "mean" else frame.groupby(by, **options, dropna=True)
    return groups.size(**split) if arg == "size" else getattr(groups[["value", "other"]], arg)(**split)


@examples(15)
@given(
    rows=parts(),
    by=BY,
    arg=st.sampled_from(AGGREGATIONS),
    options=OPTIONS,
    split_out=st.sampled_from([None, 1, 2]),
)
def test_groups_of_frames_are_those_of_dask(
    rows: list[pd.DataFrame], by: list[str], arg: Any, options: dict[str, Any], split_out: int | None
) -> None:
    frame = dd.from_map(lambda part: part, rows, meta=rows[0].iloc[:0])
    plan = check(grouped(frame, by, arg, options, split_out))
    assert has(plan, CodedChunk) == (by not in (["name"], ["word"]))


@examples(15)
@given(
    rows=parts(),
    by=BY,
    arg=st.sampled_from(AGGREGATIONS),
    options=OPTIONS,
    filtered=st.sampled_from([None, "other", "name"]),
)
def test_groups_of_files_are_those_of_dask(
    rows: list[pd.DataFrame], by: list[str], arg: Any, options: dict[str, Any], filtered: str | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for at, part in enumerate(rows):
            pd.concat([part] * 4).to_parquet(Path(folder, f"{at}.parquet"), index=False)
        frame = dd.read_parquet(folder)
        if filtered:
            frame = frame[frame.other % 3 > 0] if filtered == "other" else frame[frame["name"].notnull()]
        check(grouped(frame, by, arg, options, None))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Write three files of a table; return their folder."""
    frame = pd.DataFrame({"word": ["b", "a", None] * 20, "key": range(60), "value": np.arange(60) / 3})
    for at in range(3):
        frame.iloc[at * 20 :][:20].to_parquet(tmp_path / f"{at}.parquet", index=False)
    return tmp_path


def test_words_of_files_that_differ_are_grouped(files: Path) -> None:
    frame = pd.DataFrame({"word": ["c", "a"] * 9, "key": range(18), "value": pd.array([1] * 18, "Int64")})
    frame.to_parquet(files / "1.parquet", index=False)
    table = dd.read_parquet(files)
    assert has(check(table.groupby("word").agg({"value": "sum", "key": "count"})), CodedRead)
    whole = with_dictionaries(table.expr, ["word"])(table.expr._plan["parts"])
    parts = concat([table.expr._io_func(part) for part in table.expr._plan["parts"]])
    pd.testing.assert_frame_equal(whole.astype({"word": parts.word.dtype}), parts)
    pd.DataFrame({"word": [None], "key": [1.5], "value": [None]}).to_parquet(files / "2.parquet", index=False)
    check(dd.read_parquet(files).groupby("word").key.sum())


@pytest.mark.parametrize(
    "result",
    [
        lambda rows: rows.partitions[[0, 2]].groupby("word").key.sum(),
        lambda rows: rows[rows.value > 5].groupby("word").key.sum(),
        lambda rows: rows.groupby("word").size(),
        lambda rows: rows.groupby(["key", "word"], sort=True).value.sum(),
    ],
)
@pytest.mark.parametrize("index", [None, False])
def test_words_of_files_are_read_as_numbers(files: Path, result: Any, index: bool | None) -> None:
    pd.read_parquet(files / "1.parquet").to_parquet(files / "1.parquet", index=index)
    assert has(check(result(dd.read_parquet(files))), CodedRead)


def test_a_file_without_rows_may_have_its_index_as_a_range(tmp_path: Path) -> None:
    frame = pd.DataFrame({"word": ["b", "a"] * 10, "other": 1}, index=pd.Index([3, 1] * 10, name="key"))
    for at, rows in enumerate([frame, frame[:0].set_index(pd.RangeIndex(0, name="key")), frame]):
        rows.to_parquet(tmp_path / f"{at}.parquet")
    assert has(check(dd.read_parquet(tmp_path).groupby("word").size()), CodedRead)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (lambda rows: rows.groupby(rows.key + 1).value.sum(), "other than columns"),
        (lambda rows: rows.groupby("value").key.sum(), "other than integers and strings"),
        (lambda rows: rows.groupby("word", dropna=False).key.sum(), "nulls are a group"),
        (lambda rows: rows.groupby("word").key.mean(), "nulls are a group"),
        (lambda rows: rows.groupby("word").agg({"key": "list"}), "other than groups"),
        (lambda rows: rows.groupby("word").key.nunique(), "other than groups"),
        (lambda rows: rows.groupby("key", dropna=True).value.var(), "other than groups"),
        (lambda rows: rows.groupby("word").agg({"word": "count"}), "a key is aggregated"),
        (lambda rows: rows.astype({"word": "category"}).groupby("word").key.sum(), "integers and strings"),
        (lambda rows: rows[rows.word == "a"].groupby("word").key.sum(), "word is read as strings"),
        (lambda rows: rows.assign(word=rows.word + "!").groupby("word").key.sum(), "read as strings"),
    ],
)
def test_groups_that_are_left_by_their_keys(files: Path, result: Any, reason: str) -> None:
    groups = result(dd.read_parquet(files))
    assert not has(check(groups), CodedChunk)
    _, facts = planned(groups)
    assert [(note.done, reason in note.text) for note in facts.notes] == [(False, True)], facts.notes


def test_a_read_that_others_use_is_not_repeated(files: Path) -> None:
    table = dd.read_parquet(files)
    sums = table.groupby("word").agg({"value": "sum"}).reset_index()
    plan = check(table[["word", "value"]].merge(sums, on="word").value_y.sum().to_series())
    assert not has(plan, CodedRead)


def test_this_version_of_dask_is_supported() -> None:
    assert is_supported()
