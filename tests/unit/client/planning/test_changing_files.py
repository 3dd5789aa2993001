"""Change files under collections that are kept: the result is that of Dask, from the files as they are.

Queries are planned as for a cluster, and tasks are pickled, as they are for workers.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import dask
import dask.dataframe as dd
import fsspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, rule

from dask_gpurt.client.planning.rules import PartitionSizes
from dask_gpurt.client.planning.table_facts import FilesChangedError
from dask_gpurt.observe import Metrics
from tests.helpers.examples import examples
from tests.helpers.planned import Planner

#: Sizes by which tables stay as they are, and by which each is a single partition.
APART = PartitionSizes(1, 1, 0, 0)
WHOLE = PartitionSizes(1, 1, 1 << 50, 1 << 50)
#: The files of a table beside its first. With fewer files Arrow's would be a single partition.
OTHERS = [([5, 6], [4, 1]), ([7, 7], [2, 2]), ([8, 9], [1, 1])]
#: An integer that is equal to the one before it if both are floats.
LARGE = 2**53 + 1
VALUE = "a.id"


Query = Callable[[Any, Any], Any]


@pytest.fixture(autouse=True)
def _tasks() -> Iterator[None]:
    with dask.config.set({"dataframe.shuffle.method": "tasks"}):
        yield


@pytest.fixture
def planner() -> Iterator[Planner]:
    planner = Planner()
    planner.cache.install()
    yield planner
    planner.cache.remove()


def table(keys: Sequence[int], values: Sequence[int | None], **more: Any) -> pa.Table:
    return pa.table({"key": pa.array(keys, pa.int64()), VALUE: pa.array(values, pa.int64()), **more})


def write(path: Path, rows: pa.Table, *, same: bool = False) -> None:
    """Replace a file; with ``same``, by one of the same time, and of the same size if it has as many rows."""
    new = path.with_suffix(".new")
    pq.write_table(rows, new, compression="none", use_dictionary=False)
    if same:
        os.utime(new, ns=(1_700_000_000_123_456_789, 1_700_000_000_123_456_789))
    os.replace(new, path)


def save(folder: Path, parts: Sequence[pa.Table], *, same: bool = False) -> None:
    (folder / "rows").mkdir(parents=True)
    (folder / "small").mkdir()
    for at, part in enumerate([*parts, *(table(*each) for each in OTHERS[len(parts) - 1 :])]):
        write(folder / "rows" / f"part.{at}.parquet", part, same=same)
    write(folder / "small" / "part.0.parquet", pa.table({"key": list(range(12)), "label": [1] * 12}))


def read(folder: Path, filesystem: str, planner: Planner) -> tuple[Any, Any]:
    with planner.used():
        rows, small = (dd.read_parquet(folder / each, filesystem=filesystem) for each in ("rows", "small"))
    return rows, small


def build(planner: Planner, query: Query, *tables: Any) -> Any:
    with planner.used():
        return query(*tables)


def plan_of(query: Any) -> bytes:
    plan = query.expr.finalize_compute().optimize()
    (key,) = plan.__dask_keys__()
    return cloudpickle.dumps((dict(plan.__dask_graph__()), key))


def value_of(plan: bytes) -> Any:
    found = dask.get(*pickle.loads(plan))
    if not isinstance(found, pd.DataFrame):
        return found
    return found.sort_values([each for each in found if each != "a.list"]).reset_index(drop=True)


def result(query: Any, planner: Planner | None = None) -> Any:
    """Compute a query with Dask, or as it is planned with the runtime."""
    if planner is None:
        return value_of(plan_of(query))
    with planner.used():
        return value_of(plan_of(query))


def groups(rows: Any, small: Any) -> Any:
    return small.merge(rows.groupby("key").agg({VALUE: "sum"}).reset_index(), on="key")


def pairs(rows: Any, small: Any) -> Any:
    counts = rows.drop_duplicates().groupby("key").agg({VALUE: "count"}).reset_index()
    return small.merge(counts[counts[VALUE] > 0], on="key")


def large(rows: Any, small: Any) -> Any:
    return rows[rows[VALUE] == LARGE].merge(small, on="key")


def total(rows: Any, small: Any) -> Any:
    return rows[VALUE].max()


def matches(rows: Any, small: Any) -> Any:
    return small.merge(rows, on="key").groupby("key").agg({VALUE: "count"}).reset_index()


QUERIES = {each.__name__: each for each in (groups, pairs, large, total, matches)}

# ---- kept collections -------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_numbers_of_rows_are_of_the_files_as_they_are(
    planner: Planner, tmp_path: Path, protocol: str
) -> None:
    """Dask plans a length as a constant, from footers that it reads for that."""
    folder = f"{protocol}://{tmp_path}/lengths"
    files = fsspec.filesystem(protocol)
    files.makedirs(folder)

    def put(rows: int) -> None:
        with files.open(f"{folder}/part.0.parquet", "wb") as file:
            pq.write_table(table(range(rows), range(rows)), file)

    put(3)
    counts: list[Callable[[], Any]] = [lambda: rows.key.size, lambda: (rows.key + 1).size]
    with planner.used():
        rows = dd.read_parquet(folder)
        assert [value_of(plan_of(count())) for count in counts] == [3, 3]
        put(5)
        assert [value_of(plan_of(count())) for count in counts] == [5, 5]
    files.rm(folder, recursive=True)


# ---- names of columns -------------------------------------------------------------------------------


# ---- between planning and reading -------------------------------------------------------------------


def planned(planner: Planner, query: Any, sizes: PartitionSizes) -> bytes:
    planner.sizes = sizes
    with planner.used():
        return plan_of(query)


#: What a file is replaced by, and whether what the plan relies on is true of that.
REPLACED = {
    "a key of another file": (table([1, 5], [1, 5]), False),
    "more keys": (table([1, 3], [1, 1]), False),
    "nulls": (table([1, 2], [1, None]), False),
    "another type": (pa.table({"key": [1, 2], VALUE: [1.5, 2.5]}), False),
    "a column less": (pa.table({"key": [1, 2]}), False),
    "other values": (table([2, 1, 1], [7, 8, 9]), True),
    "more columns": (table([1, 2], [7, 8], other=[1, 2]), True),
    "no rows": (table([], []), True),
}


@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.parametrize("filesystem", ["fsspec", "arrow"])
def test_a_file_is_replaced_before_it_is_read(
    planner: Planner, tmp_path: Path, filesystem: str, name: str
) -> None:
    save(tmp_path, [table([1, 2], [1, 1])])
    query = groups(*read(tmp_path, filesystem, planner))
    plan = planned(planner, query, APART)
    replacement, is_true = REPLACED[name]
    write(tmp_path / "rows/part.0.parquet", replacement)
    if is_true:
        pd.testing.assert_frame_equal(value_of(plan), result(query))
        return
    # A reader itself may miss a column, or be unable to cast one.
    with pytest.raises((FilesChangedError, KeyError, pa.ArrowInvalid)) as raised:
        value_of(plan)
    if "key" in name or name == "nulls":
        assert raised.match(r"part\.0\.parquet has been changed while a query on it was computed")


def test_files_that_are_copied_are_the_same(planner: Planner, tmp_path: Path) -> None:
    """Hosts may have copies of a table under one path: each has other inodes and times."""
    save(tmp_path, [table([1, 2], [1, 1])])
    plan = planned(planner, groups(*read(tmp_path, "fsspec", planner)), APART)
    shutil.copytree(tmp_path / "rows", tmp_path / "copy")
    shutil.rmtree(tmp_path / "rows")
    (tmp_path / "copy").rename(tmp_path / "rows")
    assert value_of(plan)[VALUE].tolist() == [1, 1, 4, 1, 4, 1, 1]


def test_nothing_is_checked_that_no_plan_relies_on(planner: Planner, tmp_path: Path) -> None:
    """Programs that read files while these are replaced go on as with Dask."""
    save(tmp_path, [table([1, 2], [1, 1]), table([2, 6], [4, 1])])
    query = groups(*read(tmp_path, "fsspec", planner))
    plan = planned(planner, query, APART)
    write(tmp_path / "rows/part.0.parquet", table([1, 6], [None, 5]))
    pd.testing.assert_frame_equal(value_of(plan), result(query))


# ---- a machine --------------------------------------------------------------------------------------


class Interrupting(Metrics):
    """Replace a file in the middle of planning, which counts what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.interrupt: tuple[int, Callable[[], None]] | None = None

    def add(self, name: str, amount: float = 1, *labels: str) -> None:
        super().add(name, amount, *labels)
        if self.interrupt is None:
            return
        left, change = self.interrupt
        self.interrupt = (left - 1, change) if left else None
        if not left:
            change()


