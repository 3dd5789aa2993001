"""Provide objects of all kinds that tiers take apart, and compare them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

OBJECTS = [
    pd.DataFrame({"a": np.arange(5000), "b": ["x", None] * 2500, "c": pd.Categorical(["u", "v"] * 2500)}),
    pd.DataFrame({"s": pd.array(["ä", None, "long" * 50], dtype="string")}, index=[3, 1, 2]),
    pd.DataFrame(
        {"i": pd.array([1, None, 3], dtype="Int64"), "t": pd.date_range("2020", periods=3, tz="CET")}
    ),
    pd.DataFrame(np.arange(30.0).reshape(5, 6)).iloc[1:4, 2:5],
    pd.Series(np.arange(10000), index=pd.MultiIndex.from_product([range(100), range(100)]), name="n"),
    pd.DataFrame({"e": []}),
    np.asfortranarray(np.arange(12).reshape(3, 4)),
    np.arange(100)[::3],
    np.array([(1, "a")], dtype=[("x", "i4"), ("y", "U3")]),
    np.array([1, "two", None], dtype=object),
    pa.table({"x": [1, None, 3], "y": [["a"], [], None]}),
    {"nested": [1, (2, b"bytes")]},
    b"x" * 10000,
]


def same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, pd.DataFrame):
        pd.testing.assert_frame_equal(left, right, check_exact=True, check_freq=True)
    elif isinstance(left, pd.Series):
        pd.testing.assert_series_equal(left, right, check_exact=True)
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        assert left.flags.f_contiguous or not right.flags.f_contiguous
        np.testing.assert_array_equal(left, right)
        assert left.flags.writeable == right.flags.writeable
    else:
        assert left == right


def scattered(buffer: list[np.ndarray], cuts: list[int]) -> list[np.ndarray]:
    (whole,) = buffer
    edges = sorted({0, whole.size, *(cut % (whole.size + 1) for cut in cuts)})
    return [whole[a:b].copy() for a, b in pairwise(edges)]
