"""Compare every operation that shuffles with ``tasks``, partition by partition."""

from __future__ import annotations

import decimal
from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.clusters import (
    Library,
    assert_same_partitions,
    by_tasks,
    canonical,
    counters,
    partitions,
    to_pandas,
)
from tests.helpers.examples import examples
from tests.helpers.nightly import nightly, only_by_day


def flights(parts: int = 6, rows: int = 200, seed: int = 0) -> list[pd.DataFrame]:
    """Make partitions with keys of several kinds, some null, and a payload that identifies each row."""
    random = np.random.default_rng(seed)
    frames = []
    for part in range(parts):
        frame = pd.DataFrame(
            {
                "id": np.arange(rows) + part * rows,
                "key": random.integers(0, 40, rows),
                "name": random.choice(["ant", "bee", "cat", "dog", ""], rows),
                "ratio": random.choice([0.5, 1.5, np.nan, -2.0, np.inf], rows),
                "when": pd.Timestamp("2013-01-01") + pd.to_timedelta(random.integers(0, 9, rows), "D"),
            }
        )
        frames.append(frame)
    return frames


def with_method(method: str, build: Callable[[], Any]) -> list[Any]:
    # Dask's own methods must not be taken over here.
    with dask.config.set({"dataframe.shuffle.method": method, "gpurt.takeover": False}):
        return partitions(build())


def assert_like_tasks(
    client: Client,
    library: Library,
    build: Callable[..., Any],
    *inputs: list[pd.DataFrame],
    in_order: bool = True,
    index: bool = True,
    runs: int = 1,
) -> None:
    """Compare shuffles of these partitions with ``tasks``; ``runs`` is the minimum number of runs."""
    # Use the same collections: quantiles depend on a sample that is seeded by their names.
    collections = [library.lazy(parts) for parts in inputs]
    before = counters(client).get("shuffle.runs", 0)
    ours = with_method("gpurt", lambda: build(*collections))
    assert counters(client)["shuffle.runs"] - before >= runs
    assert_same_partitions(ours, by_tasks(build, *collections), in_order=in_order, index=index)


def _some(df: Any, column: str) -> Any:
    return df[df[column] % 3 == 0]


SHUFFLES: dict[str, Callable[[Any], Any]] = {
    "column": lambda df: df.shuffle("key"),
    "list": lambda df: df.shuffle(["key", "name"]),
    "index": lambda df: df.shuffle(on_index=True),
    "ignore_index": lambda df: df.shuffle("key", ignore_index=True),
    "fewer": lambda df: df.shuffle("key", npartitions=3),
    "null keys": lambda df: df.shuffle("ratio"),
    "categories": lambda df: df.assign(kind=df.name.astype("category")).shuffle("kind"),
    "by a series": lambda df: df.shuffle(df.key % 7),
    "named index": lambda df: df.set_index("id", sorted=True).shuffle("key"),
    "a filter": lambda df: _some(df.shuffle("key"), "id"),
    "a label that is false": lambda df: df.rename(columns={"key": 0}).shuffle(0),
    "a column of Dask's name": lambda df: df.rename(columns={"key": "_partitions"}).shuffle("_partitions"),
}


#: Those that by day stand for the others: keys without values, another number of partitions, a name of Dask.
BY_DAY = ("column", "index", "null keys", "fewer", "a label that is false", "a column of Dask's name")


@pytest.mark.parametrize("what", only_by_day(SHUFFLES, BY_DAY))
def test_shuffle(client: Client, library: Library, what: str) -> None:
    build = SHUFFLES[what]
    if what == "ignore_index":  # Dask's own methods disagree on the index in this case
        ours = with_method("gpurt", lambda: build(library.collection(flights())))
        theirs = by_tasks(build, library.lazy(flights()))
        assert_same_partitions(ours, theirs, in_order=False, index=False)
        assert all(list(part.index) == list(range(len(part))) for part in ours)
        return
    fewer = what == "fewer"  # `tasks` repartitions first in this case, which changes the order of rows
    in_order = library.name == "pandas" and not fewer
    assert_like_tasks(client, library, build, flights(), in_order=in_order)


