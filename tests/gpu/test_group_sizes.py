"""Sizes of groups of cudf that are computed beside other aggregates are those that Dask computes."""

from __future__ import annotations

from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pytest

from dask_gpurt.client.planning.rules import Facts, PartitionSizes
from dask_gpurt.client.planning.rules.group_sizes import GroupSizes
from dask_gpurt.dask_hooks.planning import collection_of

pytestmark = pytest.mark.gpu

cudf = pytest.importorskip("cudf", reason="cudf is not installed")


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
