"""Rows whose keys pandas joins go to the same partition, whatever the dtypes of the keys."""

from __future__ import annotations

import decimal
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.dask_hooks.types import merge_chunk  # imports Dask's hashes
from dask_gpurt.frames.key_values import partitions_by_value

assert merge_chunk is not None
NUMBERS = st.lists(st.sampled_from([None, 0, -1, 1, 2, 5, 2**40]), min_size=1, max_size=12)
#: Dtypes by kind, of which pandas joins any two.
KINDS: dict[str, list[Any]] = {
    "numbers": [
        "Int64",
        "Float64",
        "float64",
        "int64[pyarrow]",
        "double[pyarrow]",
        "decimal128(20, 2)[pyarrow]",
    ],
    "times": [f"datetime64[{unit}]" for unit in ("s", "ms", "us", "ns")],
    "zoned": [f"datetime64[{unit}, {zone}]" for unit in ("s", "us", "ns") for zone in ("UTC", "Asia/Tokyo")],
    "durations": [f"timedelta64[{unit}]" for unit in ("s", "ms", "us", "ns")],
    "Arrow": [
        "timestamp[s][pyarrow]",
        "timestamp[ns][pyarrow]",
        "date32[day][pyarrow]",
        "date64[ms][pyarrow]",
    ],
}


def column(kind: str, dtype: str, numbers: list[int | None]) -> pd.Series[Any]:
    """Return a column of numbers, or of as many days."""
    if kind == "numbers":
        values = [None if each is None else decimal.Decimal(each) for each in numbers]
        return pd.Series(values if "decimal" in dtype else numbers, dtype=_dtype(dtype))
    days = [None if each is None else each % 9999 for each in numbers]
    lengths = pd.Series(pd.to_timedelta(pd.Series(days, dtype="float64"), unit="D"))
    if kind == "durations":
        return lengths.astype(dtype)
    times = pd.Timestamp("2026-01-01") + lengths
    return times.dt.tz_localize("UTC").astype(dtype) if kind == "zoned" else times.astype(_dtype(dtype))


def _dtype(name: str) -> Any:
    if not name.startswith(("decimal", "date64")):
        return name
    import pyarrow as pa

    return pd.ArrowDtype(pa.date64() if name.startswith("date64") else pa.decimal128(20, 2))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), left=NUMBERS, right=NUMBERS, as_categories=st.booleans(), as_objects=st.booleans())
def test_rows_that_are_joined_are_in_one_partition(
    kind: str, data: Any, left: Any, right: Any, as_categories: bool, as_objects: bool
) -> None:
    one, other = (
        column(kind, data.draw(st.sampled_from(KINDS[kind])), numbers).to_frame("key")
        for numbers in (left, right)
    )
    if as_categories:
        one, other = one.astype("category"), other.astype("category")
    if as_objects:
        one, other = one.astype(object), other.astype(object)
    ours, theirs = (frame.assign(to=partitions_by_value(frame, 5)) for frame in (one, other))
    try:
        joined = ours.merge(theirs, on="key")
    except (TypeError, ValueError, NotImplementedError):
        return  # pandas refuses these dtypes
    assert (joined.to_x == joined.to_y).all()


@pytest.mark.parametrize(
    "values",
    [
        [True, 1, 1.0, decimal.Decimal(1), np.float32(1), 1 + 0j],
        [0.0, -0.0],
        [pd.Timestamp("2026-01-01"), np.datetime64("2026-01-01", "s"), pd.Timestamp("2026-01-01").date()],
        [None, np.nan, pd.NA, pd.NaT],
        [pd.Interval(0, 1), pd.Interval(0.0, 1.0)],
        [(1, "a", None), (1.0, "a", None), (True, "a", None)],
        [(1, (2, ())), (1.0, (2.0, ()))],
        # Of equal sets, the order depends on how they were made: 0 and 8 collide.
        [frozenset([0, 8]), frozenset([8, 0]), frozenset([8.0, False])],
    ],
)
def test_equal_objects_are_in_one_partition(values: list[Any]) -> None:
    keys = pd.DataFrame({"key": pd.Series(values, dtype=object)})
    assert len({*partitions_by_value(keys, 997)}) == 1


def test_values_are_spread() -> None:
    keys = pd.DataFrame({"day": pd.date_range("2026-01-01", periods=1000), "number": np.arange(1000)})
    assert len({*partitions_by_value(keys, 8)}) == 8
