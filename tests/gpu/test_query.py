"""Plans on cudf: queries as filters, sizes of groups, and numbers of rows in other partitions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask._expr import FinalizeCompute, _ExprSequence, optimize_until
from dask.base import collections_to_expr
from dask.dataframe.dask_expr._expr import Filter, Query

from dask_gpurt.client.planning.reads import FewerPartitions, lower
from dask_gpurt.client.planning.rules import Facts, PartitionSizes
from dask_gpurt.client.planning.rules.group_sizes import GroupSizes
from dask_gpurt.client.planning.rules.row_choices import RowChoices
from dask_gpurt.dask_hooks.planning import collection_of
from tests.helpers.planned import by_size, value_of

pytestmark = pytest.mark.gpu

cudf = pytest.importorskip("cudf", reason="cudf is not installed")

BEGIN = pd.Timestamp("2026-01-02")
#: Queries that are filters, and such that are left to cudf.
FILTERS = (
    *(
        "n > 1",
        "n >= 1 and x < 0.5",
        "0.1 <= x <= 0.7 and n < 24",
        "x < 0.2 * y",
        "n != m",
        "x != y",
        "x == y",
    ),
    *(
        "small > 1",
        "2 <= small < 3.5",
        "small < n and small != x",
        "byte >= 2 and whole < byte",
        "whole > -2",
    ),
    *("t >= @begin", "t < u and n > 1", "n < x", "n == 2 and t <= @begin and y > -1", "x - y > 0"),
)
LEFT = ("n > 1 or x < 0.5", "not n > 1", "x * y - x > 0", "n in [1, 2]", "t != u")
LEFT += ("small < 200", "byte > -1", "y32 < 0.3")


@pytest.fixture(scope="module", params=[False, True], ids=["full", "nulls"])
def frame(request: pytest.FixtureRequest) -> Any:
    random = np.random.default_rng(0)
    times = pd.Timestamp("2026-01-01") + pd.to_timedelta(random.integers(0, 4, 200), "D")
    columns: dict[str, Any] = {
        "n": random.integers(0, 5, 200),
        "m": random.integers(0, 5, 200),
        "small": random.integers(0, 5, 200).astype("int8"),
        "byte": random.integers(0, 5, 200).astype("uint8"),
        "whole": random.integers(-3, 5, 200).astype("int32"),
        "y32": random.random(200).round(1).astype("float32"),
        "x": np.where(random.random(200) < 0.1, np.nan, random.random(200)),
        "y": random.random(200).round(1),
        "t": times.as_unit("us"),
        "u": times[::-1].as_unit("us"),
    }
    made = cudf.DataFrame({name: cudf.Series(values, nan_as_null=False) for name, values in columns.items()})
    if request.param:
        for position, name in enumerate(made.columns):
            made[name] = made[name].where(cudf.Series(np.arange(200) % 11 != position), None)
    return made


def planned(frame: Any, text: str) -> tuple[Any, Any]:
    rows = dd.from_pandas(frame, npartitions=2).query(text, local_dict={"begin": BEGIN})
    plan = FinalizeCompute(_ExprSequence(rows.expr))
    return rows, RowChoices().apply(plan, Facts(PartitionSizes(2, 2)))


@pytest.mark.parametrize("text", FILTERS)
def test_a_query_is_a_filter_of_the_same_rows(frame: Any, text: str) -> None:
    rows, changed = planned(frame, text)
    assert not list(changed.find_operations(Query))
    (found,) = changed.find_operations(Filter)
    with dask.config.set(scheduler="sync"):
        ours = type(rows)(found).compute()
    pd.testing.assert_frame_equal(ours.to_pandas(), chosen(frame, text).to_pandas())


def chosen(frame: Any, text: str) -> Any:
    """Return the rows that cudf chooses; its kernels take no times with nulls, and choose no row with one."""
    names = [name for name in frame.columns if re.search(rf"\b{name}\b", text)]
    if "t" in names:
        frame = frame[~frame[names].isnull().any(axis=1)]
    return frame.query(text, local_dict={"begin": BEGIN})


@pytest.mark.parametrize("text", LEFT)
def test_other_queries_are_left_to_cudf(frame: Any, text: str) -> None:
    _, changed = planned(frame, text)
    assert list(changed.find_operations(Query))


# ---- sizes of groups beside other aggregates are those of Dask ------------------------------------


@pytest.mark.parametrize("dropna", [True, False])
@pytest.mark.parametrize("by", [["key"], ["word", "key"]])
def test_sizes_are_those_of_dask(by: list[str], dropna: bool) -> None:
    random = np.random.default_rng(0)
    rows = cudf.DataFrame(
        {"key": random.integers(0, 5, 500), "x": random.random(500), "n": random.integers(0, 9, 500)}
    )
    rows["word"] = rows["n"].astype("str").where(rows["n"] > 2, None)
    rows["x"] = rows["x"].where(rows["x"] > 0.1, None)
    groups: Any = dd.from_pandas(rows, npartitions=4).groupby(by, dropna=dropna)
    plain = groups.agg({"x": "sum", "n": "size"})
    facts = Facts(PartitionSizes(1, 1))
    changed = GroupSizes().apply(plain.expr, facts)
    assert [note.done for note in facts.notes] == [True]
    with dask.config.set(scheduler="sync"):
        found, expected = collection_of(changed).compute(), plain.compute()
    assert found.dtypes.to_dict() == expected.dtypes.to_dict()
    cudf.testing.assert_frame_equal(found.sort_index(), expected.sort_index())


# ---- rows keep the numbers that Dask's partitions give them ---------------------------------------

FILES, ROWS = 6, 5_000
PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "chosen rows": lambda rows: rows[rows.x > 0.9],
    "rows beside groups": lambda rows: rows[rows.x > 0.5].merge(
        rows.groupby("key").x.max().to_frame("most"), left_on="key", right_index=True
    ),
}


@pytest.fixture
def backend() -> Iterator[None]:
    settings = {"dataframe.backend": "cudf", "dataframe.shuffle.method": "tasks", "scheduler": "sync"}
    with dask.config.set(settings):
        yield


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("files", [1, 2, FILES])
def test_rows_keep_their_numbers(tmp_path: Path, name: str, files: int) -> None:
    random = np.random.default_rng(0)
    for at in range(FILES):
        part = pd.DataFrame({"key": random.integers(0, 50, ROWS), "x": random.random(ROWS)})
        part.to_parquet(tmp_path / f"{at}.parquet", index=False)
    # Dask puts as many files into a partition.
    rows = dd.read_parquet(tmp_path, blocksize=files * ROWS * 16 + 1_000)
    result = PROGRAMS[name](rows)
    plan: Any = FinalizeCompute(collections_to_expr([result]))
    sizes = PartitionSizes(workers=1, threads=1, partition=1 << 50, broadcast=1 << 50)
    plan = lower(by_size(optimize_until(plan, "tuned-logical"), Facts(sizes)), "simplified-physical")
    changed = {each._name: each.npartitions for each in plan.walk() if type(each) is FewerPartitions}
    assert set(changed.values()) <= {1}
    ours, wanted = (each.to_pandas().sort_values(["key", "x"]) for each in (value_of(plan), result.compute()))
    pd.testing.assert_frame_equal(ours, wanted)
