"""Compare partitions with those of ``tasks``, for unusual frames: their partitions differ from the meta.

Dask's own p2p differs in most of these. Later joins rely on where rows are: a row in another partition is
lost in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.dataframe.utils import UNKNOWN_CATEGORIES, clear_known_categories
from distributed import Client
from pandas.testing import assert_frame_equal, assert_series_equal

import dask_gpurt
from tests.helpers.clusters import cluster
from tests.helpers.nightly import nightly, only_by_day

PARTITIONS = 4
CATEGORIES = [[1, 2], [2, 3], [3, 1, 8], [2]]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with cluster("pandas", here=True) as client:
        yield client
        assert dask_gpurt.report(client)["counters"]["shuffle.runs"] > 0


def partitions(collection: Any) -> list[Any]:
    return list(dask.compute(*(collection.partitions[i] for i in range(collection.npartitions))))


def assert_like_tasks(build: Callable[[], Any]) -> None:
    with dask.config.set({"dataframe.shuffle.method": "tasks", "scheduler": "sync"}):
        expected = partitions(build())
    found = partitions(build().persist())
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        if isinstance(other, pd.Series):
            assert_series_equal(mine, other)
        else:
            assert_frame_equal(mine, other)


# ---- keys that differ from the meta ---------------------------------------------------


def keys(part: int, kind: str) -> pd.DataFrame:
    """Return rows whose key is of another dtype than the meta in some partitions, as from JSON or SQL."""
    if kind == "unknown categories":
        key = pd.Series(pd.Categorical(CATEGORIES[part] * 2, categories=CATEGORIES[part]))
    elif kind == "objects":
        key = pd.Series([1, 2, 3, 4], dtype=object if part == 1 else "int64")
    else:
        key = pd.Series([None] * 4, dtype=object) if part == 1 else pd.Series([1.0, 2.0, np.nan, 4.0])
    return pd.DataFrame({"key": key, "value": range(len(key))})


METAS: dict[str, pd.Series] = {
    "unknown categories": pd.Series(pd.Categorical([], categories=[UNKNOWN_CATEGORIES])),
    "objects": pd.Series([], dtype="int64"),
    "missing": pd.Series([], dtype="float64"),
}


@pytest.mark.parametrize("joins", [nightly(1), 2])
@pytest.mark.parametrize("kind", METAS)
def test_joins_on_keys_that_differ_from_the_meta(client: Client, kind: str, joins: int) -> None:
    meta = pd.DataFrame({"key": METAS[kind], "value": pd.Series([], dtype="int64")})

    def build() -> Any:
        frame = joined = dd.from_map(keys, range(PARTITIONS), kind=kind, meta=meta)
        for number in range(joins):
            joined = joined.merge(frame.rename(columns={"value": f"value-{number}"}), on="key")
        return joined.map_partitions(len, meta=pd.Series([], dtype="int64"))

    assert_lengths_like_tasks(build)


def assert_lengths_like_tasks(build: Callable[[], Any]) -> None:
    with dask.config.set({"dataframe.shuffle.method": "tasks", "scheduler": "sync"}):
        expected = build().compute().tolist()
    assert build().compute().tolist() == expected
    assert sum(expected)


def named(part: int) -> pd.DataFrame:
    index = pd.Index(np.arange(12) % 4 + part, name="number")
    return pd.DataFrame({"key": np.arange(12) % 5, "value": np.arange(12)}, index=index)


@pytest.mark.parametrize("on", [["number", "key"], nightly(["key", "number"]), "number"], ids=str)
def test_joins_on_the_name_of_the_index_and_a_column(client: Client, on: Any) -> None:
    def build() -> Any:
        frame = dd.from_map(named, range(PARTITIONS), meta=named(0).iloc[:0])
        joined = frame.merge(frame, on=on, suffixes=("", "_1")).merge(frame, on=on, suffixes=("", "_2"))
        return joined.map_partitions(len, meta=pd.Series([], dtype="int64"))

    assert_lengths_like_tasks(build)


def test_a_frame_is_joined_with_itself_on_two_columns(client: Client) -> None:
    """Both sides are one expression, whose keys differ."""

    def build() -> Any:
        frame = dd.from_map(named, range(PARTITIONS), meta=named(0).iloc[:0]).reset_index()
        frame = frame.assign(key=frame.key.astype(object))
        joined = frame.merge(frame, left_on="number", right_on="value", suffixes=("", "_1"))
        return joined.map_partitions(len, meta=pd.Series([], dtype="int64"))

    assert_lengths_like_tasks(build)


# ---- outputs without rows -------------------------------------------------------------


def categorical(part: int) -> pd.DataFrame:
    kind = pd.Categorical(["a", "b"] * 3, categories=["b", "a"])
    return pd.DataFrame({"kind": kind, "value": range(6)})


def unknown() -> Any:
    return dd.from_map(categorical, range(PARTITIONS), meta=clear_known_categories(categorical(0).iloc[:0]))


def test_outputs_without_rows_have_the_categories_of_files(client: Client, tmp_path: Path) -> None:
    """Arrow's meta of a dictionary has no categories, which count as known."""
    dd.from_pandas(categorical(0).assign(same=1), npartitions=2).to_parquet(tmp_path / "table")
    read = dd.read_parquet(tmp_path / "table", filesystem="arrow")
    assert not len(read._meta.kind.cat.categories)
    for part in partitions(read.shuffle("same", npartitions=2).persist()):
        assert list(part.kind.cat.categories) == ["b", "a"]
    joined = read.merge(dd.from_map(categorical, [0]).assign(same=1), on="same", how="outer", broadcast=False)
    assert len(joined.compute()) == 36


