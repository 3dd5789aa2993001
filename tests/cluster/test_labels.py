"""Join, group and shuffle by a column or an index that is labelled 0 or "", with pandas and cudf.

Dask takes such a label for none. The answer is pandas' own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.helpers.clusters import Library, canonical, to_pandas
from tests.helpers.nightly import nightly

NUMBERS = np.arange(120)
LEFT = pd.DataFrame({"k": NUMBERS * 5 % 11, "x": NUMBERS})

pytestmark = [pytest.mark.usefixtures("client"), pytest.mark.parametrize("label", [0, nightly("")], ids=repr)]


def parts(frame: pd.DataFrame, number: int) -> list[pd.DataFrame]:
    return [frame.iloc[rows] for rows in np.array_split(np.arange(len(frame)), number)]


#: What is grouped, by a function of a frame and a label; ``options`` are for Dask only.
GROUPS: dict[str, Callable[..., Any]] = {
    "sum": lambda frame, label, **options: frame.groupby(label).x.sum(**options),
    "sum of a list": lambda frame, label, **options: frame.groupby([label]).x.sum(**options),
    "of a join": lambda frame, label, **options: (
        frame.merge(frame, on=label).groupby(label).x_x.sum(**options)
    ),
    "statistics": lambda frame, label, **options: frame.groupby(label).agg({"x": "max"}, **options),
    "values": lambda frame, label, **options: frame[[label]].drop_duplicates(**options),
}


@pytest.mark.parametrize("groups", GROUPS)
def test_groups(library: Library, label: Any, groups: str) -> None:
    if (library.name, groups, label) == ("cudf", "statistics", 0):
        pytest.skip("dask_cudf joins the labels of columns as text")
    table = LEFT.rename(columns={"k": label})
    found = GROUPS[groups](library.lazy(parts(table, 5)), label, split_out=3).compute()
    assert_same_rows(found, GROUPS[groups](table, label), index=groups != "values")


@pytest.mark.parametrize("operation", ["set_index", "shuffle"])
def test_shuffles(library: Library, label: Any, operation: str) -> None:
    table = LEFT.rename(columns={"k": label})
    found = to_pandas(getattr(library.lazy(parts(table, 5)), operation)(label).compute())
    if operation == "set_index":
        assert found.index.name == label
        assert found.index.is_monotonic_increasing
        found = found.reset_index()
    assert_same_rows(found, table, index=False)


def assert_same_rows(found: Any, expected: Any, *, index: bool) -> None:
    mine, theirs = (canonical(to_pandas(frame), index=index) for frame in (found, expected))
    pd.testing.assert_frame_equal(
        mine, theirs[list(mine.columns)], check_dtype=False, check_column_type=False
    )
