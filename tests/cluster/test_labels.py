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
RIGHT = pd.DataFrame({"k": NUMBERS[:60] * 7 % 13, "y": NUMBERS[:60]})

pytestmark = [pytest.mark.usefixtures("client"), pytest.mark.parametrize("label", [0, nightly("")], ids=repr)]


def parts(frame: pd.DataFrame, number: int) -> list[pd.DataFrame]:
    return [frame.iloc[rows] for rows in np.array_split(np.arange(len(frame)), number)]


def sides(library: Library, label: Any, index: str) -> tuple[list[Any], list[pd.DataFrame]]:
    """Return collections and frames of both sides, whose key is a column or an index with the label."""
    tables = [frame.rename(columns={"k": label}) for frame in (LEFT, RIGHT)]
    for at in {"left": [0], "right": [1], "both": [0, 1]}.get(index, []):
        tables[at] = tables[at].set_index(label)
    return [library.lazy(parts(table, 5 - 2 * at)) for at, table in enumerate(tables)], tables


def keys(label: Any, index: str) -> dict[str, Any]:
    if index == "neither":
        return {"on": label}
    left = {"left_index": True} if index in ("left", "both") else {"left_on": label}
    right = {"right_index": True} if index in ("right", "both") else {"right_on": label}
    return left | right


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["inner", "outer"])
@pytest.mark.parametrize("index", ["neither", "left", "right", "both"])
def test_joins(library: Library, label: Any, index: str, how: str) -> None:
    (left, right), (a, b) = sides(library, label, index)
    joined = left.merge(right, how=how, **keys(label, index))[["x", "y"]].compute()
    expected = a.merge(b, how=how, **keys(label, index))[["x", "y"]]
    assert_same_rows(joined, expected, index=False)


@pytest.mark.nightly
def test_joins_by_columns_with_other_labels(library: Library, label: Any) -> None:
    left, right = LEFT.rename(columns={"k": label}), RIGHT
    ours = library.lazy(parts(left, 5)).merge(library.lazy(parts(right, 3)), left_on=label, right_on="k")
    assert_same_rows(ours.compute(), left.merge(right, left_on=label, right_on="k"), index=False)


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
