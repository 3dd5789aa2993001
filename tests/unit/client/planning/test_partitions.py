"""Check into how many partitions tables are read, that no result depends on it, and plans from the cache."""

from __future__ import annotations

import gc
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dask._expr import FinalizeCompute, optimize_until
from dask.base import collections_to_expr
from dask.core import flatten
from dask.dataframe.dask_expr import _shuffle
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.client.lowering import Lowering, lower_with
from dask_gpurt.client.planning.footers import Column, Footer
from dask_gpurt.client.planning.reads import FewerPartitions, lower
from dask_gpurt.client.planning.rules import Facts, PartitionSizes
from dask_gpurt.client.planning.rules.partition_size import (
    MOST_FILES,
    PartitionSize,
    TableRead,
    bytes_in_memory,
    choose_partitions,
    choose_small,
)
from dask_gpurt.dask_hooks import PatchSet
from tests.helpers.clusters import Library, canonical, to_pandas
from tests.helpers.examples import examples
from tests.helpers.nightly import nightly
from tests.helpers.planned import Planner, Step, by_size, computed, programs, run, value_of, written
from tests.helpers.planned import planned as plan_of

#: Sizes for which each table that may be a single partition becomes one.
WHOLE = PartitionSizes(workers=1, threads=1, partition=1 << 50, broadcast=1 << 50)
MIB = 1 << 20

reads = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(
        TableRead,
        bytes=st.integers(0, 1 << 40),
        files=st.integers(1, 10_000),
        partitions=st.integers(1, 100),
        partition=st.sampled_from([0, MIB, 1 << 32]),
        small=st.sampled_from([0, MIB, 1 << 32]),
    ),
)


# ---- the decision -----------------------------------------------------------------------------------


def leave(read: str, reason: str) -> None:
    """Forget why a read is left."""


def choose(tables: dict[str, TableRead], *, workers: int, threads: int) -> dict[str, int]:
    """Return the number of partitions of each read that changes."""
    small = choose_small(tables, leave, workers=workers)
    rest = {name: read for name, read in tables.items() if name not in small}
    return small | choose_partitions(rest, leave, threads=threads)


@given(reads=reads, workers=st.integers(1, 300), threads=st.integers(1, 8))
def test_no_table_has_more_partitions_than_dask_makes(
    reads: dict[str, TableRead], workers: int, threads: int
) -> None:
    chosen = choose(reads, workers=workers, threads=threads * workers)
    assert all(1 <= number < reads[name].partitions for name, number in chosen.items())


@given(reads=reads, workers=st.integers(1, 300), threads=st.integers(1, 8))
def test_threads_share_the_partitions_of_a_table_evenly(
    reads: dict[str, TableRead], workers: int, threads: int
) -> None:
    threads *= workers
    for name, number in choose(reads, workers=workers, threads=threads).items():
        is_small = reads[name].bytes <= reads[name].small
        assert number % threads == 0 or (number == 1 and is_small)
        if number not in (1, threads):  # no more than the size and the files of the table need
            needed = max(reads[name].bytes / reads[name].partition, reads[name].files / MOST_FILES)
            assert needed > number - threads


@given(reads=reads, workers=st.integers(1, 300))
def test_no_task_opens_more_files_than_dask_would_let_it(reads: dict[str, TableRead], workers: int) -> None:
    for name, number in choose(reads, workers=workers, threads=workers).items():
        assert reads[name].files <= number * MOST_FILES


@given(reads=reads, workers=st.integers(1, 300))
def test_copies_of_a_small_table_are_no_more_than_a_worker_sends_in_a_shuffle(
    reads: dict[str, TableRead], workers: int
) -> None:
    largest = max((read.bytes for read in reads.values()), default=0)
    for name, number in choose(reads, workers=workers, threads=2 * workers).items():
        if number == 1:
            assert reads[name].bytes * workers <= largest / workers


