"""Define what an operation is: how it is built, computed on a cluster, and compared with pandas', exactly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from dask.delayed import delayed
from distributed import Client

from benchmarks.chaos.frames import to_pandas
from benchmarks.chaos.plan import OperationSpec


class Operation(ABC):
    """Define an operation."""

    #: Whether its inputs are files of this machine, which an existing cluster may not have.
    own_cluster: ClassVar[bool] = False

    @abstractmethod
    def build(self, spec: OperationSpec, backend: str) -> Any:
        """Build what is computed, usually a collection; its inputs are created on the workers."""

    def compute(self, spec: OperationSpec, built: Any, client: Client) -> list[pd.DataFrame]:
        """Compute what has been built; return the partitions of the result."""
        persisted = built.persist(retries=spec.retries)
        parts = [delayed(to_pandas)(part) for part in _flat(persisted.to_delayed())]
        return list(client.gather(client.compute(parts, retries=spec.retries)))

    @abstractmethod
    def check(self, spec: OperationSpec, parts: Sequence[pd.DataFrame], backend: str) -> str | None:
        """Describe the difference of a result from the expected one; return None if it is right."""


def chain_of(error: BaseException | None) -> str:
    """Describe an error and its chain of causes."""
    named = []
    while error is not None:
        named.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return "\n  because of ".join(named)


def forget_frames(error: BaseException | None) -> None:
    """Drop the stack frames of an error: Dask's client keeps the error, and the frames keep futures alive."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _flat(parts: Any) -> list[Any]:
    """Return the partitions of a collection as a flat list, also for arrays."""
    return parts.ravel().tolist() if isinstance(parts, np.ndarray) else list(parts)


# ---- comparing -----------------------------------------------------------------------

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

    ``ordered_by``: the column by which rows have to be sorted across partitions, missing values last.
    ``homes``: the column whose values may each occur in one partition only.
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
