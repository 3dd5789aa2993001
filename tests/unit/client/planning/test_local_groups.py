"""Group and deduplicate rows where they are read, with the result that Dask has without that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dask._expr import optimize_until
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.client.planning.reads import lower
from dask_gpurt.client.planning.rules import Facts, PartitionSizes
from dask_gpurt.client.planning.rules.local_groups import LocalGroups, are_apart
from dask_gpurt.client.planning.table_facts import TableFacts
from tests.helpers.clusters import Library, canonical, to_pandas
from tests.helpers.examples import examples
from tests.helpers.nightly import nightly
from tests.helpers.planned import Planner, by_size, value_of

pytestmark = pytest.mark.usefixtures("by_tasks")


# ---- the rule ---------------------------------------------------------------------------------------

ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda each: (each[0], sum(each))))


@given(ranges=ranges)
def test_ranges_are_apart_if_no_number_is_in_two(ranges: list[tuple[int, int]]) -> None:
    numbers = [number for first, last in ranges for number in range(first, last + 1)]
    assert are_apart(ranges) == (len(set(numbers)) == len(numbers))


def test_no_more_footers_are_read_than_tell_that_a_key_is_in_two_files() -> None:
    def read() -> Iterator[tuple[int, int] | None]:
        yield (1, 5)
        yield (9, 12)
        yield (3, 3)
        raise AssertionError("the fourth footer is read")

    assert not are_apart(read())
    assert not are_apart([(1, 5), None])


# ---- files ------------------------------------------------------------------------------------------


def write(folder: Path, parts: Sequence[Any], **options: Any) -> Path:
    """Write each part, a table or a list of keys, to a file of its own."""
    folder.mkdir(parents=True)
    for at, part in enumerate(parts):
        table = part if isinstance(part, pa.Table) else pa.table({"key": part, "value": part})
        pq.write_table(table, folder / f"part.{at}.parquet", **options)
    return folder


def ranges_in(folder: Path | str, column: str = "key", **options: Any) -> Any:
    expr = dd.read_parquet(folder, **options).expr
    while expr.dependencies():
        (expr,) = expr.dependencies()
    return list(TableFacts().ranges(expr, column))


def keys(values: Sequence[int | None], dtype: Any = None) -> Any:
    return pa.array(values, dtype or pa.int64())


@pytest.mark.parametrize("filesystem", ["fsspec", "arrow"])
def test_footers_tell_the_range_of_a_file(tmp_path: Path, filesystem: str) -> None:
    parts = [keys([3, -4, 3]), keys([10, 11, 12]), keys([2**62])]
    folder = write(tmp_path / "table", parts, row_group_size=2)
    found = ranges_in(folder, filesystem=filesystem)
    assert sorted(found) == [(-4, 3), (10, 12), (2**62, 2**62)]


UNKNOWN: dict[str, Callable[[Path], Any]] = {
    "unsigned numbers": lambda folder: ranges_in(
        write(folder, [keys([1], pa.uint64()), keys([2**63], pa.uint64())])
    ),
    "another type in a file": lambda folder: ranges_in(write(folder, [keys([1]), pa.array([5.0])])),
    "files that are divided": lambda folder: ranges_in(
        write(folder, [keys([1, 2, 2]), keys([5])], row_group_size=2), split_row_groups=True
    ),
    "files that are put together": lambda folder: ranges_in(
        write(folder, [keys([1]), keys([5])]), aggregate_files=True, split_row_groups=100
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_no_range_is_known(tmp_path: Path, name: str) -> None:
    assert UNKNOWN[name](tmp_path / "table")[-1] is None


@pytest.mark.parametrize("filesystem", ["fsspec", "arrow"])
def test_files_of_different_dtypes_are_left_to_dask(tmp_path: Path, filesystem: str) -> None:
    """Integers with nulls are floats: here 2**53 + 1 beside them would be equal to 2**53."""
    values = [keys([5, 6]), keys([None, 8]), keys([2**53 + 1, 3])]
    parts = [pa.table({"key": keys([10 * at, 10 * at + 1]), "value": each}) for at, each in enumerate(values)]
    rows = dd.read_parquet(write(tmp_path / "rows", parts), filesystem=filesystem)
    small = dd.read_parquet(write(tmp_path / "small", [keys(range(30))]))[["key"]]
    groups = rows.groupby("key").agg({"value": "max"}).reset_index()
    _, counted = planned(small.merge(groups[groups.value == 2**53], on="key"))
    assert counted == {}


# ---- plans ------------------------------------------------------------------------------------------


def sorted_by_key(rows: int = 600) -> pd.DataFrame:
    number = np.arange(rows)
    return pd.DataFrame(
        {
            "key": number // 3,
            "more": number % 4,
            "value": number * 0.1,
            "name": [f"n{i % 5}" for i in number],
            "other": number % 7,
        }
    )


def save(folder: Path) -> None:
    """Write a table of which no two files have a key in common, one of which they do, and a small one."""
    large = sorted_by_key()
    bounds = [0, 99, 240, 242 // 3 * 3, 510, len(large)]  # files begin with a new key
    parts = [pa.Table.from_pandas(large[a:b], preserve_index=False) for a, b in pairwise(bounds)]
    write(folder / "sorted", parts)
    write(folder / "mixed", [pa.Table.from_pandas(large[at::3], preserve_index=False) for at in range(3)])
    small = pd.DataFrame({"key": np.arange(0, 300, 2), "label": np.arange(150) % 6})
    write(folder / "small", [pa.Table.from_pandas(small, preserve_index=False)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    save(folder)
    return folder


def planned(result: Any, sizes: PartitionSizes | None = None) -> tuple[Any, dict[str, int]]:
    """Return the lowered plan of a computation, and what is done locally."""
    tuned = optimize_until(result.expr.finalize_compute(), "tuned-logical")
    facts = Facts(sizes or PartitionSizes(1, 2, 0, 0))
    plan = LocalGroups().apply(by_size(tuned, Facts(facts.sizes)) if sizes else tuned, facts)
    counters = facts.metrics.snapshot()["counters"]
    counted = {name.removeprefix("planning.local."): int(number) for name, number in counters.items()}
    return lower(plan, "simplified-physical"), counted


def assert_same_rows(result: Any, plan: Any) -> None:
    expected, found = to_pandas(result.compute()), to_pandas(value_of(plan))
    pd.testing.assert_frame_equal(canonical(found, index=False), canonical(expected, index=False))


def pairs(rows: Any) -> Any:
    """Return the number of distinct values of each key."""
    counts = rows[["key", "more"]].drop_duplicates().groupby("key").agg({"more": "count"}).reset_index()
    return counts.rename(columns={"more": "numbers"})


def with_several(counts: Any) -> Any:
    return counts[counts.numbers > 1]


def filtered(rows: Any) -> Any:
    return rows[rows.other > 2]


Program = Callable[[Any, Any], Any]
#: Programs on the sorted table and on the small one, and what is done locally in each.
LOCAL: dict[str, tuple[Program, dict[str, int]]] = {
    "distinct pairs of a key": (
        lambda rows, small: small.merge(with_several(pairs(rows)), on="key"),
        {"duplicates": 1, "groups": 1},
    ),
    "a semi join with groups": (
        lambda rows, small: small.merge(
            rows.groupby("key").agg({"value": "sum"}).reset_index(), on="key", how="leftsemi"
        ),
        {"groups": 1},
    ),
    "groups of filtered, renamed and new columns": (
        lambda rows, small: small.merge(
            filtered(rows.assign(twice=rows.value * 2))
            .rename(columns={"key": "number"})
            .groupby("number")
            .agg({"twice": "sum", "name": "count"})
            .reset_index(),
            left_on="key",
            right_on="number",
        ),
        {"groups": 1},
    ),
    "two sums of groups": (
        lambda rows, small: (
            small.merge(rows.groupby("key").value.mean().reset_index(), on="key")
            .merge(rows.groupby(["key", "name"]).size().rename("size").reset_index(), on="key")
            .groupby("label")
            .agg({"value": "sum", "size": "sum"})
        ),
        {"groups": 2},
    ),
    "groups that are joined, and others that are the result": (
        lambda rows, small: (
            rows.merge(rows.groupby("key").agg({"other": "max"}).reset_index(), on=["key", "other"])
            .groupby("key")
            .agg({"value": "min"})
        ),
        {"groups": 1},
    ),
}
#: Programs that are left to Dask.
LEFT: dict[str, Program] = {
    "distinct rows in groups by another column": lambda rows, small: (
        rows[["key", "more"]].drop_duplicates(keep="last").groupby("more").key.sum()
    ),
    "groups that are the result": lambda rows, small: rows.groupby("key").value.sum(),
    "the sum of groups": lambda rows, small: rows.groupby("key").value.sum().sum(),
    "sorted groups": lambda rows, small: small.merge(
        rows.groupby("key", sort=True).value.sum().reset_index(), on="key"
    ),
    "another key": lambda rows, small: small.merge(
        rows.groupby("other").value.sum().reset_index(), left_on="key", right_on="other"
    ),
    "a key that is assigned anew": lambda rows, small: small.merge(
        rows.assign(key=rows.key % 5).groupby("key").value.sum().reset_index(), on="key"
    ),
    "a key that another column has the name of": lambda rows, small: small.merge(
        rows.rename(columns={"key": "other", "other": "key"}).groupby("key").value.sum().reset_index(),
        on="key",
    ),
    "a key that is computed": lambda rows, small: small.merge(
        rows.groupby(rows.key // 7).value.sum().reset_index(), on="key"
    ),
    "the first of groups": lambda rows, small: small.merge(
        rows.groupby("key").value.first().reset_index(), on="key"
    ),
    "a function of the user": lambda rows, small: small.merge(
        rows.map_partitions(lambda part: part.assign(key=1)).groupby("key").value.sum().reset_index(),
        on="key",
    ),
}


@pytest.mark.parametrize("filesystem", ["fsspec", nightly("arrow")])
@pytest.mark.parametrize("name", LOCAL)
def test_rows_are_grouped_where_they_are_read(folder: Path, name: str, filesystem: str) -> None:
    build, expected = LOCAL[name]
    result = build(*(dd.read_parquet(folder / each, filesystem=filesystem) for each in ("sorted", "small")))
    plan, counted = planned(result)
    assert counted == expected
    assert_same_rows(result, plan)
    kinds = [type(each).__name__ for each in plan.walk()]
    assert "DropDuplicates" not in " ".join(kinds)


@pytest.mark.parametrize("name", LOCAL)
def test_files_with_a_key_in_common_are_left_to_dask(folder: Path, name: str) -> None:
    build, _ = LOCAL[name]
    result = build(*(dd.read_parquet(folder / each) for each in ("mixed", "small")))
    plan, counted = planned(result)
    assert counted == {}
    assert plan._name == optimize_until(result.expr.finalize_compute(), "simplified-physical")._name


@pytest.mark.parametrize("name", LEFT)
def test_programs_are_left_to_dask(folder: Path, name: str) -> None:
    result = LEFT[name](*(dd.read_parquet(folder / each) for each in ("sorted", "small")))
    plan, counted = planned(result)
    assert counted == {}
    assert plan._name == optimize_until(result.expr.finalize_compute(), "simplified-physical")._name


def test_files_that_are_read_together_are_grouped_together(folder: Path) -> None:
    build, expected = LOCAL["distinct pairs of a key"]
    result = build(*(dd.read_parquet(folder / each) for each in ("sorted", "small")))
    plan, counted = planned(result, PartitionSizes(workers=1, threads=2, partition=1 << 30, broadcast=0))
    assert counted == expected
    assert_same_rows(result, plan)


def test_a_table_that_has_gone_is_left_to_dask(tmp_path: Path) -> None:
    save(tmp_path)
    result = LOCAL["a semi join with groups"][0](
        *(dd.read_parquet(tmp_path / each) for each in ("sorted", "small"))
    )
    tuned = optimize_until(result.expr.finalize_compute(), "tuned-logical")
    for file in (tmp_path / "sorted").iterdir():
        file.unlink()
    assert LocalGroups().apply(tuned, Facts(PartitionSizes(1, 2, 0, 0))) is tuned


@pytest.mark.parametrize("sizes", [PartitionSizes(1, 2, 0, 0), None])
def test_a_client_groups_locally_unless_it_leaves_that_to_dask(
    folder: Path, sizes: PartitionSizes | None
) -> None:
    planner = Planner()
    planner.sizes = sizes
    rows, small = (dd.read_parquet(folder / each) for each in ("sorted", "small"))
    expr = LOCAL["distinct pairs of a key"][0](rows, small).expr.finalize_compute()
    with dask.config.set(scheduler=None), planner.used():
        planner.cache.optimise(optimize_until, expr, "simplified-physical")
    counts = planner.count("local.duplicates"), planner.count("local.groups")
    assert counts == ((1, 1) if sizes else (0, 0))


# ---- random programs --------------------------------------------------------------------------------

COLUMNS = ("key", "more", "value", "other")
steps = st.lists(
    st.one_of(
        st.tuples(st.just("filter"), st.sampled_from(COLUMNS), st.integers(0, 100)),
        st.tuples(st.just("assign"), st.sampled_from(COLUMNS), st.sampled_from(COLUMNS)),
        st.tuples(st.just("swap"), st.sampled_from(COLUMNS), st.sampled_from(COLUMNS)),
        st.tuples(st.just("distinct"), st.sampled_from(COLUMNS), st.sampled_from(COLUMNS)),
    ),
    max_size=4,
)
functions = st.sampled_from(["sum", "count", "max", "min", "nunique", "size", "mean"])
ways = st.fixed_dictionaries(
    {
        "before": steps,
        "by": st.lists(st.sampled_from(COLUMNS), min_size=1, max_size=2, unique=True),
        "function": functions,
        "after": steps,
        "how": st.sampled_from(["inner", "left", "right", "leftsemi"]),
        "left": st.booleans(),
        "total": st.booleans(),
    }
)


def apply(frame: Any, steps: list[tuple[str, str, Any]]) -> Any:
    for kind, column, chosen in steps:
        if column not in frame.columns or (kind != "filter" and chosen not in frame.columns):
            continue
        if kind == "filter":
            frame = frame[frame[column] > chosen % 7]
        elif kind == "assign":
            frame = frame.assign(**{column: frame[chosen] * 2})
        elif kind == "swap":
            frame = frame.rename(columns={column: chosen, chosen: column})
        else:
            frame = frame[sorted({column, chosen, "key"} & set(frame.columns))].drop_duplicates()
    return frame


def program(rows: Any, small: Any, way: dict[str, Any]) -> Any:
    rows = apply(rows[[*COLUMNS]], way["before"])
    by = [column for column in way["by"] if column in rows.columns] or ["key"]
    values = [column for column in rows.columns if column not in by] or by
    grouped = rows.groupby(by)[values[0]]
    groups = getattr(grouped, way["function"])().rename("result").reset_index()
    groups = apply(groups, way["after"])
    on = by[0] if by[0] in groups.columns else groups.columns[0]
    sides = (
        ((groups, on), (small, "key"))
        if way["left"] and way["how"] != "leftsemi"
        else (
            (small, "key"),
            (groups, on),
        )
    )
    (left, left_on), (right, right_on) = sides
    joined = left.merge(right, left_on=left_on, right_on=right_on, how=way["how"], suffixes=("_l", "_r"))
    return joined.groupby("label").size() if way["total"] else joined


@pytest.fixture(scope="module")
def readers(library: Library, folder: Path) -> tuple[Any, Any]:
    with dask.config.set({"dataframe.backend": library.name}):
        return dd.read_parquet(folder / "sorted"), dd.read_parquet(folder / "small")


@examples(4)
@given(way=ways)
def test_programs_have_the_same_rows(readers: tuple[Any, Any], way: dict[str, Any]) -> None:
    try:
        result = program(*readers, way)
        expected = to_pandas(result.compute())
    except Exception:  # a program that is not valid, or that Dask cannot compute
        return
    plan, _ = planned(result)
    found = to_pandas(value_of(plan))
    if isinstance(expected, pd.Series):
        pd.testing.assert_series_equal(found.sort_index(), expected.sort_index())
    else:
        pd.testing.assert_frame_equal(canonical(found, index=False), canonical(expected, index=False))
