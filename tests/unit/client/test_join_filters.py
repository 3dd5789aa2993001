"""The side of a join whose keys filter the other side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask.dataframe as dd
import pandas as pd
import pytest
from dask.dataframe.dask_expr._merge import Merge

from dask_gpurt.client.join_filters import filtering_side

FRAME = pd.DataFrame({"key": range(12), "other": range(12), "text": list("abcdefghijkl")})


def frame() -> Any:
    return dd.from_pandas(FRAME, npartitions=3)


def some() -> Any:
    rows = frame()
    return rows[rows.other > 5]


def side(left: Any, right: Any, **options: Any) -> str | None:
    return filtering_side(left.merge(right, **{"on": "key", **options}).expr)


@pytest.mark.parametrize(
    ("how", "left", "right"),
    [
        ("inner", "left", "right"),
        ("left", "left", None),
        ("right", None, "right"),
        ("leftsemi", "left", "right"),
        ("outer", None, None),
    ],
)
def test_a_filtered_side_filters_the_other_if_its_rows_are_not_kept(
    how: str, left: str | None, right: str | None
) -> None:
    others = frame()[["key"]] if how == "leftsemi" else frame()
    few = some()[["key"]] if how == "leftsemi" else some()
    assert side(some(), others, how=how) == left
    assert side(frame(), few, how=how) == right


def test_neither_side_or_both_are_filtered() -> None:
    assert side(frame(), frame()) is None
    assert side(some(), some()) is None


def test_a_join_on_an_index_or_on_text() -> None:
    indexed = some().set_index("key", sorted=False, divisions=[0, 4, 8, 11])
    (join,) = frame().merge(indexed, left_on="key", right_index=True).expr.find_operations(Merge)
    assert filtering_side(join) is None
    assert side(frame(), some(), on="text") is None


def test_a_filter_is_applied_while_reading(tmp_path: Path) -> None:
    FRAME.to_parquet(tmp_path / "part.0.parquet")
    read = dd.read_parquet(tmp_path, filters=[("other", ">", 5)])
    assert side(frame(), read) == "right"
