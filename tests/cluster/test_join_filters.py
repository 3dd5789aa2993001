"""Joins have the same result if rows without a match are not moved."""

from __future__ import annotations

from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client

from tests.helpers.clusters import Library, assert_same_partitions, by_tasks, counters, partitions
from tests.helpers.slow import slow

RANDOM = np.random.default_rng(0)
ITEMS = pd.DataFrame({"part": RANDOM.integers(0, 5_000, 200_000), "item": range(200_000)})
PARTS = pd.DataFrame({"id": range(5_000), "kind": RANDOM.integers(0, 50, 5_000)})
ON: Any = {"left_on": "part", "right_on": "id"}
FILTER = {"gpurt.planning.filter": True, "dataframe.shuffle.method": "gpurt"}


def join(library: Library, how: str) -> Any:
    items = dd.from_pandas(library.frame(ITEMS), npartitions=6, sort=False)
    parts = dd.from_pandas(library.frame(PARTS), npartitions=4, sort=False)
    parts = parts[parts.kind == 7]
    if how == "leftsemi":
        parts = parts[["id"]]
    return items.merge(parts, how=how, **ON)


def rows(client: Client, name: str) -> int:
    return int(counters(client).get(name, 0))


@pytest.mark.parametrize("how", ["inner", slow("right"), "left", "leftsemi"])
def test_partitions_are_those_of_tasks(client: Client, library: Library, how: str) -> None:
    with dask.config.set({"dataframe.shuffle.method": "gpurt"}):
        plain = partitions(join(library, how))
    before, filtered = rows(client, "shuffle.rows"), rows(client, "shuffle.rows.filtered")
    with dask.config.set(FILTER):
        found = partitions(join(library, how))
    assert_same_partitions(found, plain, in_order=library.name == "pandas", index=False)
    assert_same_partitions(found, by_tasks(lambda: join(library, how)), in_order=False, index=False)
    moved = rows(client, "shuffle.rows") - before
    filtered = rows(client, "shuffle.rows.filtered") - filtered
    kept = int((PARTS.kind == 7).sum())
    matching = int(ITEMS.part.isin(PARTS.id[PARTS.kind == 7]).sum())
    if how == "left":
        assert (moved, filtered) == (len(ITEMS) + kept, 0)
    else:
        assert (moved, filtered) == (matching + kept, len(ITEMS) - matching)


def test_without_the_setting_all_rows_are_moved(client: Client, library: Library) -> None:
    before = rows(client, "shuffle.rows.filtered")
    with dask.config.set({"dataframe.shuffle.method": "gpurt"}):
        partitions(join(library, "inner"))
    assert rows(client, "shuffle.rows.filtered") == before
