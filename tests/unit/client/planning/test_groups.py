"""Check that groups by numbers, whole groups and sizes are those of Dask, in its order."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.dataframe.dask_expr._groupby import GroupbyAggregation
from dask.dataframe.dask_expr._shuffle import ShuffleBase
from dask.dataframe.dispatch import concat
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.client.planning.reads import CodedRead, lower
from dask_gpurt.client.planning.rules import Facts, Rule
from dask_gpurt.client.planning.rules.coded_groups import CodedChunk, CodedGroups
from dask_gpurt.client.planning.rules.group_sizes import GroupSizes, has_sizes, with_sums
from dask_gpurt.client.planning.rules.whole_groups import WholeGroups
from dask_gpurt.dask_hooks.dictionary_reads import with_dictionaries
from dask_gpurt.dask_hooks.planning import collection_of
from tests.helpers.examples import examples
from tests.helpers.planned import value_of
from tests.helpers.rules import ONE_THREAD, tuned

pytestmark = pytest.mark.usefixtures("by_tasks")


def planned(result: Any, rule: Rule) -> tuple[Any, Facts]:
    """Return the tuned plan of a computation after a rule, and what the rule has noted."""
    facts = Facts(ONE_THREAD)
    return rule.apply(tuned(result), facts), facts


def has(plan: Any, kind: type) -> bool:
    return any(isinstance(expr, kind) for expr in plan.walk())


def check(result: Any, rule: Rule) -> Any:
    """Check that the rule's plan has the result of Dask; return the plan."""
    plan = lower(planned(result, rule)[0], "simplified-physical")
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


def assert_left(groups: Any, rule: Rule, reason: str) -> None:
    _, facts = planned(groups, rule)
    assert [(note.done, reason in note.text) for note in facts.notes] == [(False, True)], facts.notes


NAMES = st.sampled_from(["b", "a", "é", "Z", "", None])
#: Keys of groups by numbers, and of groups that are aggregated as a whole.
CODED = {
    "number": st.integers(-3, 3),
    "far": st.sampled_from([-(2**62), 0, 1, 2**62]),
    "short": st.integers(-128, 127),
    "name": NAMES,
    "word": st.sampled_from(["yes", "no"]),
}
WHOLE = {
    "number": st.integers(-3, 3),
    "ratio": st.sampled_from([0.5, -1.5, np.nan, -0.0, 0.0]),
    "name": NAMES,
    "when": st.sampled_from([pd.Timestamp("2020-01-01"), pd.Timestamp("1969-12-31 12:00"), pd.NaT]),
}