def test_a_row_that_describes_a_collection_is_in_no_output(client: Client) -> None:
    """Dask describes a bag as a frame by its first row."""
    df = db.from_sequence([{"key": number % 3, "row": number} for number in range(12)]).to_dataframe()
    assert len(df._meta)
    ours = with_method("gpurt", lambda: df.shuffle("key", npartitions=7))
    assert sorted(pd.concat(ours).row) == list(range(12))


def test_an_index_with_a_name_is_kept_whatever_is_said(client: Client, library: Library) -> None:
    df = library.collection(flights()).set_index("id", sorted=True)
    ours = with_method("gpurt", lambda: df.shuffle("key", ignore_index=True))
    theirs = with_method("p2p", lambda: df.shuffle("key"))
    assert_same_partitions(ours, theirs, in_order=False, index=True)


@pytest.mark.parametrize(("on", "how"), [nightly("column", "inner"), ("column", "outer"), ("index", "outer")])
def test_merge(client: Client, library: Library, on: str, how: str) -> None:
    right = [f[["key", "name", "id"]].rename(columns={"id": "other"}) for f in flights(4, 50, 2)]

    def build(left: Any, right: Any) -> Any:
        if on == "column":
            return left.merge(right, on="key", how=how)
        return left.merge(right, left_index=True, right_index=True, how=how)

    # A merge on columns numbers its rows as they come, on cudf in any order.
    index = on.startswith("index")
    assert_like_tasks(client, library, build, flights(5, seed=1), right, in_order=False, index=index, runs=2)


@pytest.mark.parametrize("how", [nightly("left"), "left, aligned"])
def test_a_merge_on_categories_that_are_not_known(client: Client, library: Library, how: str) -> None:
    """On one side few outputs have rows."""
    how, _, aligned = how.partition(", ")

    def build(left: Any, right: Any) -> Any:
        sides = [side.assign(name=side["name"].astype("category")) for side in (left, right)]
        if aligned:
            sides[0] = sides[0].shuffle("name")
        return sides[0].merge(sides[1][["name", "key"]], on="name", how=how, broadcast=False)

    few = [frame[frame.name == "ant"].iloc[:1] for frame in flights(2, seed=3)]
    assert_like_tasks(client, library, build, flights(5), few, in_order=False, index=False, runs=2)


def test_merge_leftsemi(client: Client, library: Library) -> None:
    def build(left: Any, right: Any) -> Any:
        return left.merge(right[["key"]], on="key", how="leftsemi")

    sides = flights(5), flights(4, 20, seed=3)[:4]
    assert_like_tasks(client, library, build, *sides, in_order=False, index=False)


@pytest.mark.parametrize(
    ("others", "expression"),
    [
        nightly(1, "gpurtsemimerge"),  # a single partition, joined with each
        (2, "gpurtbroadcastsemijoin"),
    ],
)
def test_a_semi_join_without_a_shuffle_looks_up_keys_first(
    client: Client, library: Library, others: int, expression: str
) -> None:
    def build(left: Any, right: Any) -> Any:
        return left.merge(right[["key"]], on="key", how="leftsemi", broadcast=others > 1 or None)

    inputs = flights(16, 20), flights(others, 200, seed=3)
    with dask.config.set({"dataframe.shuffle.method": "gpurt"}):
        joined = build(*map(library.collection, inputs))
        assert expression in str(joined.optimize(fuse=False).expr.tree_repr()).lower()
        ours = partitions(joined)
    assert_same_partitions(ours, by_tasks(build, *map(library.lazy, inputs)), in_order=False, index=False)


def test_a_broadcast_join_stays_one(client: Client, library: Library) -> None:
    def build(big: Any, small: Any) -> Any:
        return big.merge(small, on="key", broadcast=True)

    inputs = flights(16, 20), [pd.DataFrame({"key": range(i, i + 4), "label": "x"}) for i in (0, 4)]
    before = counters(client).get("shuffle.runs", 0)
    with dask.config.set({"dataframe.shuffle.method": "gpurt"}):
        joined = build(*map(library.collection, inputs))
        assert "broadcastjoin" in str(joined.optimize(fuse=False).expr.tree_repr()).lower()
        ours = partitions(joined)
    assert counters(client).get("shuffle.runs", 0) == before
    assert_same_partitions(ours, by_tasks(build, *map(library.lazy, inputs)), in_order=False, index=False)


