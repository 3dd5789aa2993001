"""Programs for which Dask's own result is wrong have that of pandas while the runtime is on.

docs/reference/where-dask-is-wrong.md lists them. Shuffles are Dask's ``tasks`` here: plans are right
by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from dask_gpurt.client.corrections import correct_with
from dask_gpurt.client.lowering import Lowering, lower_with
from dask_gpurt.dask_hooks import PatchSet
from tests.helpers.nightly import nightly

_random = np.random.default_rng(0)
LEFT = pd.DataFrame(
    {"k": _random.integers(0, 40, 400), "j": _random.integers(0, 25, 400), "x": np.arange(400)}
)
RIGHT = pd.DataFrame(
    {"k": _random.integers(0, 40, 120), "j": _random.integers(0, 50, 120), "y": np.arange(120)}
)


@pytest.fixture(scope="module", autouse=True)
def switch() -> Iterator[dict[str, bool]]:
    """Lower expressions as where the runtime is on; yield the switch."""
    patches, state = PatchSet(), {"on": True}
    lower_with(Lowering(lambda: state["on"], lambda name, choice: None), patches)
    correct_with(lambda: state["on"], patches)
    as_given = {"dataframe.convert-string": False}
    with dask.config.set({"dataframe.shuffle.method": "tasks", "scheduler": "sync", **as_given}):
        yield state
    patches.restore()


def same_rows(ours: pd.DataFrame, theirs: pd.DataFrame) -> None:
    columns = list(theirs.columns)
    sides = (side.sort_values(columns).reset_index(drop=True)[columns] for side in (ours, theirs))
    pd.testing.assert_frame_equal(*sides, check_dtype=False, check_column_type=False)


def assert_like_pandas(
    program: Callable[[Any], Any], rows: pd.DataFrame, partitions: int = 4, *, sort: bool = False, **how: Any
) -> None:
    """Compare a program's result on a collection with that of pandas, in its order or sorted by the index."""
    ours, wanted = program(dd.from_pandas(rows, npartitions=partitions, sort=False)), program(rows)
    ours = ours.compute() if hasattr(ours, "dask") else ours
    if np.isscalar(wanted):
        assert ours == pytest.approx(wanted, rel=1e-12)
        return
    if sort:
        ours, wanted = ours.sort_index(), wanted.sort_index()
    same = pd.testing.assert_series_equal if wanted.ndim == 1 else pd.testing.assert_frame_equal
    same(ours, wanted, **how)


class Tables:
    """Give a program the same tables as frames of pandas or as collections."""

    def __init__(self, *, lazily: bool):
        self.lazily = lazily

    def table(self, frame: pd.DataFrame, partitions: int = 4) -> Any:
        return dd.from_pandas(frame, npartitions=partitions, sort=False) if self.lazily else frame

    def left(self, partitions: int = 5) -> Any:
        return self.table(LEFT, partitions)

    def right(self, partitions: int = 4) -> Any:
        return self.table(RIGHT, partitions)

    def sums(self, frame: Any, by: str, of: str) -> Any:
        options = {"split_out": True} if self.lazily else {}
        return frame.groupby(by, dropna=False)[of].sum(**options).reset_index()

    def semi(self, left: Any, right: Any, **options: Any) -> Any:
        if self.lazily:
            return left.merge(right, left_on="k", right_on="j", how="leftsemi", **options)
        return left[left.k.isin(right.j)]


def renamed(tables: Tables) -> Any:
    """Rows with both keys, of which the left one is now `k_l`, and `k` is another column of the right."""
    return tables.left().merge(tables.right(), left_on="k", right_on="j", suffixes=("_l", ""))


def unmatched(tables: Tables, how: str) -> Any:
    return tables.right()[["j", "y"]].merge(tables.left()[["k", "x"]], left_on="j", right_on="k", how=how)


def fewer(tables: Tables) -> Any:
    left = tables.left()
    return left.shuffle("k", npartitions=8).repartition(npartitions=4) if tables.lazily else left


def sent_to_all(tables: Tables) -> Any:
    return tables.left(40)[["k", "x"]].merge(tables.right(2)[["k", "y"]], on="k")


def one_partition(tables: Tables) -> Any:
    right = tables.right()[["k", "j"]]
    right = right.shuffle("j").repartition(npartitions=1) if tables.lazily else right
    return tables.left()[["k", "x"]].merge(right, on="k")


def by_index(tables: Tables) -> Any:
    return tables.left().set_index("k").merge(tables.right().set_index("k"), on="k")


def other_names(tables: Tables) -> Any:
    joined = tables.left().merge(tables.right()[["k", "y"]], on="k")
    joined.columns = ["x", "k", "j", "y"]
    return joined


def applied(tables: Tables) -> Any:
    options = {"meta": ("x", "int64")} if tables.lazily else {}
    return renamed(tables).groupby("k").x.apply(lambda part: part.sum(), **options).reset_index()


def fewer_groups(tables: Tables) -> Any:
    joined = tables.left().merge(tables.right()[["k", "y"]], on="k")
    options = {"split_out": 3} if tables.lazily else {}
    return joined.groupby("k").x.sum(**options).reset_index().merge(tables.right(3), on="k")