def test_a_table_is_as_many_partitions_as_its_size_needs() -> None:
    tables = {
        "lines": TableRead(19 << 30, 64, 8, 4 << 30, 1 << 30),
        "orders": TableRead(3 << 30, 64, 8, 4 << 30, 1 << 30),
        "suppliers": TableRead(20 << 20, 64, 8, 4 << 30, 1 << 30),
        "nations": TableRead(100, 1, 1, 4 << 30, 1 << 30),
    }
    assert choose(tables, workers=2, threads=2) == {"lines": 6, "orders": 2, "suppliers": 1}
    # More workers: each sends less in a shuffle, and every thread reads something.
    assert choose(tables, workers=4, threads=4) == {"orders": 4, "suppliers": 1}
    assert choose(tables, workers=40, threads=40) == {}


def test_what_is_left_to_dask_by_default() -> None:
    assert PartitionSizes(2, 2).of(0) == (0, 16 * MIB)  # pandas: all but small tables
    assert PartitionSizes(2, 2).of(4 << 30) == (4 << 30, 1 << 30)  # cudf
    assert PartitionSizes(2, 2, largest=512 * MIB).of(4 << 30) == (512 * MIB, 128 * MIB)
    assert PartitionSizes(2, 2, partition=7, broadcast=3, largest=5).of(4 << 30) == (7, 3)
    assert PartitionSizes(2, 2, partition=0, broadcast=0).of(4 << 30) == (0, 0)


def test_strings_count_as_they_are_written_or_as_their_offsets() -> None:
    assert bytes_in_memory([Column(100, 900, has_fixed_width=True)]) == 800
    assert bytes_in_memory([Column(100, 5_000, has_fixed_width=False)]) == 5_000
    assert bytes_in_memory([Column(100, 60, has_fixed_width=False)]) == 1_600  # a dictionary's numbers


# ---- plans ------------------------------------------------------------------------------------------


