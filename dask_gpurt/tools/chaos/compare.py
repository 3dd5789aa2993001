"""Compare results of a cluster with results of pandas, exactly. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

#: Maximum length of an explanation.
MAX_CHARACTERS = 600


def difference(
    parts: Sequence[pd.DataFrame],
    expected: pd.DataFrame,
    *,
    by: Sequence[str],
    index: bool = False,
    ordered_by: str | None = None,
    ascending: bool = True,
    homes: str | None = None,
) -> str | None:
    """Describe the first difference between a result and the expected rows; return None if they are equal.

    Parameters
    ----------
    parts
        The partitions of the result.
    expected
        All expected rows, in any order.
    by
        Columns that identify a row.
    index
        Whether the index is part of the row.
    ordered_by
        The column by which rows have to be sorted across partitions, missing values last.
    homes
        The column whose values may each occur in one partition only.
    """
    found = pd.concat(parts) if parts else expected.iloc[:0]
    if index:
        found, expected = found.reset_index(), expected.reset_index()
    missing = [name for name in expected.columns if name not in found.columns]
    if missing or len(found.columns) != len(expected.columns):
        return f"columns {list(found.columns)}, expected {list(expected.columns)}"
    if len(found) != len(expected):
        return f"{len(found)} rows, expected {len(expected)}{_rows(found, expected, by)}"
    if ordered_by is not None and (problem := _disorder(found[ordered_by], expected, ordered_by, ascending)):
        return problem
    if homes is not None and (split := _in_several(parts, homes)):
        return f"rows of one key are in several partitions: {split}"
    found = found[list(expected.columns)]
    try:
        pd.testing.assert_frame_equal(
            _in_order(found, by), _in_order(expected, by), check_exact=True, check_categorical=False
        )
    except AssertionError as error:
        return f"{error}{_rows(found, expected, by)}"[:MAX_CHARACTERS]
    return None


def _in_order(frame: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    return frame.sort_values(list(by), kind="stable").reset_index(drop=True)


def _rows(found: pd.DataFrame, expected: pd.DataFrame, by: Sequence[str]) -> str:
    """Count the rows that are duplicated, missing, or not in the expected result."""
    twice = int(found.duplicated(list(by)).sum())
    ours, theirs = (pd.MultiIndex.from_frame(frame[list(by)]).unique() for frame in (found, expected))
    missing, made_up = len(theirs.difference(ours)), len(ours.difference(theirs))
    return f" ({twice} more than once, {missing} missing, {made_up} made up)"


def _disorder(found: Any, expected: pd.DataFrame, column: str, ascending: bool) -> str | None:
    wanted = expected[column].sort_values(ascending=ascending, na_position="last").reset_index(drop=True)
    ours = found.reset_index(drop=True)
    wrong = ~((ours == wanted) | (ours.isna() & wanted.isna()))
    if not wrong.any():
        return None
    first = int(np.argmax(wrong.to_numpy()))
    return f"row {first} in order of {column!r} is {ours.iloc[first]!r}, expected {wanted.iloc[first]!r}"


def _in_several(parts: Sequence[pd.DataFrame], column: str) -> list[Any]:
    homes = pd.concat([part[column].drop_duplicates() for part in parts])
    return list(homes[homes.duplicated()][:3])