def test_a_merge_after_a_shuffle_moves_only_the_other_side(client: Client, library: Library) -> None:
    def build(left: Any, right: Any) -> Any:
        return left.shuffle("key").merge(right, on="key")

    sides = flights(4), flights(4, seed=9)
    assert_like_tasks(client, library, build, *sides, in_order=False, index=False, runs=2)


GROUPS: dict[str, Callable[[Any], Any]] = {
    "split_out": lambda df: df.groupby("key", sort=False).agg({"ratio": "sum", "id": "count"}, split_out=3),
    "drop_duplicates": lambda df: df[["key", "name"]].drop_duplicates(split_out=3),
}


@pytest.mark.parametrize("what", GROUPS)
def test_reductions_with_split_out(client: Client, library: Library, what: str) -> None:
    # It is unspecified which of several equal rows is kept, so the index may differ.
    assert_like_tasks(client, library, GROUPS[what], flights(), in_order=False, index=what == "split_out")


def test_a_groupby_moves_its_keys_and_values_and_no_numbers_of_rows(client: Client, library: Library) -> None:
    rows = 5000
    keys = np.arange(4 * rows).reshape(4, rows)
    inputs = [pd.DataFrame({"key": key, "other": key % 7, 5: key * 2.0}) for key in keys]

    def grouped(df: Any) -> Any:
        return df[["key", 5]].groupby("key", sort=False).sum(split_out=4)

    before = offered(client)
    ours = with_method("gpurt", lambda: grouped(library.collection(inputs)))
    assert 4 * rows * 16 <= offered(client) - before < 4 * rows * 20
    assert_same_partitions(ours, by_tasks(grouped, library.lazy(inputs)), in_order=False)


def offered(client: Client) -> float:
    """Return the bytes of shards offered, over all paths."""
    return sum(n for name, n in counters(client).items() if name.startswith("exchange.bytes."))


SORTS: dict[str, Callable[[Any], Any]] = {
    "set_index": lambda df: df.set_index("key"),
    "set_index, divisions": lambda df: df.set_index("key", divisions=[0, 10, 20, 40]),
    "sort_values, descending": lambda df: df.sort_values("key", ascending=False),
    "sort_values, nulls first": lambda df: df.sort_values("ratio", na_position="first"),
}


@pytest.mark.parametrize("what", only_by_day(SORTS, ["set_index", "sort_values, nulls first"]))
def test_sorts(client: Client, library: Library, what: str) -> None:
    frames = flights(8, 300)
    assert_like_tasks(client, library, SORTS[what], frames, in_order=False)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["list", "struct", "decimal"])
def test_nested_columns_on_cudf(kind: str, client: Client, library: Library) -> None:
    if library.name != "cudf":
        pytest.skip("pandas has its own test of these")
    parts = []
    for part in range(4):
        values = {
            "list": [[part, i] for i in range(50)],
            "struct": [{"a": i, "b": i / 2} for i in range(50)],
            "decimal": [decimal.Decimal(i) / 4 for i in range(50)],
        }[kind]
        parts.append(pd.DataFrame({"value": pd.Series(values, dtype=object), "key": np.arange(50) % 5}))
    ours = with_method("gpurt", lambda: library.collection(parts).shuffle("key"))
    theirs = by_tasks(SHUFFLES["column"], library.lazy(parts))
    for mine, other in zip(ours, theirs, strict=True):
        assert canonical(mine).astype(str).equals(canonical(other).astype(str))


def test_multi_index_and_odd_labels(client: Client, library: Library) -> None:
    frames = [f.set_index(["key", "name"]) for f in flights(4)]
    assert_like_tasks(client, library, SHUFFLES["null keys"], frames, in_order=library.name == "pandas")
    if library.name == "pandas":
        odd = [f.rename(columns={"id": 0, "ratio": ("a", 1)}) for f in flights(4)]
        assert_like_tasks(client, library, SHUFFLES["column"], odd)