def test_unknown_categories_of_outputs_without_rows_reach_no_result(client: Client) -> None:
    shuffled = unknown().shuffle("kind", npartitions=PARTITIONS)
    assert list(shuffled.kind.cat.as_known().compute().cat.categories) == ["b", "a"]
    assert shuffled.groupby("kind", observed=False).value.sum().compute().to_dict() == {"b": 36, "a": 24}
    assert set(shuffled.categorize().kind.cat.categories) == {"a", "b"}


# ---- sorts ------------------------------------------------------------------------------


def numbers(part: int) -> pd.DataFrame:
    draw = np.random.default_rng(part)
    number = draw.permutation(np.arange(part * 50, (part + 1) * 50)) * 7 % 211
    return pd.DataFrame({"number": number, "kind": draw.integers(0, 4, 50)}, index=np.arange(50) + part * 50)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sort_function": lambda rows, **_: rows},
        {"sort_function": lambda rows, **_: rows.drop_duplicates("kind")},
        {"sort_function_kwargs": {"key": lambda number: number % 5}},
    ],
    ids=["columns", "identity", "first of each", "a key"],
)
def test_a_function_that_sorts_gets_rows_in_their_order(client: Client, options: dict[str, Any]) -> None:
    assert_like_tasks(
        lambda: dd.from_map(numbers, range(PARTITIONS), meta=numbers(0).iloc[:0]).sort_values(
            "number", **options
        )
    )


# ---- labels -----------------------------------------------------------------------------


def labelled(part: int, labels: Any) -> pd.DataFrame:
    frame = pd.DataFrame({0: (np.arange(9) * 5 + part) % 11, 1: np.arange(9), 2: 1.0})
    frame.columns = labels
    return frame


@pytest.mark.parametrize("label", [None, np.nan])
def test_a_column_has_no_name(client: Client, label: Any) -> None:
    labels = ["key", label, "value"]
    frame = dd.from_map(labelled, range(PARTITIONS), labels=labels, meta=labelled(0, labels).iloc[:0])
    other = frame.rename(columns={"value": "other"})[["key", "other"]]
    assert len(frame.shuffle("key").compute()) == 9 * PARTITIONS
    expected = frame.compute().merge(other.compute(), on="key")
    assert len(frame.merge(other, on="key").compute()) == len(expected)


# ---- collections that are optimised, or measured ----------------------------------------


QUERIES: dict[str, Callable[[Any], Any]] = {
    "length": len,
    "maximum": lambda frame: frame.value.max().compute(),
    "count": lambda frame: frame.count().compute().to_dict(),
    "filter": lambda frame: sorted(frame[frame.value > 5].value.compute()),
    "column": lambda frame: sorted(frame.value.compute()),
    "largest": lambda frame: sorted(frame.nlargest(3, "value").compute().value),
    "index": lambda frame: sorted(frame.index.compute()),
    "distinct": lambda frame: len(frame.drop_duplicates().compute()),
}


@pytest.mark.parametrize("query", only_by_day(QUERIES, ["length", "filter", "distinct"]))
@pytest.mark.parametrize("fuse", [True, nightly(False)])
def test_an_optimised_shuffle_is_queried(client: Client, fuse: bool, query: str) -> None:
    frame = dd.from_map(named, range(PARTITIONS), meta=named(0).iloc[:0])
    expected = QUERIES[query](dd.from_pandas(frame.compute(), npartitions=1))
    assert QUERIES[query](frame.shuffle("key").optimize(fuse=fuse)) == expected


@pytest.mark.parametrize("kind", ["shuffle", "join"])
def test_partitions_are_measured_while_the_plan_is_made(client: Client, kind: str) -> None:
    frame = dd.from_map(named, range(PARTITIONS), meta=named(0).iloc[:0])
    rows = pd.concat(map(named, range(PARTITIONS)))
    if kind == "shuffle":
        made, expected = frame.shuffle("key"), rows
    else:
        made, expected = frame.merge(frame, on="key"), rows.merge(rows, on="key")
    assert len(made.repartition(partition_size="1kB").compute()) == len(expected)


@pytest.mark.parametrize("kind", ["shuffle", "join", "groupby"])
def test_a_bag_is_made_of_a_result(client: Client, kind: str) -> None:
    def build() -> Any:
        frame = dd.from_map(named, range(PARTITIONS), meta=named(0).iloc[:0])
        made = {
            "shuffle": lambda: frame.shuffle("key"),
            "join": lambda: frame.merge(frame, on="key"),
            "groupby": lambda: frame.groupby("key").value.sum(split_out=2),
        }
        return made[kind]().to_bag()

    with dask.config.set({"dataframe.shuffle.method": "tasks", "scheduler": "sync"}):
        expected = sorted(build().compute())
    assert sorted(build().compute()) == expected
