"""Check that sizes are sums of ones, and which aggregations are left to Dask."""

from __future__ import annotations

from typing import Any

import dask.dataframe as dd
import pandas as pd
import pytest
from dask.dataframe.dask_expr._groupby import GroupbyAggregation

from dask_gpurt.client.planning.rules import Facts, PartitionSizes
from dask_gpurt.client.planning.rules.group_sizes import GroupSizes, has_sizes, with_sums
from dask_gpurt.dask_hooks.planning import collection_of

pytestmark = pytest.mark.usefixtures("by_tasks")

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
    assert GroupSizes().apply(groups, Facts(PartitionSizes(1, 1))) is groups
