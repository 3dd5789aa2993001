"""Filters by keys of groups that became columns have the rows of pandas; with Dask most of them raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import dask
import dask.dataframe as dd
import pandas as pd
import pytest

from dask_gpurt.client.corrections import correct_with
from dask_gpurt.dask_hooks import PatchSet

ROWS = pd.DataFrame({"k": [1, 2, 3, 4] * 5, "s": ["a", "b"] * 10, "x": range(20)})
CONDITIONS: dict[str, Callable[[Any], Any]] = {
    "looked up": lambda groups: groups[groups.k.isin([1, 2])],
    "a range": lambda groups: groups[groups.k.between(1, 2)],
    "compared": lambda groups: groups[groups.k > 2],
    "compared with a mean": lambda groups: groups[groups.k > groups.k.mean()],
    "beside a sum": lambda groups: groups[(groups.k > 1) & (groups.x > 40)],
    "compared with a sum": lambda groups: groups[groups.k < groups.x],
    "computed": lambda groups: groups[groups.k + 1 > 2],
    "loc": lambda groups: groups.loc[groups.k.isin([1, 2])],
    "a sum alone": lambda groups: groups[groups.x > 40],
    "and less columns": lambda groups: groups[groups.k.isin([1, 2])][["x"]],
}
GROUPS: dict[str, Callable[[Any], Any]] = {
    "series": lambda rows: rows.groupby("k").x.sum().reset_index(),
    "frames": lambda rows: rows.groupby(["k", "s"]).agg({"x": "sum"}).reset_index(),
    "an index": lambda rows: rows.set_index("k")[["x"]].reset_index(),
}


@pytest.fixture(scope="module", autouse=True)
def corrected() -> Iterator[None]:
    patches = PatchSet()
    correct_with(lambda: True, patches)
    with dask.config.set({"dataframe.shuffle.method": "tasks", "scheduler": "sync"}):
        yield
    patches.restore()


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_rows_are_those_of_pandas(condition: str, groups: str) -> None:
    expected = CONDITIONS[condition](GROUPS[groups](ROWS))
    found = CONDITIONS[condition](GROUPS[groups](dd.from_pandas(ROWS, npartitions=3))).compute()
    by = list(expected.columns)
    sides = (each.sort_values(by).reset_index(drop=True) for each in (found, expected))
    pd.testing.assert_frame_equal(*sides, check_dtype=False)