PROGRAMS: dict[str, Callable[[Tables], Any]] = {
    "groups by a name that suffixes gave to another column": lambda t: t.sums(renamed(t), "k", "x"),
    "a function of such groups": applied,
    "distinct values of such a column": lambda t: renamed(t)[["k"]].drop_duplicates(),
    "a join by such a column": lambda t: renamed(t)[["k", "x"]].merge(t.right()[["k", "y"]], on="k"),
    "groups by columns of other names": lambda t: t.sums(other_names(t), "k", "y"),
    "groups by the key of unmatched rows": lambda t: t.sums(unmatched(t, "left"), "k", "y"),
    "groups by one key of an outer join": lambda t: t.sums(unmatched(t, "outer"), "k", "y"),
    "groups after a side was sent to all": lambda t: t.sums(sent_to_all(t), "k", "x"),
    "groups by a column of a single partition": lambda t: t.sums(one_partition(t), "j", "x"),
    "a join by a column of a single partition": lambda t: one_partition(t).merge(
        t.right()[["j", "y"]], on="j"
    ),
    "a join of a shuffle in fewer partitions": lambda t: fewer(t).merge(t.right(), on="k"),
    "a join after a join by divisions": lambda t: by_index(t).merge(t.right()[["k", "y"]], on="k")[
        ["x", "y_y"]
    ],
    "a join of groups in fewer partitions": fewer_groups,
    "a semi join of one partition": lambda t: t.semi(t.left(1), t.right(20)),
    "a semi join of few partitions": lambda t: t.semi(t.left(2), t.right(64)),
    "a semi join of a side to send": lambda t: t.semi(
        t.left(3), t.right(4), **({"broadcast": True} if t.lazily else {})
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_the_result_of_pandas(name: str) -> None:
    program = PROGRAMS[name]
    same_rows(program(Tables(lazily=True)).compute(), program(Tables(lazily=False)))


def test_a_collection_is_right_whenever_the_runtime_is_on(switch: dict[str, bool]) -> None:
    """What Dask has cached in its expressions while the runtime was off does not count."""
    program, counts = PROGRAMS["groups after a side was sent to all"], []
    groups = program(Tables(lazily=True))
    try:
        for switch["on"] in (False, True, False):
            counts.append(len(groups.compute()))
    finally:
        switch["on"] = True
    right = len(program(Tables(lazily=False)))
    assert counts[1] == right
    assert counts[0] == counts[2] > right  # as shipped


#: Integers of which Dask's squares, or the squares of its sums, wrap around.
INTEGERS = pd.DataFrame(
    {
        "k": _random.integers(0, 3, 9000),
        "small": _random.integers(0, 300, 9000).astype("int16"),
        "byte": _random.integers(0, 200, 9000).astype("uint8"),
        "medium": _random.integers(-100, 60_000, 9000).astype("int32"),
        "large": _random.integers(10**6, 2 * 10**6, 9000),
        "null": pd.array(np.where(_random.random(9000) < 0.1, None, 70_000), dtype="Int32"),
        "x": _random.random(9000),
        "huge": _random.integers(10**15, 5 * 10**15, 9000),
        "unsigned": _random.integers(0, 2**64, 9000, dtype="uint64"),
    }
)
OF_INTEGERS: dict[str, Callable[[Any], Any]] = {
    "standard deviations": lambda frame: frame.groupby("k").std(),
    "variances of a column": lambda frame: frame.groupby("k").large.var(),
    "variances by another series": lambda frame: frame.large.groupby(frame.k % 2).std(ddof=0),
    "variances beside sums": lambda frame: frame.groupby("k").agg(
        {"large": ["std", "sum"], "small": ["var", "max"], "null": "std", "x": ["var", "sum"], "byte": "var"}
    ),
    "variances of values whose sums wrap around": lambda frame: frame.groupby("k").agg(
        {"huge": ["var", "std"], "unsigned": "var"}
    ),
    "variances of a series": lambda frame: frame.groupby("k").medium.agg(["var", "sum", "std"]),
    "covariances": lambda frame: frame.groupby("k")[["medium", "large"]].cov(),
    "correlations": lambda frame: frame.groupby("k")[["medium", "large", "x"]].corr(),
}


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_variances_of_integers_do_not_wrap_around(name: str) -> None:
    how = {"rtol": 1e-7, "check_dtype": name != "covariances"}
    with np.errstate(invalid="ignore"):
        assert_like_pandas(OF_INTEGERS[name], INTEGERS, sort=True, **how)


def added(frame: Any) -> Any:
    """Add columns that functions return, of which one reads the other, beside one that is given."""
    options = {} if frame is LEFT else {"meta": ("x", "float64")}
    return frame.assign(
        mean=lambda d: d.groupby("j").x.transform("mean", **options), one=1, ratio=lambda d: d.x / d["mean"]
    )


def test_columns_that_functions_return_are_aligned() -> None:
    same_rows(added(Tables(lazily=True).left()).compute(), added(LEFT))


@pytest.mark.parametrize("partitions", [5, 1])
@pytest.mark.parametrize("known", [True, False])
def test_columns_whose_rows_a_shuffle_has_moved_meet_by_their_labels(partitions: int, known: bool) -> None:
    def deviations(frame: Any, **options: Any) -> Any:
        return (frame.x - frame.groupby("j").x.transform("mean", **options)).rename("x")

    left = Tables(lazily=True).left(partitions)
    found = deviations(left if known else left.clear_divisions(), meta=("x", "float64")).compute()
    pd.testing.assert_series_equal(found.sort_index(), deviations(LEFT))


def test_sums_by_groups_are_taken_where_they_are() -> None:
    """To align them would shuffle all rows by their index."""
    left = Tables(lazily=True).left().clear_divisions()
    found = (left.x - left.groupby("j").x.cumsum()).compute()
    assert found.tolist() == (LEFT.x - LEFT.groupby("j").x.cumsum()).tolist()


def test_columns_of_the_same_partitions_are_put_side_by_side() -> None:
    """To align them would shuffle all rows by their index."""
    left = Tables(lazily=True).left().clear_divisions()
    summed = left.assign(total=lambda d: d.groupby("j").x.cumsum()).compute()
    assert summed.x.tolist() == LEFT.x.tolist()
    assert summed.total.tolist() == LEFT.groupby("j").x.cumsum().tolist()


@pytest.mark.parametrize("ascending", [True, False, [False, True]])
def test_nulls_come_first_in_all_of_a_sort(ascending: Any) -> None:
    rows = LEFT.assign(j=LEFT.j.where(LEFT.j > 12))[["j", "x"]]
    lazy, wanted = (
        frame.sort_values(["j", "x"], ascending=ascending, na_position="first")
        for frame in (dd.from_pandas(rows, npartitions=4, sort=False), rows)
    )
    pd.testing.assert_frame_equal(lazy.head(250), wanted.head(250))
    pd.testing.assert_frame_equal(lazy.tail(5), wanted.tail(5))
    in_order = dask.compute(*lazy.to_delayed())  # the result as a whole is sorted in one partition
    assert len(in_order) > 1
    pd.testing.assert_frame_equal(pd.concat(in_order), wanted)


COUNTS: dict[str, Callable[[Any], Any]] = {
    "counts": lambda values: values.value_counts(),
    "the rarest": lambda values: values.value_counts(ascending=True),
    "shares": lambda values: values.value_counts(normalize=True),
    "as a frame": lambda values: values.value_counts().to_frame("number"),
    "numbered": lambda values: values.value_counts().reset_index(),
}


@pytest.mark.parametrize("dtype", ["int64", "str", "Int64", "category"])
@pytest.mark.parametrize("name", COUNTS)
def test_the_most_frequent_values_come_first(name: str, dtype: str) -> None:
    """Each value is there once more than the one before it, so that there is one order."""
    values = pd.Series(np.repeat(np.arange(30), np.arange(30)), name="v").sample(frac=1, random_state=0)
    values = values.reset_index(drop=True).astype(dtype)
    lazy, wanted = COUNTS[name](dd.from_pandas(values, npartitions=4)), COUNTS[name](values)
    same = pd.testing.assert_series_equal if wanted.ndim == 1 else pd.testing.assert_frame_equal
    for number in (0, 3, 100):
        same(lazy.head(number), wanted.head(number), check_categorical=False, check_dtype=False)


def test_values_that_a_program_wants_in_no_order_stay_in_it() -> None:
    counts = dd.from_pandas(LEFT, npartitions=4).k.value_counts(sort=False)
    pd.testing.assert_series_equal(counts.head(3), counts.get_partition(0).compute().head(3))


#: Programs that Dask does not compute: columns are left out that something below needs.
OF_COLUMNS: dict[str, Callable[[Any], Any]] = {
    "a column of the first rows": lambda rows: rows.sort_values("x")["k"].head(3),
    "columns of the first rows": lambda rows: rows.sort_values(["j", "x"], ascending=False)[["k"]].head(3),
    "a column of the last rows": lambda rows: rows.sort_values("x")["k"].tail(3),
    "numbered first rows": lambda rows: rows.sort_values("x")[["k"]].reset_index(drop=True).head(3),
    "columns of the largest rows": lambda rows: rows.nlargest(9, ["j", "x"])[["k"]],
    "a column of the least rows": lambda rows: rows.nsmallest(9, "x").k,
    "the column of the order of the largest rows": lambda rows: rows.rename(columns={"x": "order"}).nlargest(
        9, "order"
    )["order"],
    "two columns by themselves": lambda rows: (lambda top: top.k + top.j)(rows.nlargest(9, "x")),
    "groups of the largest rows": lambda rows: rows.nlargest(90, "x").groupby("k").j.sum(),
    "a join with the largest rows": lambda rows: rows.merge(rows.nlargest(3, "x")[["k"]], on="k").set_index(
        "k"
    ),
    "one of the sums of groups": lambda rows: rows.groupby("k")[["j", "x"]].sum()[["x"]],
    "a sum of groups as a column": lambda rows: rows.groupby("k")[["j", "x"]].max().x,
    "some of the groups' columns": lambda rows: (
        rows.groupby(["k", "j"])[["x", "z"]].mean().reset_index()[["k", "z"]].set_index("k")
    ),
    "a median": lambda rows: rows.groupby("k")[["j", "x"]].median()[["x"]],
    "a first value": lambda rows: rows.groupby("k")[["j", "x"]].first()[["x"]],
    "filled by groups": lambda rows: rows.groupby("k")[["z", "x"]].ffill()[["z"]],
    "groups beside rows": lambda rows: rows.join(
        rows.groupby("k")[["j", "x"]].sum().add_suffix("_sum"), on="k"
    )[["x", "x_sum"]],
    "several of the groups": lambda rows: (lambda sums: sums.x / sums.z.sum())(
        rows.groupby("k")[["j", "x", "z"]].sum()
    ),
}


@pytest.mark.parametrize("name", OF_COLUMNS)
def test_columns_that_are_needed_below_are_there(name: str) -> None:
    rows = LEFT.assign(z=np.where(LEFT.x % 3, LEFT.x / 2, np.nan))
    ours, wanted = OF_COLUMNS[name](dd.from_pandas(rows, npartitions=5)), OF_COLUMNS[name](rows)
    ours = ours.compute() if hasattr(ours, "dask") else ours
    assert type(ours) is type(wanted)
    same_rows(*(each.reset_index() for each in (ours, wanted)))


#: Programs that assign a column twice: the second time it stays where it is.
TWICE: dict[str, Callable[[Any], Any]] = {
    "at once": lambda rows: rows.assign(a=rows.x, b=rows.j).assign(a=rows.k * 2),
    "one by one": lambda rows: rows.assign(a=rows.x).assign(b=rows.j).assign(a=rows.k, c=1, b=rows.x + 1),
    "with a condition between": lambda rows: (lambda chosen: chosen.assign(a=chosen.k * 3, j=0))(
        (lambda found: found[found.k > 3])(rows.assign(a=rows.x, b=rows.j))
    ),
    "of some columns": lambda rows: rows.assign(a=rows.x, b=rows.j)[["b", "a", "k"]].assign(b=rows.k),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_column_that_is_assigned_twice_stays_where_it_is(name: str) -> None:
    assert_like_pandas(TWICE[name], LEFT)
    assert [*TWICE[name](dd.from_pandas(LEFT, npartitions=3)).columns] == [*TWICE[name](LEFT).columns]


def test_a_condition_on_rows_that_another_left_is_checked_on_these() -> None:
    """Labels repeat in partitions, so that conditions on all rows and on some do not meet."""
    rows = LEFT.assign(s=("a" + (LEFT.x % 5).astype("str")).astype("string")).set_axis(LEFT.x % 4)

    def count(table: Any) -> int:
        some = table[table.x > 3]
        fewer = some[some.s.str.startswith("a1")]
        return len(fewer[fewer.j.notnull()])

    assert count(dd.from_pandas(rows, npartitions=3, sort=False)) == count(rows) > 0


def _sums(rows: Any) -> Any:
    """Return what a function that takes whole rows makes of them, a series."""
    options = {} if isinstance(rows, pd.DataFrame) else {"meta": ("sum", "int64")}
    return rows.apply(lambda row: row.j + row.x, axis=1, **options)


#: Programs in which a column of a table meets what is made of the whole table.
OF_WHOLE_TABLES: dict[str, Callable[[Any], Any]] = {
    "rows of other names": lambda rows: (lambda named: named[named.j > 3].size)(
        rows.rename(columns={"k": "key"})
    ),
    "rows of prefixed names": lambda rows: (lambda named: named[named.p_j > 3].size)(rows.add_prefix("p_")),
    "labels of other names": lambda rows: (lambda named: named[["j"]].assign(label=named.index))(
        rows.rename(columns={"k": "key"})
    ),
    "a function of rows": lambda rows: rows.j + _sums(rows),
    "a function of rows of other names": lambda rows: rows.j + _sums(rows.rename(columns={"k": "b"})),
    "a condition on a function of rows": lambda rows: rows.k[_sums(rows) > 200],
    "a number of values": lambda rows: rows.j + rows.count(axis=1),
}


@pytest.mark.parametrize("name", OF_WHOLE_TABLES)
def test_columns_meet_what_is_made_of_their_table(name: str, tmp_path: Path) -> None:
    dd.from_pandas(LEFT.assign(s="a", y=1.5), npartitions=4).to_parquet(tmp_path)
    table = dd.read_parquet(tmp_path)
    ours, wanted = OF_WHOLE_TABLES[name](table).compute(), OF_WHOLE_TABLES[name](table.compute())
    if isinstance(wanted, int):
        assert ours == wanted > 0
    else:
        assert len(wanted) > 0
        pd.testing.assert_frame_equal(*(pd.DataFrame(each) for each in (ours, wanted)))


def test_a_masked_condition_comes_before_one_of_arrow() -> None:
    rows = LEFT.assign(s=pd.array([f"a{x % 5}" if x % 3 else None for x in LEFT.x], dtype="string[pyarrow]"))

    def chosen(table: Any) -> Any:
        some = table[table.s.str.contains("a", na=False)]
        return some[some.s != "a1"]

    assert len({type(part.dtype) for part in (rows.s.str.contains("a", na=False), rows.s != "a1")}) == 2
    assert_like_pandas(chosen, rows)


def test_a_function_says_which_rows_are_wanted() -> None:
    rows = dd.from_pandas(LEFT, npartitions=3)
    chosen, wanted = rows[lambda each: each.x > 30], LEFT[lambda each: each.x > 30]
    assert len(chosen) == len(wanted)
    assert chosen[lambda each: each.j < 5].compute().equals(wanted[lambda each: each.j < 5])
    assert rows[lambda each: ["k", "x"]].compute().equals(LEFT[["k", "x"]])
    assert rows.x[lambda each: each > 30].compute().equals(wanted.x)


#: Programs that want a key of groups by several keys.
OF_KEYS: dict[str, Callable[[Any], Any]] = {
    "a sum": lambda rows: rows.groupby(["k", "j"]).x.sum().reset_index()["k"],
    "sizes": lambda rows: rows.groupby(["k", "j"]).size().rename("n").reset_index().j,
    "the values": lambda rows: rows.groupby(["k", "j"]).x.sum().reset_index()["x"],
    "a key with a condition": lambda rows: (lambda sums: sums[sums.x > 30].k)(
        rows.groupby(["k", "j"]).x.sum().reset_index()
    ),
    "one key": lambda rows: rows.groupby("j").x.sum().reset_index().j,
    "values by a key called name": lambda rows: (
        rows.assign(name=rows.k).groupby("name").x.sum().reset_index().x
    ),
    "a key called name": lambda rows: rows.assign(name=rows.k).groupby("name").x.sum().reset_index()["name"],
    "greater values than most": lambda rows: (lambda sums: sums[sums.x > sums.x.mean()].x)(
        rows.assign(name=rows.k).groupby("name").x.sum().reset_index()
    ),
}


@pytest.mark.parametrize("name", OF_KEYS)
def test_keys_of_groups_are_no_values(name: str) -> None:
    assert_like_pandas(lambda rows: OF_KEYS[name](rows).sum(), LEFT)
    ours, wanted = OF_KEYS[name](dd.from_pandas(LEFT, npartitions=3)).compute(), OF_KEYS[name](LEFT)
    same_rows(ours.to_frame(), wanted.to_frame())


OF_LABELS: dict[str, Callable[..., Any]] = {
    "one column": lambda rows, **options: rows.groupby("k").x.idxmax(**options),
    "equal values": lambda rows, **options: rows.groupby("k").j.idxmin(**options),
    "columns with nulls": lambda rows, **options: rows.groupby("k")[["z", "x"]].idxmin(**options),
    "all columns": lambda rows, **options: rows.groupby("k").idxmax(**options),
    "two keys": lambda rows, **options: rows.groupby(["k", "n"]).x.idxmin(**options),
    "null keys": lambda rows, **options: rows.groupby("n", dropna=False)[["x", "j"]].idxmax(**options),
    "computed keys": lambda rows, **options: rows.groupby(rows.x % 7).j.idxmax(**options),
    "categories": lambda rows, **options: (
        rows.astype({"j": "category"}).groupby("j", observed=True).x.idxmax(**options)
    ),
    "a series": lambda rows, **options: rows.x.groupby(rows.k).idxmax(**options),
    "one of the labels": lambda rows, **options: rows.groupby("k")[["j", "x"]].idxmax(**options)[["x"]],
    "columns of numbers": lambda rows, **options: (
        rows.assign(s="s").groupby("k").idxmin(numeric_only=True, **options)
    ),
    "nothing skipped": lambda rows, **options: rows.groupby("k")[["x", "j"]].idxmax(skipna=False, **options),
}


@pytest.mark.parametrize("method", ["cumsum", "cumprod", "cumcount"])
@pytest.mark.parametrize("columns", ["z", ["x", "z"]], ids=str)
def test_running_values_of_groups_begin_after_nulls(method: str, columns: Any) -> None:
    rows = LEFT.assign(
        k=LEFT.k % 5, x=LEFT.x / 200, z=np.where((LEFT.x < 90) | (LEFT.x % 7 == 0), np.nan, 1.01)
    )
    rows.loc[150:250, "z"] = rows.z.where(rows.k != 3)
    if method == "cumcount":
        columns = ["k", "z"]
    assert_like_pandas(lambda frame: getattr(frame.groupby("k")[columns], method)(), rows, 9)


@pytest.mark.parametrize("options", [{}, {"split_out": 3}], ids=str)
@pytest.mark.parametrize("name", OF_LABELS)
def test_labels_of_greatest_values_are_those_of_all_partitions(name: str, options: dict[str, int]) -> None:
    random = np.random.default_rng(1)
    rows = LEFT.assign(x=random.permutation(400), z=np.where(LEFT.x % 9 < 3, np.nan, LEFT.j % 5))
    rows = rows.assign(k=rows.k % 9, n=np.where(rows.j < 9, np.nan, rows.j % 2))
    rows.index = pd.Index([f"row {at}" for at in range(400)], name="row")
    lazy = dd.from_pandas(rows, npartitions=11, sort=False)
    ours, wanted = OF_LABELS[name](lazy, **options).compute(), OF_LABELS[name](rows)
    if name == "categories":  # each partition has its own
        ours, wanted = (each.set_axis(each.index.astype("int64")) for each in (ours, wanted))
    same = pd.testing.assert_series_equal if wanted.ndim == 1 else pd.testing.assert_frame_equal
    same(ours.sort_index(), wanted.sort_index())


def test_groups_without_values_have_no_label_of_the_greatest() -> None:
    lazy = dd.from_pandas(LEFT.assign(x=LEFT.x.where(LEFT.k != 3)), npartitions=4)
    with pytest.raises(ValueError, match="no values"):
        lazy.groupby("k").x.idxmax().compute()
    with pytest.raises(ValueError, match="skipna=False"):
        lazy.groupby("k").x.idxmax(skipna=False).compute()


def test_rows_are_sorted_by_a_function() -> None:
    lazy = dd.from_pandas(LEFT, npartitions=4)
    for by, options in (("x", {"ascending": False}), (["k", "j"], {"ignore_index": True})):
        ours, wanted = (
            frame.sort_values(by, key=lambda c: (c - 20).abs(), **options) for frame in (lazy, LEFT)
        )
        pd.testing.assert_frame_equal(ours.compute(), wanted)
        pd.testing.assert_frame_equal(ours.head(9), wanted.head(9))
        pd.testing.assert_series_equal(ours.x.tail(9), wanted.x.tail(9))


def cast(frame: Any, **dtypes: str) -> Any:
    return frame.astype(dtypes)


def cast_by_column(frame: Any) -> Any:
    frame = frame.copy()
    frame["j"] = frame.j.astype("str")
    return frame[frame.j == "7"]


AFTER_CASTS: dict[str, Callable[[Any], Any]] = {
    "text": lambda frame: (lambda t: t[t.j == "7"])(cast(frame, j="str")),
    "text of all": lambda frame: (lambda t: t[t.j == "7"].x)(frame.astype("str")),
    "integers": lambda frame: (lambda t: t[t.half == 3])(cast(frame.assign(half=frame.x / 2), half="int64")),
    "another column": lambda frame: (lambda t: t[t.k == 7])(cast(frame, j="str")),
    "one of two columns": lambda frame: (lambda t: t[(t.k > 7) & t.j.isin(["7", "9"])])(cast(frame, j="str")),
    "a series": lambda frame: (lambda t: t[t == "7"].to_frame())(frame.j.astype("str")),
    "in steps": cast_by_column,
}


@pytest.mark.parametrize("name", AFTER_CASTS)
def test_a_condition_reads_what_a_cast_has_made(name: str) -> None:
    assert len(AFTER_CASTS[name](LEFT)) > 0
    assert_like_pandas(AFTER_CASTS[name], LEFT)


_NUMBERS, _DAYS = np.arange(60), pd.date_range("2026-01-01", periods=60)
#: Keys that are equal in pandas, but that Dask hashes to different partitions.
KEYS: dict[str, tuple[Any, Any]] = {
    "units of time": (_DAYS.as_unit("ns"), _DAYS.as_unit("us")),
    "units of times with a zone": (
        _DAYS.as_unit("s").tz_localize("UTC"),
        _DAYS.as_unit("ns").tz_localize("UTC").tz_convert("Asia/Tokyo"),
    ),
    "units of durations": (_DAYS.as_unit("ms") - _DAYS[0], _DAYS.as_unit("us") - _DAYS[0]),
    "times of Arrow": tuple(
        pd.Series(_DAYS).astype(kind) for kind in ("timestamp[ns][pyarrow]", "timestamp[ms][pyarrow]")
    ),
    "dates and times of Arrow": tuple(
        pd.Series(_DAYS).astype(kind) for kind in ("date32[pyarrow]", "timestamp[ns][pyarrow]")
    ),
    "categories of times": (
        pd.Series(_DAYS.as_unit("s")).astype("category"),
        pd.Series(_DAYS.as_unit("ns")).astype("category"),
    ),
    "Booleans of Arrow": (pd.Series(_NUMBERS > 30), pd.Series(_NUMBERS > 30).astype("bool[pyarrow]")),
    "objects": (pd.Series(_NUMBERS).astype(object), pd.Series(_NUMBERS * 1.0).astype(object)),
}


@pytest.mark.parametrize("how", ["inner", "left", "outer"])
@pytest.mark.parametrize("name", KEYS)
def test_equal_keys_of_other_dtypes_meet(name: str, how: str) -> None:
    left, right = (
        pd.DataFrame({"k": key, column: _NUMBERS}) for key, column in zip(KEYS[name], "xy", strict=True)
    )
    tables = Tables(lazily=True)
    joined = tables.table(left, 4).merge(tables.table(right, 3), on="k", how=how)
    same_rows(joined[["x", "y"]].compute(), left.merge(right, on="k", how=how)[["x", "y"]])


def test_a_join_after_keys_of_other_dtypes_relies_on_no_hash() -> None:
    left, right = (pd.DataFrame({"k": key, "x": _NUMBERS}) for key in KEYS["units of time"])
    tables = Tables(lazily=True)
    joined = tables.table(left, 4).merge(tables.table(right, 4), on="k").merge(tables.table(right, 4), on="k")
    assert len(joined) == len(left)


LABELS = [nightly(""), 0]


@pytest.mark.parametrize("how", ["inner", "outer"])
@pytest.mark.parametrize("label", LABELS)
def test_a_key_with_a_label_that_is_false_is_one(label: Any, how: str) -> None:
    left, right = LEFT.rename(columns={"k": label}), RIGHT.rename(columns={"j": label})
    tables = Tables(lazily=True)
    a, b = tables.table(left, 5), tables.table(right, 3)
    for options in ({"on": label}, {"left_on": label, "right_on": "k"}, {"left_on": "j", "right_on": label}):
        joined, expected = a.merge(b, how=how, **options), left.merge(right, how=how, **options)
        same_rows(joined[["x", "y"]].compute(), expected[["x", "y"]])


#: What is grouped by a label; the options are for Dask only.
OF_FALSE_LABELS: dict[str, Callable[..., Any]] = {
    "sums": lambda frame, label, **options: frame.groupby(label).x.sum(**options).reset_index(),
    "sums of a join": lambda frame, label, **options: (
        frame.merge(frame, on=label).groupby([label]).x_x.sum(**options).reset_index()
    ),
    "extremes": lambda frame, label, **options: (
        frame.groupby(label).agg({"x": "max"}, **options).reset_index()
    ),
    "distinct values": lambda frame, label, **options: frame[[label]].drop_duplicates(**options),
}


@pytest.mark.parametrize("groups", OF_FALSE_LABELS)
@pytest.mark.parametrize("label", LABELS)
def test_rows_are_grouped_by_a_label_that_is_false(label: Any, groups: str) -> None:
    rows, program = LEFT.rename(columns={"k": label}), OF_FALSE_LABELS[groups]
    same_rows(
        program(dd.from_pandas(rows, npartitions=5), label, split_out=3).compute(), program(rows, label)
    )


@pytest.mark.parametrize("how", ["inner", "leftsemi"])
@pytest.mark.parametrize("label", LABELS)
def test_a_key_with_a_label_that_is_false_is_the_only_one(label: Any, how: str) -> None:
    """Dask takes all columns that both sides have."""
    left, right = LEFT.rename(columns={"k": label}), RIGHT.rename(columns={"k": label})
    tables = Tables(lazily=True)
    a, b = tables.table(left, 5), tables.table(right, 3)
    expected = left.merge(right, on=label) if how == "inner" else left[left[label].isin(right[label])]
    for keys in ({"on": label}, {"left_on": label, "right_on": label}):
        same_rows(a.merge(b, how=how, **keys).compute(), expected)
        same_rows(dd.merge(a, b, how, **keys).compute(), expected)
        same_rows(a.merge(right, how=how, **keys).compute(), expected)


@pytest.mark.parametrize("how", ["inner", "outer"])
@pytest.mark.parametrize("label", LABELS)
def test_an_index_with_a_label_that_is_false_is_a_key(label: Any, how: str) -> None:
    left, right = LEFT.set_index("k").rename_axis(label), RIGHT.set_index("j").rename_axis(label)
    tables = Tables(lazily=True)
    a, b = tables.table(left, 5), tables.table(right, 3)
    ways = {"left_index": True, "right_index": True}, {"left_on": "j", "right_index": True}
    for options in (*ways, {"left_index": True, "right_on": "k"}):
        same_rows(left.merge(right, **options)[["x", "y"]], a.merge(right, **options)[["x", "y"]].compute())
        joined, expected = a.merge(b, how=how, **options), left.merge(right, how=how, **options)
        same_rows(joined[["x", "y"]].compute(), expected[["x", "y"]])
        assert joined.compute().index.name == expected.index.name


def test_an_index_of_another_unit_meets_its_keys() -> None:
    left, right = (pd.DataFrame({"k": key, "x": _NUMBERS}) for key in KEYS["units of time"])
    indexed = dd.from_pandas(right.set_index("k"), npartitions=3, sort=False).rename(columns={"x": "y"})
    joined = Tables(lazily=True).table(left).merge(indexed, left_on="k", right_index=True)
    assert len(joined) == len(left)


@pytest.mark.parametrize("method", ["mean", "var", "std"])
@pytest.mark.parametrize("keys", ["s", ["k", "s"]])
def test_groups_of_nulls_are_left_out(method: str, keys: str | list[str]) -> None:
    frame = LEFT.assign(s=np.where(LEFT.j % 5 == 0, None, "a"), k=LEFT.k.where(LEFT.k > 9))
    for options in ({}, {"dropna": False}):

        def program(rows: Any, options: Any = options) -> Any:
            return getattr(rows.groupby(keys, **options).x, method)()

        assert_like_pandas(program, frame, 5, sort=True, check_index_type=False)


OF_DISTINCT: dict[str, Callable[[Any], Any]] = {
    "a key": lambda frame: frame.groupby("k", dropna=False).x,
    "several keys": lambda frame: frame.groupby(["k", "s"], dropna=False).x,
    "a column as key": lambda frame: frame.groupby(frame.k, dropna=False).x,
    "a series by another": lambda frame: frame.x.groupby(frame.s, dropna=False),
    "a condition": lambda frame: frame.groupby(["s", frame.k > 20], dropna=False).x,
}


@pytest.mark.parametrize("split_out", [1, 3])
@pytest.mark.parametrize("name", OF_DISTINCT)
def test_values_of_nulls_are_counted(name: str, split_out: int) -> None:
    program = OF_DISTINCT[name]
    frame = LEFT.assign(s=np.where(LEFT.j % 5 == 0, None, "a"), k=LEFT.k.where(LEFT.k > 9), x=LEFT.x % 9)
    lazy = dd.from_pandas(frame, npartitions=12)
    ours = program(lazy).nunique(split_out=split_out).compute()
    pd.testing.assert_series_equal(ours.sort_index(), program(frame).nunique().sort_index())


OF_MEANS: dict[str, Callable[[Any], Any]] = {
    "a series": lambda frame: frame.huge.mean(),
    "a frame": lambda frame: frame[["huge", "small", "x", "unsigned"]].mean(),
    "integers": lambda frame: frame[["huge", "k"]].mean(),
    "nulls": lambda frame: frame.nulls.mean(),
    "groups": lambda frame: frame.groupby("k").mean(),
    "a column of groups": lambda frame: frame.groupby("k").huge.mean(),
    "groups of a series": lambda frame: frame.nulls.groupby(frame.k % 2).mean(),
    "Arrow": lambda frame: frame.astype({"unsigned": "uint64[pyarrow]"}).groupby("k").unsigned.mean(),
    "beside sums": lambda frame: frame.groupby("k").agg(
        {"huge": ["mean", "sum"], "unsigned": "mean", "nulls": "mean", "x": "mean"}
    ),
}


@pytest.mark.parametrize("name", OF_MEANS)
def test_means_of_integers_do_not_wrap_around(name: str) -> None:
    huge = INTEGERS.huge * 100
    frame = INTEGERS.assign(huge=huge, nulls=huge.astype("Int64").mask(INTEGERS.k == 0))
    assert_like_pandas(OF_MEANS[name], frame, 11, sort=True, rtol=1e-12)


#: Running values of rows that a filter leaves in some partitions only, or of which one has no values.
RUNNING: dict[str, Callable[[Any], Any]] = {
    "numbers": lambda rows: rows[["j", "z"]],
    "numbers that begin later": lambda rows: rows[["late", "j", "late"]],
    "a column": lambda rows: rows.j,
    "a column that begins later": lambda rows: rows.late,
    "nullable numbers": lambda rows: rows[["masked", "j"]],
}


@pytest.mark.parametrize("skipna", [True, False])
@pytest.mark.parametrize("kind", ["cumsum", "cumprod", "cummin", "cummax"])
@pytest.mark.parametrize("name", RUNNING)
def test_running_values_go_on_after_partitions_without_any(name: str, kind: str, skipna: bool) -> None:
    x, numbers = LEFT.x, LEFT.j / 20
    some = LEFT.assign(z=numbers.where(x % 9 > 0), late=numbers.where((x > 150) & (x % 7 > 0)))
    some = some.assign(masked=some.j.where(x != 260).astype("Int64") % 2)
    lazy = dd.from_pandas(some, npartitions=6, sort=False)

    def program(rows: Any) -> Any:
        return getattr(RUNNING[name](rows[(rows.x > 80) & ((rows.x < 210) | (rows.x > 280))]), kind)(
            skipna=skipna
        )

    ours, wanted = program(lazy).compute(), program(some)
    same: Any = pd.testing.assert_series_equal if wanted.ndim == 1 else pd.testing.assert_frame_equal
    same(ours, wanted, rtol=1e-12)


def test_running_texts_are_in_the_order_of_rows() -> None:
    words = LEFT[["k"]].astype("str").iloc[:20]
    found = dd.from_pandas(words, npartitions=4).k.cumsum().compute()
    assert found.iloc[-1] == "".join(words.k)


@pytest.mark.parametrize("method", ["nunique", "sum", "size", "first"])
def test_groups_by_words_of_a_dictionary_are_there_once(method: str) -> None:
    words = pd.ArrowDtype(pa.dictionary(pa.int32(), pa.string()))
    frame = LEFT.assign(s=LEFT.j.astype("str").astype(words))
    lazy = dd.from_pandas(frame, npartitions=6)
    ours = getattr(lazy.groupby("s").x, method)(split_out=4).compute()
    wanted = getattr(frame.groupby("s").x, method)()
    assert ours.index.dtype == words
    same_rows(*(groups.rename("n").rename(index=str).reset_index() for groups in (ours, wanted)))


@pytest.mark.parametrize("by", ["c", ["c", "k"], ["k", "c"]])
@pytest.mark.parametrize("method", ["sum", "mean", "size", "std", "agg"])
def test_groups_by_categories_are_there_once(by: Any, method: str) -> None:
    """Those without rows too, of which no partition has one that is its own."""
    words = pd.Categorical(LEFT.j.astype("str"), categories=[*map(str, range(30))])
    frame = LEFT.assign(c=words, k=LEFT.k % 3)[["k", "c", "x"]]
    given = {"arg": {"x": ["min", "count"]}} if method == "agg" else {}
    lazy = dd.from_pandas(frame, npartitions=6).groupby(by, observed=False)
    ours = getattr(lazy, method)(split_out=4, **given).compute()
    wanted = getattr(frame.groupby(by, observed=False), method)(*given.values())
    same: Any = pd.testing.assert_series_equal if wanted.ndim == 1 else pd.testing.assert_frame_equal
    same(ours.sort_index(), wanted.sort_index(), rtol=1e-12)


def test_a_condition_with_alternatives_stays_on_its_side_of_a_join() -> None:
    def program(rows: Any) -> Any:
        chosen = rows[((rows.k < 20) & (rows.j == 1)) | ((rows.k < 20) & (rows.j == 2))]
        return rows.merge(chosen, on="k", suffixes=("", "_chosen"))

    same_rows(program(dd.from_pandas(LEFT, npartitions=3)).compute(), program(LEFT))


@pytest.mark.parametrize("suffixes", [("_a", ""), ("", "_b"), ("_a", "_b")])
@pytest.mark.parametrize("how", ["left", "right", "inner", "outer"])
def test_a_condition_on_one_side_of_a_join_leaves_rows_out(
    how: str, suffixes: tuple[str, str], tmp_path: Path
) -> None:
    def program(rows: Any) -> list[Any]:
        both = rows.merge(rows[rows.x > 340], on="k", how=how, suffixes=suffixes)
        one, other = (f"j{suffix}" for suffix in suffixes)
        conditions = (both[one] > 4, both[other] > 4, (both[one] > 4) & (both[other] > 2))
        return [both[condition] for condition in conditions]

    dd.from_pandas(LEFT, npartitions=3).to_parquet(tmp_path)
    for ours, wanted in zip(program(dd.read_parquet(tmp_path)), program(LEFT), strict=True):
        same_rows(ours.compute(), wanted)


#: Conditions on keys of groups that became columns, of which most raise with Dask.
CONDITIONS: dict[str, Callable[[Any], Any]] = {
    "looked up": lambda groups: groups[groups.k.isin([1, 2])],
    "a range": lambda groups: groups[groups.k.between(1, 2)],
    "compared": lambda groups: groups[groups.k > 2],
    "compared with a mean": lambda groups: groups[groups.k > groups.k.mean()],
    "beside a sum": lambda groups: groups[(groups.k > 1) & (groups.x > 40)],
    "compared with a sum": lambda groups: groups[groups.k < groups.x],
    "computed": lambda groups: groups[groups.k + 1 > 2],
    "loc": lambda groups: groups.loc[groups.k.isin([1, 2])],
    "a sum alone": lambda groups: groups[groups.x > 40],
    "and less columns": lambda groups: groups[groups.k.isin([1, 2])][["x"]],
}
WITH_LABELS: dict[str, Callable[[Any], Any]] = {
    "series": lambda rows: rows.groupby("k").x.sum().reset_index(),
    "frames": lambda rows: rows.groupby(["k", "s"]).agg({"x": "sum"}).reset_index(),
    "an index": lambda rows: rows.set_index("k")[["x"]].reset_index(),
}


@pytest.mark.parametrize("groups", WITH_LABELS)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_rows_are_chosen_by_labels_of_groups(condition: str, groups: str) -> None:
    rows = pd.DataFrame({"k": [1, 2, 3, 4] * 5, "s": ["a", "b"] * 10, "x": range(20)})

    def program(rows: Any) -> Any:
        return CONDITIONS[condition](WITH_LABELS[groups](rows))

    same_rows(program(dd.from_pandas(rows, npartitions=3)).compute(), program(rows))


BY_COLUMNS: dict[str, Callable[[Any], Any]] = {
    "filled": lambda rows: rows.fillna({"y": 0}).y,
    "another one filled": lambda rows: rows.fillna({"y": 0}).x,
    "filled by labels of rows": lambda rows: rows.y.fillna({3: 7.0}),
    "replaced": lambda rows: rows.replace({"j": {2: 9}}).j,
    "rounded": lambda rows: rows.round({"y": 1}).y,
    "filled and used": lambda rows: rows[rows.fillna({"y": 0}).y == 0].x,
    "filled, of one column": lambda rows: rows[["y"]].fillna({"y": 0}).y,
    "filled and converted": lambda rows: rows.fillna({"y": 0, "k": 1}).assign(z=1).y.astype("int64"),
}


@pytest.mark.parametrize("name", BY_COLUMNS)
def test_what_is_said_by_columns_holds_for_one_of_them(name: str) -> None:
    frame = LEFT.assign(y=(LEFT.x / 7).where(LEFT.x % 3 > 0))
    ours = BY_COLUMNS[name](dd.from_pandas(frame, npartitions=3)).compute()
    pd.testing.assert_series_equal(ours, BY_COLUMNS[name](frame))


class TestFilesReadAsOnePartition:
    """Where one of many columns is read, Dask reads several files as one partition."""

    @pytest.fixture
    def numbers(self) -> pd.DataFrame:
        return pd.DataFrame({"u": np.arange(600), **{f"c{each}": np.arange(600.0) for each in range(6)}})

    def table(self, path: Path, frame: pd.DataFrame) -> Any:
        dd.from_pandas(frame, npartitions=6, sort=False).to_parquet(path, write_index=False)
        return dd.read_parquet(path)

    def test_joins_by_a_sorted_index_lose_no_rows(self, tmp_path: Path, numbers: pd.DataFrame) -> None:
        indexed = self.table(tmp_path, numbers).set_index("u")
        other = pd.DataFrame({"u": np.arange(0, 600, 7), "v": 1})
        lazy = dd.from_pandas(other, npartitions=3).set_index("u")
        assert len(indexed.join(lazy, how="inner").compute()) == len(other)
        assert indexed.loc[301:301].c1.compute().tolist() == [301.0]

    def test_files_out_of_order_are_sorted(self, tmp_path: Path, numbers: pd.DataFrame) -> None:
        swapped = pd.concat([numbers[100:200], numbers[:100], numbers[200:]], ignore_index=True)
        ours = self.table(tmp_path, swapped).set_index("u").c1.compute()
        assert ours.tolist() == numbers.c1.tolist()


@pytest.mark.parametrize("library", ["pandas", pytest.param("cudf", marks=pytest.mark.gpu)])
def test_sizes_that_are_split_over_partitions_have_no_name(library: str) -> None:
    words = LEFT.assign(j=LEFT.j.astype("str"), x=LEFT.x % 3)
    rows = dd.from_pandas(words, npartitions=12).to_backend(library)
    for by in (["k", "j", "x"], ["x"]):
        sizes, wanted = rows.groupby(by).size(split_out=3), words.groupby(by).size()
        found = sizes.to_backend("pandas").compute().sort_index()
        assert found.name is None
        assert found.to_list() == wanted.to_list()
        table = sizes.to_frame("n").reset_index().to_backend("pandas").compute()
        same_rows(table, wanted.to_frame("n").reset_index())