contents = st.builds(
    lambda rows, kind: (
        table([key for key, _ in rows], [value for _, value in rows], **({"more": [0, 0]} if kind else {}))
        if kind != "floats"
        else pa.table({"key": [key for key, _ in rows], VALUE: [value and value / 2 for _, value in rows]})
    ),
    st.lists(
        st.tuples(st.integers(0, 11), st.sampled_from([1, 2, 3, LARGE, LARGE - 1, LARGE - 1, None])),
        min_size=2,
        max_size=2,
    ),
    st.sampled_from(["", "", "", "", "more", "floats"]),
)
apart = st.integers(0, 3).flatmap(
    lambda at: st.tuples(
        st.just(at),
        st.lists(st.integers(3 * at, 3 * at + 2), min_size=2, max_size=2),
        st.lists(st.sampled_from([1, 2, LARGE, LARGE - 1]), min_size=2, max_size=2),
    )
)
files = st.integers(0, 3)
changes = st.one_of(
    st.tuples(st.just("replace"), files, contents),
    st.tuples(st.just("same"), files, contents),
    apart.map(lambda part: ("same", part[0], table(part[1], part[2]))),
    apart.map(lambda part: ("replace", part[0], table(part[1], part[2]))),
    st.tuples(st.just("remove"), files, st.none()),
)
names = st.sampled_from(sorted(QUERIES))
sizes = st.sampled_from([APART, WHOLE])


