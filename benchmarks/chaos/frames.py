"""Create the partitions of random frames, on workers and where results are checked."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.chaos.plan import FrameSpec

#: Columns that identify the rows of the left and the right input of an operation.
ROW, OTHER_ROW = "row", "other_row"
KEY = "key"
EPOCH = np.datetime64("2020-01-01", "ns")
#: Kinds of columns that cudf does not support: it cannot hold Python objects.
HOST_ONLY = frozenset({"object"})


def make_partition(number: int, spec: FrameSpec, row: str, backend: str) -> Any:
    """Create a partition of a frame.

    ``row``: name of the column that numbers the rows of the whole frame.
    """
    columns = [name for name in spec.columns if backend == "pandas" or name not in HOST_ONLY]
    first, rows = _rows_of(spec, number)
    random = np.random.default_rng((spec.seed, number))
    frame = pd.DataFrame({KEY: _keys(spec, random, rows), row: np.arange(first, first + rows)})
    for name in columns:
        frame[f"{name}_{row}"] = _values(name, random, rows)
    return importlib.import_module("cudf").from_pandas(frame) if backend == "cudf" else frame


def whole_frame(spec: FrameSpec, row: str, backend: str) -> pd.DataFrame:
    """Create the whole frame in this process, in pandas."""
    parts: list[pd.DataFrame] = [
        to_pandas(make_partition(number, spec, row, backend)) for number in range(spec.partitions)
    ]
    return pd.concat(parts)


def to_pandas(part: Any) -> Any:
    """Convert a frame or a chunk of an array to a pandas frame."""
    if isinstance(part, (pd.DataFrame, pd.Series)):
        return part
    if hasattr(part, "to_pandas"):
        return part.to_pandas()
    return pd.DataFrame(part.get() if hasattr(part, "get") else part)


def _rows_of(spec: FrameSpec, number: int) -> tuple[int, int]:
    """Return the number of a partition's first row, and the number of its rows."""
    filled = [at for at in range(spec.partitions) if at not in spec.empty]
    before = sum(at < number for at in filled)
    first, last = (spec.rows * at // len(filled) for at in (before, before + 1))
    return first, last - first if number in filled else 0


def _keys(spec: FrameSpec, random: np.random.Generator, rows: int) -> Any:
    numbers = random.integers(0, spec.distinct, rows)
    if spec.skewed:
        numbers[random.random(rows) < 0.5] = 0
    if spec.key == "string":
        return pd.Series(numbers).map("key-{}".format).astype("string[pyarrow]")
    if spec.key == "datetime":
        return EPOCH + numbers.astype("timedelta64[s]").astype("timedelta64[ns]")
    return numbers


def _values(kind: str, random: np.random.Generator, rows: int) -> Any:
    small = random.integers(0, 9, rows)
    match kind:
        case "float":
            return np.where(small == 0, np.nan, random.random(rows))
        case "string":
            words = pd.Series(small).map("w{}".format).astype("string[pyarrow]")
            return words.mask(small == 0)
        case "category":
            return pd.Categorical.from_codes(small - 1, pd.Index([f"c{n}" for n in range(8)]))
        case "datetime":
            times = EPOCH + random.integers(0, 10**9, rows).astype("timedelta64[ns]")
            return np.where(small == 0, np.datetime64("NaT"), times)
        case "object":
            return pd.Series([("pair", int(n)) if n else None for n in small], dtype=object)
        case "bool":
            return small > 4
        case _:
            return small
