"""Rows read by cudf in other partitions than Dask's keep the numbers that Dask's partitions give them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask._expr import FinalizeCompute, optimize_until
from dask.base import collections_to_expr

from dask_gpurt.client.planning.reads import FewerPartitions, lower
from dask_gpurt.client.planning.rules import Facts, PartitionSizes
from tests.helpers.planned import by_size, value_of

pytestmark = pytest.mark.gpu

cudf = pytest.importorskip("cudf", reason="cudf is not installed")

FILES, ROWS = 6, 5_000
PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "chosen rows": lambda rows: rows[rows.x > 0.9],
    "rows beside groups": lambda rows: rows[rows.x > 0.5].merge(
        rows.groupby("key").x.max().to_frame("most"), left_on="key", right_index=True
    ),
}


@pytest.fixture(scope="module", autouse=True)
def backend() -> Iterator[None]:
    settings = {"dataframe.backend": "cudf", "dataframe.shuffle.method": "tasks", "scheduler": "sync"}
    with dask.config.set(settings):
        yield


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