pytestmark = pytest.mark.usefixtures("by_tasks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a large table of four files, and a small one of three."""
    folder = tmp_path_factory.mktemp("partitions")
    number = np.arange(4_000)
    names = [f"n{i % 9}" for i in number]
    large = pd.DataFrame({"key": number % 50, "value": number / 7, "name": names, "number": number})
    small = pd.DataFrame({"key": np.arange(60), "label": [f"l{i % 4}" for i in range(60)], "more": 1.5})
    dd.from_pandas(large, npartitions=4, sort=False).to_parquet(folder / "large", write_index=False)
    dd.from_pandas(small, npartitions=3, sort=False).to_parquet(folder / "small", write_index=False)
    return folder


def planned(*results: Any, sizes: PartitionSizes = WHOLE) -> Any:
    """Return the lowered plan of a computation."""
    plan: Any = FinalizeCompute(collections_to_expr(results))
    tuned = optimize_until(plan, "tuned-logical")
    return lower(by_size(tuned, Facts(sizes)), "simplified-physical")


def changed(result: Any, sizes: PartitionSizes = WHOLE) -> list[int]:
    """Return the numbers of partitions of reads that were changed."""
    plan = planned(result, sizes=sizes)
    return sorted(each.npartitions for each in plan.walk() if type(each) is FewerPartitions)


LOOKUP = pd.DataFrame({"rate": np.arange(20) / 4}, index=pd.Index(range(5, 25), name="code"))
#: Programs on a large and on a small table whose result is the same for any partitions.
INDEPENDENT: dict[str, Callable[[Any, Any], Any]] = {
    "join": lambda large, small: large.merge(small, on="key"),
    "aggregations": lambda large, small: large.groupby("name", sort=True).agg(
        {"value": ["sum", "mean"], "key": "max"}
    ),
    "top of a join": lambda large, small: (
        large.merge(small, on="key").sort_values(["value"]).head(5, compute=False)
    ),
    "rows of files": lambda large, small: large[large.value > 100],
    "numbers of rows of files beside groups": lambda large, small: large.join(
        small.groupby("key").more.sum(), on="key"
    ),
    "numbers of some rows of files beside groups": lambda large, small: (
        large[large.number % 7 == 1]
        .merge(small.groupby("key").more.sum().to_frame(), left_on="key", right_index=True)
        .sort_values("value")
        .head(50, compute=False)
    ),
    "numbers of rows of files beside one frame in memory": lambda large, small: large[
        large.number % 7 == 1
    ].merge(dd.from_pandas(LOOKUP, npartitions=1), left_on="key", right_index=True),
    "a join on the index of one persisted frame": lambda large, small: large.join(
        small.groupby("key").more.sum().to_frame("most").persist(), on="key", how="inner"
    ),
    "numbers of rows of two reads": lambda large, small: dd.concat(
        [large[large.value > 500][["key"]], small[small.key > 20][["key"]]]
    ),
    "number of rows": lambda large, small: large[large.value > 100].shape[0],
    "number of joined rows": lambda large, small: large.merge(small[small.more > 1], on="key").shape[0],
    "left join on keys of two widths": lambda large, small: large.astype({"key": "int32"}).merge(
        small, on="key", how="left"
    )[["key", "value"]],
    "scalar in a filter": lambda large, small: (
        large[large.value > large.value.mean()].groupby("key", sort=True).size()
    ),
    "rows without a match": lambda large, small: (
        small.merge(large[large.value > 500], on="key", how="left")
        .assign(none=lambda rows: rows.number.isna())
        .groupby("label")
        .none.sum()
    ),
    "quotient of groups of which some are missing": lambda large, small: (
        large[large.key > 9].groupby("key").value.sum() / large.groupby("key").value.sum()
    ).sum(),
    "running sum of groups": lambda large, small: (
        large.groupby("key", sort=True).value.sum().cumsum().reset_index()
    ),
    "differences of sorted groups": lambda large, small: (
        large.groupby(["key", "number"], sort=True)
        .value.sum()
        .to_frame()
        .sort_values("value")
        .diff()
        .shift(1)
    ),
}


def numbered_again(rows: Any) -> Any:
    rows = rows.reset_index(drop=True)
    return rows.assign(x=rows[rows.value > 100].reset_index(drop=True).value)


#: Programs whose result may be another one; an operation without a guarantee stands for all of them.
DEPENDENT: dict[str, Callable[[Any, Any], Any]] = {
    "keys of two widths without a match": lambda large, small: large.astype({"key": "int32"}).merge(
        small, on="key", how="outer"
    )[["key"]],
    "labels of rows": lambda large, small: large[large.value > 100].index.max(),
    "first rows": lambda large, small: large[["key"]].head(3, compute=False),
    "a function on partitions": lambda large, small: large[["key"]].map_partitions(len),
    "running sum": lambda large, small: large[["key"]].cumsum(),
    "first of each group": lambda large, small: large.groupby("name").value.first(),
    "order of groups": lambda large, small: large.groupby("name").value.sum(),
    "order of distinct rows": lambda large, small: large.set_index("key")[["name"]].drop_duplicates(
        split_out=True
    ),
    "integers without a match": lambda large, small: (
        small.merge(large, on="key", how="left").assign(n=lambda rows: rows.number + 1).n.sum()
    ),
    "a function on rows of groups in no fixed order": lambda large, small: (
        large.groupby("name", sort=False).value.sum().map_partitions(lambda part: part.cumsum())
    ),
    "where": lambda large, small: large[["key"]].where(lambda part: part > part.mean()).key.sum(),
    "categories of a partition": lambda large, small: (
        large.astype({"name": "category"}).groupby("name").size()
    ),
    "numbers of sorted rows": lambda large, small: large.sort_values("value", ignore_index=True).index.max(),
    "numbers of rows of files": lambda large, small: large.reset_index().groupby("index").value.sum(),
    "join on numbers of rows": lambda large, small: large.merge(small, left_on="key", right_index=True),
    "groups joined on indexes of unlike dtypes": lambda large, small: (
        large.groupby("name")
        .key.max()
        .to_frame()
        .merge(small.groupby("key").more.sum().to_frame(), left_on="key", right_index=True)
    ),
    "a column of other rows": lambda large, small: (
        large.assign(value=large.value[large.key > 3]).groupby("name").value.sum()
    ),
    "joined rows beside some of them that are numbered again": lambda large, small: (
        numbered_again(large.merge(small, on="key")).groupby("label").x.count()
    ),
    "text of times": lambda large, small: (
        large.assign(day=large.key.astype("datetime64[ns]").astype(str)).groupby("day").size()
    ),
    "numbers of joined rows": lambda large, small: large.merge(small, on="key")[["name"]].reset_index(),
    "chosen partitions": lambda large, small: large.merge(small, on="key", npartitions=3),
    "shuffle": lambda large, small: large[["key", "value"]].shuffle("key").partitions[0],
    "two tables side by side": lambda large, small: large[["key"]].assign(
        other=large.repartition(npartitions=4).value
    ),
}


#: Programs whose result shows numbers of rows, which differ if files are put together in another way.
NUMBERED = [name for name in INDEPENDENT if "rows of files" in name or "rows of two" in name]


@pytest.mark.parametrize("filesystem", ["fsspec", nightly("arrow")])
@pytest.mark.parametrize("name", INDEPENDENT)
def test_results_do_not_depend_on_partitions(folder: Path, name: str, filesystem: str) -> None:
    result = INDEPENDENT[name](
        *(dd.read_parquet(folder / each, filesystem=filesystem) for each in ("large", "small"))
    )
    plan = planned(result)
    assert set(changed(result)) == {1}
    index = "join" not in name
    expected, found = result.compute(), value_of(plan)
    if np.isscalar(expected):
        assert found == pytest.approx(expected)
    else:
        pd.testing.assert_frame_equal(canonical(found, index=index), canonical(expected, index=index))


@pytest.mark.parametrize("name", NUMBERED)
def test_rows_have_the_labels_that_they_have_in_reads_of_several_files(folder: Path, name: str) -> None:
    """Dask's read through Arrow numbers the rows of several files as one, as dask_cudf's does."""
    tables = [dd.read_parquet(folder / each, filesystem="arrow") for each in ("large", "small")]
    result = INDEPENDENT[name](*tables)
    labelled = [each for each in planned(result).walk() if type(each) is FewerPartitions]
    assert any(each.operand("labelled") is not None for each in labelled)
    pd.testing.assert_frame_equal(canonical(value_of(planned(result))), canonical(result.compute()))


def test_tables_of_unknown_sizes_are_left_to_dask(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Footer, "sizes_of", lambda footer, column: None)
    assert (
        changed(INDEPENDENT["join"](*(dd.read_parquet(folder / each) for each in ("large", "small")))) == []
    )


@pytest.mark.parametrize("name", DEPENDENT)
def test_programs_that_may_depend_on_partitions_are_left_to_dask(folder: Path, name: str) -> None:
    result = DEPENDENT[name](*(dd.read_parquet(folder / each) for each in ("large", "small")))
    plain: Any = FinalizeCompute(collections_to_expr([result]))
    assert planned(result)._name == optimize_until(plain, "simplified-physical")._name


def test_a_result_that_may_depend_keeps_its_own_tables_as_they_are(folder: Path) -> None:
    large, small = (dd.read_parquet(folder / each) for each in ("large", "small"))
    joined, shown = large.merge(small, on="key").more.sum(), large.number.cumsum()
    plan = planned(joined, shown)
    reads = {each.npartitions for each in plan.walk() if type(each) is FewerPartitions}
    assert reads == {1}
    found = dask.get(plan.__dask_graph__(), list(flatten(plan.__dask_keys__())))
    assert found[0] == 1.5 * 4_000
    pd.testing.assert_series_equal(found[1], shown.compute())


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Write tables of different numbers of files, and return a function that reads one by its name."""
    folder = tmp_path_factory.mktemp("notes")
    for name, rows, files in (("few", 400, 8), ("many", 400, 20), ("other", 60, 3), ("long", 8_000, 40)):
        number = np.arange(rows)
        key = pd.array([None if i % 13 == 0 else i % 30 for i in number], dtype="Float64")
        columns = {
            "key": number % 20,
            "more": number % 3,
            name: number,
            "null": key.to_numpy(float, na_value=np.nan),
        }
        dd.from_pandas(pd.DataFrame(columns), npartitions=files, sort=False).to_parquet(folder / name)
    return lambda name: dd.read_parquet(folder / name)


def groups(table: Any) -> Any:
    """Return groups for which Dask notes that their partitions are divided by the key."""
    return table.groupby("key").agg({"more": "max"}, split_out=True).reset_index()


#: Programs in which Dask may leave out a shuffle because of a wrong note of how rows are divided.
NOTED: dict[str, Callable[[Callable[[str], Any]], Any]] = {
    "few partitions that are sent": lambda read: (
        read("long")[["key", "long"]]
        .merge(read("few")[["key", "few"]], on="key")
        .groupby("key")
        .agg({"long": "count"}, split_out=True)
    ),
    "a name that is assigned anew": lambda read: (
        read("few")[["key", "few"]]
        .merge(read("other")[["key", "other"]], on="key")
        .assign(key=lambda joined: joined.key // 2)
        .merge(read("many")[["key", "many"]], on="key")
    ),
    "no note to follow": lambda read: (
        read("many")[["key", "many"]]
        .merge(read("few")[["key"]], on="key")[["key"]]
        .drop_duplicates(split_out=True)
        .rename(columns={"key": "other"})
        .drop_duplicates(split_out=3)
    ),
}


@pytest.fixture
def lowered_as_with_the_runtime() -> Iterator[None]:
    """Have Dask rely on no wrong notes, as it does while the runtime is on and tables are read by size."""
    patches = PatchSet()
    lower_with(Lowering(lambda: True, lambda name, choice: None), patches)
    yield
    patches.restore()


#: Sizes with which reads get numbers of partitions for which such notes matter.
HUGE = 1 << 30


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("few partitions that are sent", PartitionSizes(1, 2, 1_600, 0)),
        ("a name that is assigned anew", PartitionSizes(1, 2, HUGE, 0)),
        ("no note to follow", PartitionSizes(1, 2, HUGE, HUGE)),
    ],
)
@pytest.mark.usefixtures("lowered_as_with_the_runtime")
def test_no_row_is_sought_where_it_is_not(
    tables: Callable[[str], Any], name: str, sizes: PartitionSizes
) -> None:
    result = NOTED[name](tables)
    found = value_of(planned(result, sizes=sizes))
    index = "groupby" in str(result.expr)
    pd.testing.assert_frame_equal(canonical(found, index=index), canonical(result.compute(), index=index))


def test_files_of_different_dtypes_are_left_to_dask(tmp_path: Path) -> None:
    for number, dtype in enumerate([pa.int32(), pa.int32(), pa.int64()]):
        table = pa.table({"key": pa.array([1, 2], dtype), "group": ["a", "b"]})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    assert changed(dd.read_parquet(tmp_path).groupby("group", sort=True).key.max()) == []


@pytest.mark.parametrize("filesystem", ["fsspec", "arrow"])
def test_integers_stay_exact_beside_files_with_nulls(tmp_path: Path, filesystem: str) -> None:
    large = 2**53 + 1
    for number, values in enumerate([[large, large - 1], [large, 5], [7, None]]):
        table = pa.table({"key": pa.array(values, pa.int64()), "group": ["a", "b"]})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    table = dd.read_parquet(tmp_path, filesystem=filesystem)
    assert changed(table.groupby("group", sort=True).key.max()) == []
    assert changed(table[table.key + 0 == large].groupby("group", sort=True).size()) == []
    assert changed(table.groupby("group", sort=True).size()) == [1]  # it does not read the integers
    assert changed(table.groupby("group", sort=True).key.count()) == [1]  # nor their values


def test_files_in_object_storage_are_left_to_dask() -> None:
    table = pd.DataFrame({"key": np.arange(40), "group": "a", "more": 1})
    dd.from_pandas(table, npartitions=4, sort=False).to_parquet("memory://gpurt-partitions")
    stored = dd.read_parquet("memory://gpurt-partitions")
    assert changed(stored.key.sum()) == []
    assert value_of(planned(stored.key.sum())) == 780


def test_an_optimised_collection_is_computed(folder: Path) -> None:
    """It has operations of lowered plans, some of which demand several partitions below."""
    large = dd.read_parquet(folder / "large")
    found = value_of(planned(large.repartition(npartitions=1).optimize()))
    assert found.key.sum() == large.key.sum().compute()


STAYING: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "groups": (lambda large: large.groupby("key", sort=True).number.sum().to_frame(), True),
    "one partition": (lambda large: large.repartition(npartitions=1), False),
    "rows that are numbered": (lambda large: large[["key"]].repartition(npartitions=1).reset_index(), False),
    "groups of categories": (
        lambda large: (
            large.assign(name=large.name.astype("category")).groupby("name", observed=True).key.max()
        ),
        False,
    ),
}


@pytest.mark.parametrize("name", STAYING)
def test_a_result_of_one_partition_that_stays_is_read_by_size(folder: Path, name: str) -> None:
    """As with ``persist()``: it has that partition, however its tables are divided."""
    program, is_by_size = STAYING[name]
    planner = Planner()
    planner.sizes = WHOLE
    result = program(dd.read_parquet(folder / "large"))
    expected = result.compute()
    with dask.config.set(scheduler=None), planner.used():
        plan = planner.cache.optimise(optimize_until, result.expr, "simplified-physical")
    assert bool(planner.count("reads.by-size")) == is_by_size
    assert planner.metrics.snapshot()["fallbacks"] == {}
    assert plan.npartitions == result.npartitions
    assert plan.divisions == result.divisions
    if is_by_size:
        found = value_of(plan)
        assert found.equals(expected.loc[found.index]) if result.ndim else found == expected


def test_a_query_that_cannot_be_planned_by_size_is_planned_by_dask(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise AttributeError("an expression of a newer Dask")

    planners = Planner(), Planner()
    expr = dd.read_parquet(folder / "large").key.sum().expr.finalize_compute()
    values = []
    for planner in planners:
        planner.sizes = WHOLE
        with dask.config.set(scheduler=None), planner.used():
            values.append(value_of(planner.cache.optimise(optimize_until, expr, "simplified-physical")))
        monkeypatch.setattr(PartitionSize, "apply", fail)
    assert [planner.count("reads.by-size") for planner in planners] == [1, 0]
    assert [[*planner.metrics.snapshot()["fallbacks"]] for planner in planners] == [[], ["planning.as-dask"]]
    assert values[0] == values[1]


def test_a_table_that_has_gone_is_left_to_dask(tmp_path: Path) -> None:
    table = pd.DataFrame({"key": np.arange(40), "group": "a", "more": 1})
    dd.from_pandas(table, npartitions=4, sort=False).to_parquet(tmp_path / "table")
    result = dd.read_parquet(tmp_path / "table").key.sum()
    shutil.rmtree(tmp_path / "table")
    assert changed(result) == []


@pytest.fixture(scope="module")
def readers(library: Library, tmp_path_factory: pytest.TempPathFactory) -> list[Callable[[], Any]]:
    return written(tmp_path_factory.mktemp("tables"), library.name)


@examples(8)
@given(program=programs)
def test_programs_have_the_same_rows(
    library: Library, readers: list[Callable[[], Any]], program: list[Step]
) -> None:
    with warnings.catch_warnings(), dask.config.set({"dataframe.backend": library.name}):
        warnings.simplefilter("ignore")
        expected = computed(readers, program)
        result, _ = run(readers, program)
        try:
            found = to_pandas(value_of(planned(result)))
        except Exception as error:
            found = type(error).__name__, str(error)
    if isinstance(expected, tuple):
        assert found[0] == expected[0], found
        return
    index = all(step[0] != "merge" for step in program)
    assert type(found) is type(expected)
    pd.testing.assert_frame_equal(canonical(found, index=index), canonical(expected, index=index))


# ---- why --------------------------------------------------------------------------------------------


def test_rules_say_what_they_changed_and_what_they_left_and_why(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "dask_gpurt.client.planning.rules")
    large, small = (dd.read_parquet(folder / name) for name in ("large", "small"))
    sizes = PartitionSizes(workers=1, threads=1, partition=0, broadcast=10_000)
    planned(large.merge(small, on="key").value.sum(), sizes=sizes)
    said = "\n".join(caplog.messages)
    assert "is read in 1 partitions, not" in said
    assert "is not read as a single partition to broadcast: its" in said
    assert "is read in partitions of the size that Dask chooses" in said
    caplog.clear()
    planned(large.key.head(3, compute=False), sizes=sizes)
    assert "since results depend on partitions: what Head returns may depend on them" in caplog.text


def test_a_sort_is_not_computed_to_plan_its_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = dd.from_pandas(pd.DataFrame({"x": [3, 1, 2] * 9, "y": range(27)}), npartitions=3)
    first = rows.sort_values(["x", "y"], ascending=[True, False]).head(3, compute=False)
    monkeypatch.setattr(_shuffle, "_calculate_divisions", lambda *_, **__: pytest.fail("it is computed"))
    planner = Planner()
    planner.sizes = WHOLE
    with dask.config.set(scheduler=None), planner.used():
        plan = planner.cache.optimise(optimize_until, first.expr, "simplified-physical")
    assert value_of(plan).y.to_list() == [25, 22, 19]


# ---- plans from the cache ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planner(library: Library, readers: list[Callable[[], Any]]) -> Iterator[Planner]:
    """Share one cache between all programs: entries of one are used by the next, while no setting changes."""
    planner = Planner()
    planner.cache.install()
    with dask.config.set({"dataframe.shuffle.method": "tasks", "dataframe.backend": library.name}):
        yield planner
    planner.cache.remove()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planning") / "results"


@examples(6)
@given(program=programs)
def test_programs_are_planned_and_computed_as_dask_does(
    planner: Planner, readers: list[Callable[[], Any]], program: list[Step], stored: Path
) -> None:
    """At first, again, and by the next process."""
    with warnings.catch_warnings(), dask.config.set(scheduler="sync"):
        warnings.simplefilter("ignore")
        gc.collect()  # otherwise Dask finds the previous run's expressions
        expected, result = plan_of(readers, program), computed(readers, program)
        with planner.used():
            plans = [plan_of(readers, program) for _ in range(2)]
            for _ in range(2):
                planner.begin_again(stored)
                gc.collect()
                plans.append(plan_of(readers, program))
            found = computed(readers, program)
    assert plans == [expected] * 4
    assert_same(found, result)


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, pd.DataFrame):
        pd.testing.assert_frame_equal(found, expected, check_exact=True)
    elif isinstance(expected, pd.Series):
        pd.testing.assert_series_equal(found, expected, check_exact=True)
    else:
        assert found == expected


KEPT = ("expressions.reused", "plans.reused", "files.reused")
LOADED = ("metadata.loaded", "plans.loaded", "files.loaded")
COMPUTED = ("metadata.computed", "plans.computed", "files.read")


def test_that_programs_use_what_was_kept_and_stored(
    planner: Planner, readers: list[Callable[[], Any]], stored: Path
) -> None:
    chosen = {"column": "key", "other": "name", "sides": "on", "how": "left", "suffixes": ("_x", "_y")}
    program: list[Step] = [("merge", 0, 2, chosen | {"indicator": False})]
    read = [readers[0], readers[2], readers[4]]

    def rises(*counted: str) -> list[bool]:
        before = [planner.count(what) for what in counted]
        plan_of(read, program)
        return [planner.count(what) > count for what, count in zip(counted, before, strict=True)]

    with planner.used():
        planner.begin_again(stored)
        assert plan_of(read, program)["errors"] == []
        assert all(rises(*KEPT))
        planner.begin_again(stored)
        gc.collect()
        assert rises(*LOADED, *COMPUTED) == [True] * 3 + [False] * 3
    assert planner.metrics.snapshot()["fallbacks"] == {}
