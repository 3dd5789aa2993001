"""A query on cudf chooses the rows that the filter chooses which planning makes of it."""

from __future__ import annotations

import re
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask._expr import FinalizeCompute, _ExprSequence
from dask.dataframe.dask_expr._expr import Filter, Query

from dask_gpurt.client.planning.rules import Facts, PartitionSizes
from dask_gpurt.client.planning.rules.row_choices import RowChoices

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