def test_outputs_that_are_not_wanted_are_not_moved(client: Client, library: Library) -> None:
    inputs = flights(4, 2_000)
    df = library.collection(inputs)

    def moved(build: Callable[[], Any]) -> float:
        def total() -> float:
            return sum(v for k, v in counters(client).items() if k.startswith("exchange.bytes."))

        before = total()
        partitions(build())
        return total() - before

    with dask.config.set({"dataframe.shuffle.method": "gpurt"}):
        whole = moved(lambda: df.shuffle("key", npartitions=8))
        one = moved(lambda: df.shuffle("key", npartitions=8).partitions[3])
    assert 0 < one < whole / 4
    assert_like_tasks(
        client, library, lambda df: df.shuffle("key", npartitions=8).partitions[3], inputs, in_order=False
    )
    assert_like_tasks(
        client, library, lambda df: df.merge(df, on="id").partitions[2], inputs, in_order=False, index=False
    )


def test_an_argument_is_taken_over_only_where_all_are(client: Client) -> None:
    named = dd.from_pandas(flights(1)[0], npartitions=4).shuffle("key", shuffle_method="tasks", npartitions=6)
    names = ("shuffle.runs", "shuffle.left.only-configured", "shuffle.taken.argument-tasks")

    def counted() -> list[float]:
        return [counters(client).get(name, 0) for name in names]

    runs, left, taken = counted()
    partitions(named)
    assert counted() == [runs, left + 1, taken]
    with dask.config.set({"gpurt.takeover": "all"}):
        partitions(named)
    assert counted() == [runs + 1, left + 1, taken + 1]


@pytest.mark.filterwarnings("ignore:Computing mixed collections")
def test_frames_are_computed_beside_what_is_no_frame(client: Client, library: Library) -> None:
    """Dask merges such graphs, and treats every task without dependents as a result."""
    frame = library.frame(pd.DataFrame({"key": range(40, 0, -1), "value": range(40)}))
    df = dd.from_pandas(frame, npartitions=4, sort=False)
    frames = [
        df.shuffle("key"),
        df.shuffle(on_index=True),
        df.set_index("key", divisions=[1, 20, 40]),
        df.sort_values("key"),
        df.sort_values("value", ascending=False),
    ]
    with dask.config.set({"dataframe.shuffle.method": "gpurt"}):
        *found, number, ones = dask.compute(*frames, dask.delayed(sum)([1, 2]), da.ones(4, chunks=2))
        expected = dask.compute(*frames)
    for mine, other in zip(found, expected, strict=True):
        pd.testing.assert_frame_equal(to_pandas(mine), to_pandas(other))
    assert (number, ones.tolist()) == (3, [1, 1, 1, 1])


columns = st.sampled_from(["int", "float", "str", "category", "nullable"])


@st.composite
def collections(draw: st.DrawFn) -> tuple[list[pd.DataFrame], list[str], int]:
    """Draw random partitions, the columns to shuffle by, and a number of outputs."""
    names = draw(st.lists(columns, min_size=1, max_size=3, unique=True))
    numbers = np.random.default_rng(draw(st.integers(0, 2**16)))
    parts = []
    for rows in draw(st.lists(st.integers(0, 30), min_size=2, max_size=5)):
        ints = numbers.integers(-3, 9, rows)
        values = {
            "int": ints,
            "float": np.where(ints < 0, np.nan, ints / 2),
            "str": pd.array([str(i) * (i % 3) for i in ints], dtype="str"),
            "category": pd.Categorical([f"k{i}" for i in ints], categories=[f"k{i}" for i in range(-3, 9)]),
            "nullable": pd.array([None if i < 0 else i for i in ints], dtype="Int64"),
        }
        parts.append(pd.DataFrame({**{name: values[name] for name in names}, "row": np.arange(rows)}))
    by = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    return parts, by, draw(st.integers(1, 12))


@given(collections())
@examples(4)
def test_random_frames(
    client: Client, library: Library, drawn: tuple[list[pd.DataFrame], list[str], int]
) -> None:
    parts, by, outputs = drawn
    if library.name == "cudf" and "nullable" in parts[0].columns:
        parts = [part.drop(columns="nullable") for part in parts]
        by = [name for name in by if name != "nullable"] or ["row"]

    def build(df: Any) -> Any:
        return df.shuffle(by, npartitions=outputs)

    ours = with_method("gpurt", lambda: build(library.collection(parts)))
    assert_same_partitions(ours, by_tasks(build, library.lazy(parts)), in_order=False)
