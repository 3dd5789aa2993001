"""Split work that does not fit within the same tasks, on a cluster, and report it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

import dask_gpurt
from dask_gpurt.frames.pandas import PandasTable
from dask_gpurt.observe import Fallback
from dask_gpurt.shuffle import joins
from tests.helpers.allocations import failing_allocations, larger_ones_fail
from tests.helpers.in_process import on_cluster

PARTS, ROWS = 4, 10_000
#: Maximum bytes of an array: less than one integer per row of a partition takes.
LIMIT = ROWS * 6


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Fail steps that need too large an array with a MemoryError; count the failures."""
    found: Counter[str] = Counter()

    def limited(name: str, step: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            with failing_allocations(larger_ones_fail(LIMIT)) as allocations:
                try:
                    return step(*args, **options)
                finally:
                    found[name] += allocations.failed

        return run

    monkeypatch.setattr(PandasTable, "split", limited("split", PandasTable.split))
    monkeypatch.setattr(joins, "merge_chunk", limited("join", joins.merge_chunk))
    return found


def sides() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a large side, and one that matches few of its rows."""
    random = np.random.default_rng(0)
    left = pd.DataFrame({"key": random.permutation(PARTS * ROWS), "row": np.arange(PARTS * ROWS)})
    right = pd.DataFrame({"key": np.arange(0, PARTS * ROWS, 100), "x": random.random(PARTS * ROWS // 100)})
    return left, right


@on_cluster()
async def test_a_merge_with_too_little_memory_is_done_in_parts(
    client: Any, scheduler: Any, *crew: Any, refused: Counter[str]
) -> None:
    left, right = sides()
    with dask.config.set({"dataframe.shuffle.method": "gpurt"}):
        large, small = (dd.from_pandas(side, npartitions=PARTS, sort=False) for side in (left, right))
        merged = large.merge(small, on="key", broadcast=False)
        found = await client.compute(merged)
    rows = found.sort_values("row", ignore_index=True)
    pd.testing.assert_frame_equal(rows, left.merge(right, on="key"))
    assert refused["split"] >= PARTS
    assert refused["join"] >= 1
    report = await dask_gpurt.report(client)
    counts = [
        w["fallbacks"].get(Fallback.MEMORY_SPLIT.id, {}).get("count", 0) for w in report["workers"].values()
    ]
    assert sum(counts) >= PARTS + 1
    assert not any(w["counters"].get("memory.retries") for w in report["workers"].values()), "tasks ran once"