@st.composite
def parts(draw: st.DrawFn, keys: dict[str, Any]) -> list[pd.DataFrame]:
    """Draw the rows of partitions, of which some have none."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=2, max_size=5))
    total = sum(lengths)
    columns = {name: draw(st.lists(key, min_size=total, max_size=total)) for name, key in keys.items()}
    words = draw(st.sampled_from(["str", "string[pyarrow]", "string[python]"]))
    dtypes = {"far": "int64", "short": "int8", "number": "int64", "name": words, "word": words}
    frame = pd.DataFrame(columns).astype({name: dtypes[name] for name in keys if name in dtypes})
    if "when" in keys:
        frame["when"] = frame["when"].astype("M8[us]")
    values = st.lists(st.sampled_from([0.1, 0.2, 1e9, np.nan]), min_size=total, max_size=total)
    frame["value"] = np.array(draw(values), dtype="float64")
    frame["other"] = np.arange(total)
    frame["text"] = frame["name"].where(frame.number > 0)
    frame["flag"] = pd.array(frame.number > 0, dtype="boolean")
    frame.index = frame.index[::-1]
    return [frame.iloc[start:end] for start, end in pairwise(np.cumsum([0, *lengths]))]


def keys_of(keys: dict[str, Any]) -> Any:
    return st.lists(st.sampled_from([*keys]), min_size=1, max_size=3, unique=True)


# ---- groups by numbers ------------------------------------------------------------------------------

AGGREGATIONS: list[Any] = [
    {"value": ["mean", "std", "count"]},
    {"value": "sum", "other": ["min", "max", "size"], "text": "count"},
    {"text": ["first", "last", "max"], "flag": "count"},
    {"value": "count", "other": "count"},
    *("sum", "mean", "count", "size", "first", "min"),
]
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
    rows=parts(CODED),
    by=keys_of(CODED),
    arg=st.sampled_from(AGGREGATIONS),
    options=OPTIONS,
    split_out=st.sampled_from([None, 1, 2]),
)
def test_groups_of_frames_are_those_of_dask(
    rows: list[pd.DataFrame], by: list[str], arg: Any, options: dict[str, Any], split_out: int | None
) -> None:
    frame = dd.from_map(lambda part: part, rows, meta=rows[0].iloc[:0])
    plan = check(grouped(frame, by, arg, options, split_out), CodedGroups())
    assert has(plan, CodedChunk) == (by not in (["name"], ["word"]))


@examples(15)
@given(
    rows=parts(CODED),
    by=keys_of(CODED),
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
        check(grouped(frame, by, arg, options, None), CodedGroups())


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
    assert has(check(table.groupby("word").agg({"value": "sum", "key": "count"}), CodedGroups()), CodedRead)
    whole = with_dictionaries(table.expr, ["word"])(table.expr._plan["parts"])
    parts = concat([table.expr._io_func(part) for part in table.expr._plan["parts"]])
    pd.testing.assert_frame_equal(whole.astype({"word": parts.word.dtype}), parts)
    pd.DataFrame({"word": [None], "key": [1.5], "value": [None]}).to_parquet(files / "2.parquet", index=False)
    check(dd.read_parquet(files).groupby("word").key.sum(), CodedGroups())


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
    assert has(check(result(dd.read_parquet(files)), CodedGroups()), CodedRead)


def test_a_file_without_rows_may_have_its_index_as_a_range(tmp_path: Path) -> None:
    frame = pd.DataFrame({"word": ["b", "a"] * 10, "other": 1}, index=pd.Index([3, 1] * 10, name="key"))
    for at, rows in enumerate([frame, frame[:0].set_index(pd.RangeIndex(0, name="key")), frame]):
        rows.to_parquet(tmp_path / f"{at}.parquet")
    assert has(check(dd.read_parquet(tmp_path).groupby("word").size(), CodedGroups()), CodedRead)


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
    assert not has(check(groups, CodedGroups()), CodedChunk)
    assert_left(groups, CodedGroups(), reason)


def test_a_read_that_others_use_is_not_repeated(files: Path) -> None:
    table = dd.read_parquet(files)
    sums = table.groupby("word").agg({"value": "sum"}).reset_index()
    plan = check(table[["word", "value"]].merge(sums, on="word").value_y.sum().to_series(), CodedGroups())
    assert not has(plan, CodedRead)


# ---- whole groups, without a shuffle into one partition ---------------------------------------------


@examples(15)
@given(
    rows=parts(WHOLE),
    by=keys_of(WHOLE),
    arg=st.sampled_from(
        [
            {"value": ["median", "std"]},
            {"value": "median", "other": ["sum", "count"]},
            {"other": ["median", "first", "last"]},
            "median",
            ["median", "max"],
        ]
    ),
    options=st.fixed_dictionaries(
        {},
        optional={"dropna": st.booleans(), "observed": st.booleans(), "sort": st.sampled_from([None, False])},
    ),
)
def test_whole_groups_are_those_of_tasks_in_its_order(
    rows: list[pd.DataFrame], by: list[str], arg: Any, options: dict[str, Any]
) -> None:
    frame = dd.from_map(lambda part: part, rows, meta=rows[0].iloc[:0])
    groups = frame[[*by, "value", "other"]].groupby(by if len(by) > 1 else by[0], **options)
    plan = check((groups if isinstance(arg, dict) else groups["value"]).agg(arg), WholeGroups())
    assert not has(plan, ShuffleBase)


FRAME = pd.DataFrame({"key": [1, 2, 1, 3] * 5, "kind": ["a", "b"] * 10, "value": np.arange(20) / 3})


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (lambda rows: rows.astype({"kind": "category"}).groupby("kind"), "there are categories"),
        (lambda rows: rows.groupby("key", sort=True), "groups are sorted"),
        (lambda rows: rows.groupby(rows.key + 1), "grouped by other than columns"),
        (lambda rows: rows.value.groupby(rows.key), "not of a frame"),
        (lambda rows: rows.astype({"key": "int16"}).groupby("key"), "short integers"),
        (lambda rows: rows.shuffle("key").groupby("key"), "whole groups already"),
        (lambda rows: rows.repartition(npartitions=1).groupby("key"), "1 partitions become 1"),
    ],
)
def test_groups_that_are_left_to_a_shuffle(result: Any, reason: str) -> None:
    groups = result(dd.from_pandas(FRAME, npartitions=4))
    spec = ["median"] if groups.obj.ndim == 1 else {"value": "median"}
    assert_left(groups.agg(spec), WholeGroups(), reason)


def test_groups_in_several_partitions_are_shuffled() -> None:
    groups = dd.from_pandas(FRAME, npartitions=4).groupby("key").agg({"value": "median"}, split_out=2)
    assert has(check(groups, WholeGroups()), ShuffleBase)


def test_what_dask_decomposes_is_left() -> None:
    groups = dd.from_pandas(FRAME, npartitions=4).groupby("key").agg({"value": "mean"})
    assert planned(groups, WholeGroups())[1].notes == []


# ---- sizes as sums of ones --------------------------------------------------------------------------

ROWS = pd.DataFrame(
    {
        "key": [1, 2, None, 1, 2, 1] * 5,
        "word": pd.array(["a", None, "b", "a", "b", "c"] * 5, dtype="string"),
        "x": [0.5, None, 1.5, 2.0, 3.0, None] * 5,
        "n": range(30),
        "id": range(30),
    }
)


def rows() -> Any:
    return dd.from_pandas(ROWS, npartitions=4, sort=False)


AT_ONCE = {
    "beside sums": lambda frame: frame.groupby("key").agg({"x": "sum", "id": "size", "n": "max"}),
    "of nulls": lambda frame: frame.groupby(["word"], dropna=False).agg({"x": "size", "n": "mean"}),
    "several": lambda frame: frame.groupby(["key", "word"], sort=False).agg({"x": "size", "id": "size"}),
    "in several partitions": lambda frame: frame.groupby("key").agg({"id": "size", "n": "min"}),
}
LEFT = {
    "of a key": lambda frame: frame.groupby("key").agg({"key": "size", "n": "sum"}),
    "lists": lambda frame: frame.groupby("key").agg({"x": ["size", "sum"]}),
    "variances": lambda frame: frame.groupby("key").agg({"x": "size", "n": "var"}),
    "others": lambda frame: frame.groupby("key").agg({"x": "size", "n": "median"}),
    "none": lambda frame: frame.groupby("key").agg({"x": "sum"}),
    "computed keys": lambda frame: frame.groupby(frame.n % 3).agg({"x": "size"}),
    "of all": lambda frame: frame.groupby("key").agg("size"),
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_sizes_are_sums_of_ones(name: str) -> None:
    groups = AT_ONCE[name](rows())
    assert has_sizes(groups.expr)
    changed = with_sums(groups.expr)
    assert changed._name != groups._name
    found, expected = collection_of(changed).compute(), groups.compute()
    pd.testing.assert_frame_equal(found.sort_index(), expected.sort_index())


@pytest.mark.parametrize("name", LEFT)
def test_others_are_left_to_dask(name: str) -> None:
    groups = LEFT[name](rows()).expr
    assert not isinstance(groups, GroupbyAggregation) or not has_sizes(groups)


def test_pandas_is_left_alone() -> None:
    groups = AT_ONCE["beside sums"](rows()).expr
    assert GroupSizes().apply(groups, Facts(ONE_THREAD)) is groups