class ChangingFiles(RuleBasedStateMachine):
    """Change files, keep collections, and compare each result with that of Dask at the same moment."""

    tables = Bundle("tables")
    queries = Bundle("queries")

    @initialize(filesystem=st.sampled_from(["fsspec", "arrow"]))
    def begin(self, filesystem: str) -> None:
        self.metrics = Interrupting()
        self.folder = Path(tempfile.mkdtemp(prefix="gpurt-changing-"))
        self.filesystem = filesystem
        save(self.folder, [table([3 * at, 3 * at + 2], [1, 2]) for at in range(4)], same=True)
        self.planner = Planner(self.metrics)
        self.planner.cache.install()

    def teardown(self) -> None:
        if hasattr(self, "planner"):
            self.planner.cache.remove()
            shutil.rmtree(self.folder)

    def change(self, how: str, at: int, rows: Any) -> None:
        path = self.folder / "rows" / f"part.{at}.parquet"
        if how != "remove":
            write(path, rows, same=how == "same")
        elif len(list(path.parent.iterdir())) > 1:
            path.unlink(missing_ok=True)

    @rule(target=tables)
    def table_is_read(self) -> Any:
        return read(self.folder, self.filesystem, self.planner)

    @rule(target=queries, of=tables, name=names)
    def query_is_made(self, of: Any, name: str) -> Any:
        return build(self.planner, QUERIES[name], *of)

    @rule(query=consumes(queries))
    def query_is_forgotten(self, query: Any) -> None:
        del query

    @rule(change=changes)
    def file_changes(self, change: Any) -> None:
        self.change(*change)

    @rule(query=queries, sizes=sizes)
    def query_is_computed(self, query: Any, sizes: PartitionSizes) -> None:
        self.planner.sizes = sizes
        self._compare(query, lambda: result(query, self.planner))

    @rule(query=queries, sizes=sizes, change=changes, after=st.integers(0, 60))
    def file_changes_while_a_query_is_planned(
        self, query: Any, sizes: PartitionSizes, change: Any, after: int
    ) -> None:
        self.planner.sizes = sizes
        cannot_be_read = isinstance(_caught(lambda: result(query)), Exception)
        self.metrics.interrupt = after, lambda: self.change(*change)
        with self.planner.used():
            plan = _caught(lambda: plan_of(query))
        self.metrics.interrupt = None
        if not (cannot_be_read and isinstance(plan, Exception)):
            self._compare(query, lambda: value_of(_given(plan)), may_fail=True)

    @rule(query=queries, sizes=sizes, change=changes)
    def file_changes_before_it_is_read(self, query: Any, sizes: PartitionSizes, change: Any) -> None:
        plan = _caught(lambda: planned(self.planner, query, sizes))
        if isinstance(plan, Exception):
            self._compare(query, lambda: _given(plan))
        self.change(*change)
        if not isinstance(plan, Exception):
            self._compare(query, lambda: value_of(plan), may_fail=True)

    def _compare(self, query: Any, compute: Callable[[], Any], *, may_fail: bool = False) -> None:
        """Compare with Dask, unless it fails. A plan may find out that a file has been replaced."""
        found, expected = _caught(compute), _caught(lambda: result(query))
        if isinstance(expected, Exception) or (may_fail and isinstance(found, FilesChangedError)):
            return
        if isinstance(found, Exception):
            raise found
        if isinstance(expected, pd.DataFrame):
            pd.testing.assert_frame_equal(found, expected)
        else:
            assert found == expected or (pd.isna(found) and pd.isna(expected))


def _caught(compute: Callable[[], Any]) -> Any:
    try:
        return compute()
    except Exception as error:
        return error


def _given(plan: bytes | Exception) -> bytes:
    if isinstance(plan, Exception):
        raise plan
    return plan


TestChangingFiles = ChangingFiles.TestCase
TestChangingFiles.settings = examples(8, steps=15)
