"""Check where filters are moved, and that results stay the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask._expr import optimize_until
from dask.dataframe.dask_expr import _expr
from dask.dataframe.dask_expr._concat import Concat
from dask.dataframe.dask_expr._groupby import GroupByBase
from dask.dataframe.dask_expr._merge import Merge
from dask.dataframe.dask_expr._reductions import DropDuplicates
from dask.dataframe.dask_expr.io.parquet import ReadParquet, ReadParquetFSSpec
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.client.planning.rules import Facts, PartitionSizes
from dask_gpurt.client.planning.rules.row_choices import RowChoices
from tests.helpers import planned
from tests.helpers.clusters import canonical
from tests.helpers.examples import examples
from tests.helpers.rules import Read, computation, corrected, ruled, stored

__all__ = ["corrected"]


pytestmark = pytest.mark.usefixtures("by_tasks")


def tables(rows: int = 60) -> dict[str, pd.DataFrame]:
    """Return a large and a small table, with nulls, zeros of either sign, strings and times."""
    at = np.arange(rows)
    large = pd.DataFrame(
        {
            "key": at * 7 % 11,
            "x": np.where(at % 9 == 0, np.nan, at * 3 % 13) * np.where(at % 2, 1.0, -1.0),
            "n": at % 5,
            "s": pd.array([None if i % 8 == 0 else f"s{i % 4}" for i in at], dtype="string"),
            "d": pd.Series(pd.Timestamp("2020-01-01") + pd.to_timedelta(at % 6, "D")).where(at % 7 != 0),
            "flag": at % 3 == 0,
            "t": pd.Timestamp("2020-01-30") + pd.to_timedelta(at % 5, "D"),
        }
    )
    small = pd.DataFrame(
        {
            "key": np.arange(8),
            "x": [0.0, -0.0, 1.5, np.nan, 2.0, 3.0, 4.0, 5.0],
            "label": pd.array(["a", "b", None, "a", "b", "c", "c", "a"], dtype="string"),
            "more": np.arange(8) / 2,
            "tiny": np.arange(8).astype("uint8"),
        }
    )
    return {"large": large, "small": small}


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    return stored(tmp_path_factory.mktemp("filters"), tables(), 3)


def value_of(plan: Any) -> Any:
    return planned.value_of(optimize_until(plan, "fused"))


# ---- random programs ------------------------------------------------------------------------------


def condition(frame: Any, first: int, second: int) -> Any:
    """Return one of many conditions on columns of a frame."""
    columns = list(frame.columns)
    name, other = columns[first % len(columns)], columns[second % len(columns)]
    kind = str(frame[name].dtype)
    if kind == "string":
        chosen = [
            lambda: frame[name] == "s1",
            lambda: frame[name] != "a",
            lambda: frame[name].isin(["s1", "b", "c"]),
            lambda: frame[name].str.contains("1|b"),
            lambda: ~frame[name].isnull(),
            lambda: ~(frame[name] == "s2"),
        ]
    elif kind == "bool":
        chosen = [lambda: frame[name], lambda: ~frame[name]]
    elif kind.startswith("datetime"):
        chosen = [
            lambda: frame[name] < pd.Timestamp("2020-01-03"),
            lambda: frame[name].dt.day == 2,
            lambda: frame[name].isna(),
        ]
    else:
        chosen = [
            lambda: frame[name] > 1,
            lambda: frame[name] != 2,
            lambda: frame[name].between(0, 4),
            lambda: frame[name].notnull() & (frame[name] * 2 < 9),
            lambda: frame[name] >= frame[name].mean(),
            lambda: (frame[name] < 3) | frame[other].isnull(),
            lambda: frame[name] - 3 > 1,  # bytes are never below zero
        ]
    return chosen[second % len(chosen)]()


def query(frame: Any, first: int, second: int) -> Any:
    columns = list(frame.columns)
    name = columns[first % len(columns)]
    kind = str(frame[name].dtype)
    if kind == "string":
        texts = ["{0} == 's1'", "{0} != 'a'", "not {0} == 's1'", "{0} in ['s1', 'b']", "~({0} != 's2')"]
    elif kind == "bool":
        texts = ["{0}", "not {0}"]
    elif kind.startswith("datetime"):
        texts = ["{0} < '2020-01-03'", "{0} >= '2020-01-02' and {0} != '2020-01-03'"]
    else:
        texts = ["{0} > 1", "0 <= {0} < 4", "{0} > 3 | {0} < 1 & {0} >= -2", "{0} not in [1, 2]", "-1 < {0}"]
    return frame.query(texts[second % len(texts)].format(name))


def merged(frame: Any, other: Any, first: int, second: int, how: str) -> Any:
    keys = [name for name in frame.columns if str(frame[name].dtype) in ("int64", "float64")]
    suffixes = [("_x", "_y"), ("", "_r"), ("_l", "")][second % 3]
    if how == "left" and first % 3 == 0:
        lookup = other.groupby("key").agg({"tiny": "max", "label": "max"})
        return frame.merge(lookup, left_on=keys[first % len(keys)], right_index=True, how=how)
    if how in ("inner", "left") and first % 5 == 1:
        lookup = other.set_index("key")
        lookup = lookup[condition(lookup, second, first)] if second % 2 else lookup
        return frame.merge(
            lookup, left_on=keys[second % len(keys)], right_index=True, how=how, suffixes=suffixes
        )
    if first % 2 and "key" in frame.columns:
        return frame.merge(other, on="key", how=how, suffixes=suffixes)
    return frame.merge(other, left_on=keys[first % len(keys)], right_on="key", how=how, suffixes=suffixes)


def grouped(frame: Any, first: int, second: int) -> Any:
    columns = list(frame.columns)
    key = columns[first % len(columns)]
    values = [name for name in columns if str(frame[name].dtype) in ("int64", "float64") and name != key]
    value = values[second % len(values)]
    groups = frame.groupby(key)
    return (groups[[value]].max() if second % 2 else groups.agg({value: "sum"})).reset_index()


def computed(frame: Any, first: int, second: int) -> Any:
    columns = list(frame.columns)
    name = columns[first % len(columns)]
    kind = str(frame[name].dtype)
    if kind == "string":
        new = [frame[name].str.upper(), frame[name].str.len(), frame[name].isnull()][second % 3]
    elif kind.startswith("datetime"):
        new = [frame[name].dt.day, frame[name]][second % 2]
    else:
        new = (
            [frame[name] * 2, frame[name].fillna(0), frame[name] + 1][second % 3]
            if kind != "bool"
            else ~frame[name]
        )
    return frame.assign(**{["new", name, "x"][second % 3]: new})


def masked_before(frame: Any, first: int, second: int) -> Any:
    mask = condition(frame, first, second)
    return computed(frame, second, first)[mask]


def beside(frame: Any, first: int, second: int) -> Any:
    """Filter by a scalar of all rows: none of them may be left out before it is computed."""
    values = [name for name in frame.columns if str(frame[name].dtype) == "float64"]
    return frame[frame[values[0]] * 3 > frame[values[0]].sum()] if values else frame


OPERATIONS: dict[str, Callable[[Any, Any, int, int], Any]] = {
    "filter": lambda frame, other, first, second: frame[condition(frame, first, second)],
    "both": lambda frame, other, first, second: frame[
        condition(frame, first, second) & condition(frame, second, first)
    ],
    "either": lambda frame, other, first, second: frame[
        (condition(frame, first, second) & condition(frame, second, first))
        | (condition(frame, second + 1, first) & condition(frame, first + 1, second))
    ],
    "loc": lambda frame, other, first, second: frame.loc[condition(frame, first, second)],
    "query": lambda frame, other, first, second: query(frame, first, second),
    "inner": lambda frame, other, first, second: merged(frame, other, first, second, "inner"),
    "left": lambda frame, other, first, second: merged(frame, other, first, second, "left"),
    "right": lambda frame, other, first, second: merged(frame, other, first, second, "right"),
    "outer": lambda frame, other, first, second: merged(frame, other, first, second, "outer"),
    "assign": lambda frame, other, first, second: computed(frame, first, second),
    "masked": lambda frame, other, first, second: masked_before(frame, first, second),
    "beside": lambda frame, other, first, second: beside(frame, first, second),
    "rename": lambda frame, other, first, second: frame.rename(
        columns={frame.columns[first % len(frame.columns)]: f"r{second % 3}"}
    ),
    "project": lambda frame, other, first, second: frame[
        [name for at, name in enumerate(frame.columns) if at != first % len(frame.columns)]
    ],
    "distinct": lambda frame, other, first, second: frame[list(frame.columns)[:3]].drop_duplicates(),
    "groups": lambda frame, other, first, second: grouped(frame, first, second),
    "renumber": lambda frame, other, first, second: frame.reset_index(drop=True),
}

_numbers = st.integers(0, 11)
_filters = st.sampled_from(["filter", "both", "either", "loc", "query", "masked", "beside"])
_others = st.sampled_from(
    [kind for kind in OPERATIONS if kind not in ("filter", "both", "either", "loc", "query")]
)
_steps = st.tuples(st.one_of(_filters, _others), _numbers, _numbers, _numbers)
#: A join, operations, and a filter, which has some way to go.
programs = st.tuples(
    st.tuples(st.sampled_from(["inner", "inner", "left", "right"]), _numbers, _numbers, _numbers),
    st.lists(_steps, max_size=5),
    st.tuples(_filters, _numbers, _numbers, _numbers),
    st.booleans(),
)


def run(source: Callable[[str], Any], program: Any) -> tuple[Any, bool]:
    """Build the result of a program, of dask or pandas, and return whether its rows have numbers of joins."""
    first, steps, last, is_sum = program
    frame, other = source("large"), source("small")
    for kind, one, two, three in [first, *steps, last]:
        try:
            made = OPERATIONS[kind](frame, other, one, two + three)
            len(made.columns)
        except Exception:
            continue  # a step that the frame so far does not have
        if len(set(made.columns)) == len(made.columns):
            frame = made
    if is_sum:
        names = [name for name in frame.columns if str(frame[name].dtype) in ("int64", "float64")]
        return frame[names].sum(), False
    return frame, True


@examples(8)
@given(program=programs)
def test_programs_have_the_same_results(read: Read, program: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result, are_rows = run(read, program)
        plan, _ = ruled(result)
        try:
            expected = value_of(computation(result))
        except Exception as error:
            expected = type(error)
        if isinstance(expected, type):
            return  # Dask cannot compute it
        found = value_of(plan)
    if are_rows:
        pd.testing.assert_frame_equal(canonical(found, index=False), canonical(expected, index=False))
    else:
        pd.testing.assert_series_equal(found, expected)


# ---- where they go --------------------------------------------------------------------------------


def where(frame: Any, condition: Callable[[Any], Any]) -> Any:
    return frame[condition(frame)]


#: Programs that leave out rows last, as few of which as possible shall be joined, grouped or compared.
LATE: dict[str, Callable[[Any, Any], Any]] = {
    "of both sides": lambda large, small: (
        large.merge(small, on="key").pipe(where, lambda rows: (rows.n > 1) & (rows.label == "a")).more.sum()
    ),
    "columns one by one": lambda large, small: (
        large.merge(small, on="key")
        .assign(day=lambda rows: rows.d.dt.day, twice=lambda rows: rows.more * 2)
        .rename(columns={"label": "name"})
        .pipe(where, lambda rows: (rows.day == 2) & rows.name.isin(["a", "b"]))
        .twice.sum()
    ),
    "tables that are looked up by an index": lambda large, small: (
        large.merge(
            small.merge(
                small[["key", "label"]].add_prefix("n_").set_index("n_key"),
                left_on="key",
                right_index=True,
                how="left",
            ).set_index("key"),
            left_on="key",
            right_index=True,
            how="left",
        )
        .pipe(where, lambda rows: (rows.n_label == "a") & (rows.n > 1))
        .more.sum()
    ),
    "integers with a match that are keys of a join": lambda large, small: (
        small.merge(large, on="key", how="left")
        .pipe(where, lambda rows: rows.n > 1)
        .merge(small[["key", "more"]].add_prefix("n_"), left_on="n", right_on="n_key")
        .n_more.sum()
    ),
    "a month of times that all are there": lambda large, small: (
        large.merge(small, on="key")
        .assign(month=lambda rows: rows.t.dt.month)
        .pipe(where, lambda rows: (rows.month == 2) & (rows.n > 1))
        .month.sum()
    ),
    "keys of groups": lambda large, small: (
        large.groupby(["n", "s"]).x.max().reset_index().pipe(where, lambda rows: rows.n > 1).x.sum()
    ),
    "one below the other": lambda large, small: (
        (pd if isinstance(large, pd.DataFrame) else dd)
        .concat([large[["key", "n"]], large[["n", "key"]]])
        .pipe(where, lambda rows: rows.n > 1)
        .key.sum()
    ),
    "distinct rows": lambda large, small: (
        large[["key", "n"]].drop_duplicates().pipe(where, lambda rows: rows.n > 1).key.sum()
    ),
}


MAKING_ROWS = (Merge, Concat, DropDuplicates, GroupByBase)


@pytest.mark.parametrize("name", LATE)
def test_rows_are_left_out_first(read: Read, name: str) -> None:
    result = LATE[name](read("large"), read("small"))
    plan, _ = ruled(result)
    for each in optimize_until(plan, "simplified-logical").find_operations(_expr.Filter):
        assert not [below for below in each.walk() if isinstance(below, MAKING_ROWS)], each.pprint()
    assert value_of(plan) == pytest.approx(LATE[name](*tables().values()))


def test_rows_of_several_results_are_left_out_first(read: Read) -> None:
    rows = where(read("large").merge(read("small"), on="key"), lambda rows: rows.n > 1)
    plan, _ = ruled(rows, rows.groupby("label").more.sum())
    simplified = optimize_until(plan, "simplified-logical")
    assert [type(each.frame) for each in simplified.find_operations(_expr.Filter)] == [ReadParquetFSSpec]
    assert len(list(simplified.find_operations(Merge))) == 1


def test_what_a_condition_says_of_each_side_is_checked_first(read: Read) -> None:
    def program(large: Any, small: Any) -> Any:
        rows = large.merge(small, on="key")
        one = (rows.s == "s1") & (rows.label == "a")
        other = (rows.s == "s2") & rows.label.isin(["b", "c"]) & (rows.n > 0)
        return rows[one | other].more.sum()

    plan, _ = ruled(program(read("large"), read("small")))
    (join,) = optimize_until(plan, "simplified-logical").find_operations(Merge)
    assert all(list(side.find_operations(_expr.Filter)) for side in (join.left, join.right))
    assert value_of(plan) == pytest.approx(program(*tables().values()))


#: Programs whose results would be others, and what says so.
LEFT: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "an index by which both sides are joined": (
        lambda large, small: (
            small.set_index("key")
            .pipe(where, lambda rows: rows.label == "a")
            .join(small.groupby("key").tiny.max().to_frame("largest"))
            .more.sum()
        ),
        "more is done with its index than that a join looks it up",
    ),
    "integers without a match": (
        lambda large, small: small.merge(large, on="key", how="left").pipe(where, lambda rows: rows.more > 1)[
            ["label", "n"]
        ],
        "whether n has nulls",
    ),
    "rows without a match": (
        lambda large, small: (
            large.merge(small, on="key", how="left").pipe(where, lambda rows: rows.label.isnull()).x_x.sum()
        ),
        "not on one side alone",
    ),
    "bytes with a match that a condition computes with": (
        lambda large, small: (
            large.merge(
                small.groupby("key").tiny.max().to_frame(), left_on="key", right_index=True, how="left"
            )
            .pipe(where, lambda rows: (rows.tiny > 0) & (rows.tiny - 5 > 0))
            .x.sum()
        ),
        "not taken for an inner join: whether tiny has nulls",
    ),
    "keys that are labels of the left side": (
        lambda large, small: (
            large.groupby("key")
            .n.sum()
            .to_frame()
            .merge(small, left_index=True, right_on="key", how="left")
            .pipe(where, lambda rows: rows.key > 1)
            .n.sum()
        ),
        "not on one side alone",
    ),
    "rows with another value than one": (
        lambda large, small: (
            large.merge(small, on="key", how="left").pipe(where, lambda rows: rows.more != 1).x_x.sum()
        ),
        "not on one side alone",
    ),
    "rows of an outer join": (
        lambda large, small: (
            large.merge(small, on="key", how="outer").pipe(where, lambda rows: rows.n > 1).x_x.sum()
        ),
        "of kind outer",
    ),
    "numbers of groups": (
        lambda large, small: large.groupby("n").x.max().reset_index().pipe(where, lambda rows: rows.n > 1),
        "are a result",
    ),
    "numbers of joined rows": (
        lambda large, small: (
            large.merge(small, on="key").pipe(where, lambda rows: rows.n > 1).reset_index()["index"].sum()
        ),
        "may see the numbers",
    ),
    "floats that differ in their sign": (
        lambda large, small: large[["x"]].drop_duplicates().pipe(where, lambda rows: rows.x > 1).x.sum(),
        "DropDuplicates",
    ),
    "numbers that are null in some rows": (
        lambda large, small: (
            large.merge(small, on="key")
            .assign(day=lambda rows: rows.d.dt.day)
            .pipe(where, lambda rows: rows.n > 1)[["day"]]
        ),
        "the dtype of PropertyMap",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_filters_stay_where_results_would_be_others(read: Read, name: str) -> None:
    program, reason = LEFT[name]
    result = program(read("large"), read("small"))
    plan, facts = ruled(result)
    assert plan._name == computation(result)._name
    assert reason in " ".join(note.text for note in facts.notes if not note.done)
    value_of(plan)


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        (
            "@first <= d and d < @last",
            {"first": pd.Timestamp("2020-01-02"), "last": pd.Timestamp("2020-01-05")},
        ),
        ("s == @name or s in @names", {"name": "s1", "names": ["s2", "s3"]}),
        ("0.5 < x <= @most", {"most": 7}),
        ("x < 0.5 * x + 1 | not s != 's1' & n > 1", {}),
    ],
)
def test_queries_choose_the_same_rows(read: Read, text: str, variables: dict[str, Any]) -> None:
    result = read("large").query(text, local_dict=variables)
    plan, facts = ruled(result)
    expected = tables()["large"].query(text, local_dict=variables)
    assert any(note.done for note in facts.notes if note.rule == "RowChoices"), facts.notes
    pd.testing.assert_frame_equal(
        canonical(value_of(plan), index=False), canonical(expected, index=False), check_dtype=False
    )


def test_rows_of_renamed_columns_are_chosen_from_one_read(read: Read) -> None:
    """Two reads, of other columns, may have other partitions."""

    def some(rows: Any) -> Any:
        some = rows.rename(columns={"key": "k"})
        some = some[some.n > some.n.mean()]
        return some.loc[~some.s.isin(["s1", "s2"])]

    plan, _ = ruled(some(read("large")).shape[0])
    assert value_of(plan) == len(some(tables()["large"])) > 0


def set_columns(frame: Any, labels: list[Any]) -> Any:
    frame = frame.copy()
    frame.columns = labels
    return frame


#: How programs name columns, and whether these names follow from the old ones.
NAMES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "a function": (lambda small: small.rename(columns=str.upper), True),
    "labels": (lambda small: set_columns(small, ["a", "label", "c", "key", "x"]), True),
    "a label that occurs twice": (lambda small: set_columns(small, ["a", "a", "c", "d", "e"]), False),
    "numbers": (lambda small: set_columns(small, [0, 1, 2, 3, 4]), False),
    "a function that makes one name of several": (
        lambda small: small.rename(columns=lambda name: name[:1] if name < "m" else "k"),
        False,
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_columns_are_named_by_a_mapping(read: Read, name: str) -> None:
    program, is_changed = NAMES[name]
    renamed, expected = program(read("small")), program(tables()["small"])
    plan, facts = ruled(renamed)
    assert any(note.rule == "Renaming" for note in facts.notes) == is_changed
    pd.testing.assert_frame_equal(value_of(plan), value_of(computation(renamed)))
    if is_changed:
        label = expected.columns[1]
        plan = optimize_until(ruled(renamed[label].count())[0], "simplified-logical")
        (table,) = plan.find_operations(ReadParquet)
        assert table.columns == ["x"]
        assert value_of(plan) == expected[label].count()


@pytest.mark.parametrize(
    "text",
    ["n > @limit", "n.abs() > 1", "index > 1", "flag == 1", "d == '2020-01-01'", "key + n > 3", "n ** 2 > 3"],
)
def test_queries_that_mean_something_else_are_left(read: Read, text: str) -> None:
    large = read("large")
    expr = _expr.Query(large.expr, text, {})
    facts = Facts(PartitionSizes(1, 1))
    assert RowChoices().apply(expr, facts)._name == expr._name
    assert [note.done for note in facts.notes] == [False]


@pytest.mark.parametrize("name", ["x", "d", "n"])
def test_what_is_unequal_is_null_too_through_arrow(tmp_path: Any, name: str) -> None:
    table = tables()["large"]
    dd.from_pandas(table, npartitions=3).to_parquet(tmp_path, write_index=False)
    read = dd.read_parquet(tmp_path, filesystem="arrow")
    value = table[name].dropna().iloc[3]
    plan, _ = ruled(where(read, lambda rows: (rows[name] != value) & (rows.key < 9)).key.sum())
    assert value_of(plan) == where(table, lambda rows: (rows[name] != value) & (rows.key < 9)).key.sum()
