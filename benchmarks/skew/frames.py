"""Make the frames of joins whose keys are even or skewed, and fingerprint results in any order.

The left side has the rows, the right side has each key once. So each row of the left side has one match, and
a join has as many rows as the left side whatever its keys are: even keys are the yardstick of skewed ones.
Were both sides skewed, the hottest key alone would make a share of the product of both sides' rows, and the
output, not the skew, would be measured.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd

from benchmarks.common.rows import WRAP

ZIPF = 1.3
HOT_SHARE = 0.3
#: Rows of the left side to a key, and keys to a group, on average.
ROWS_PER_KEY, KEYS_PER_GROUP = 4, 8

Draw = np.random.Generator


def even_keys(draw: Draw, rows: int, keys: int) -> np.ndarray:
    """Draw keys that are all as frequent."""
    return draw.integers(0, keys, rows)


def zipf_keys(draw: Draw, rows: int, keys: int) -> np.ndarray:
    """Draw keys of which the n-th has n**-1.3 times as many rows as the first; ranks beyond the last wrap."""
    return (draw.zipf(ZIPF, rows) - 1) % keys


def hot_keys(draw: Draw, rows: int, keys: int) -> np.ndarray:
    """Draw even keys, but for one that has 30% of the rows."""
    return np.where(draw.random(rows) < HOT_SHARE, keys // 2, draw.integers(0, keys, rows))


KEYS: Mapping[str, Callable[[Draw, int, int], np.ndarray]] = {
    "even": even_keys,
    "zipf": zipf_keys,
    "hot": hot_keys,
}


@dataclass(frozen=True)
class Size:
    """Hold the size of a join.

    Parameters
    ----------
    rows
        Of the left side, and of the result.
    partitions
        Of each side, and of the result.
    backend
        ``pandas`` or ``cudf``.
    """

    rows: int
    partitions: int
    backend: str = "pandas"

    @property
    def keys(self) -> int:
        """Return the rows of the right side, each with a key of its own."""
        return max(1, self.rows // ROWS_PER_KEY)

    def rows_of(self, part: int) -> int:
        """Return the rows of a partition of the left side."""
        return self.rows * (part + 1) // self.partitions - self.rows * part // self.partitions


def left_part(part: int, keys: str, size: Size) -> Any:
    """Make a partition of the left side, with keys of a kind out of :data:`KEYS`."""
    draw, rows = np.random.default_rng(part), size.rows_of(part)
    columns = {"key": KEYS[keys](draw, rows, size.keys), "payload": draw.integers(0, 2**40, rows)}
    return importlib.import_module(size.backend).DataFrame(columns)


def right_part(part: int, size: Size) -> Any:
    """Make a partition of the right side."""
    key = np.arange(part, size.keys, size.partitions)
    columns = {"key": key, "group": key // KEYS_PER_GROUP, "weight": key * 7919 % 1009}
    return importlib.import_module(size.backend).DataFrame(columns)


def left_frame(keys: str, size: Size) -> Any:
    """Describe the left side."""
    meta = left_part(0, keys, Size(1, 1, size.backend)).iloc[:0]
    return dd.from_map(left_part, range(size.partitions), keys=keys, size=size, meta=meta)


def right_frame(size: Size) -> Any:
    """Describe the right side."""
    meta = right_part(0, Size(1, 1, size.backend)).iloc[:0]
    return dd.from_map(right_part, range(size.partitions), size=size, meta=meta)


def join(left: Any, right: Any) -> Any:
    """Join both sides, both of them shuffled."""
    return left.merge(right, on="key", broadcast=False)


def join_groupby(left: Any, right: Any) -> Any:
    """Join both sides, and sum up and count the result by a column of the right side: another shuffle."""
    grouped = join(left, right).groupby("group", sort=False).payload
    return grouped.agg(["sum", "count"], split_out=left.npartitions).reset_index()


class Digest(NamedTuple):
    """Tell rows from other rows, in any order.

    Parameters
    ----------
    rows
        How many.
    checksum
        The sum of the hashes of whole rows, modulo 2**64.
    """

    rows: int
    checksum: int


def digest(frame: Any) -> Digest:
    """Take the digest of a partition of integers; the index does not count."""
    hashes: Any = 0
    for column in sorted(frame.columns):
        hashes = _scrambled(frame[column].values.astype("uint64") ^ hashes)
    return Digest(len(frame), int(hashes.sum()) % WRAP)


def _scrambled(values: Any) -> Any:
    """Map integers of 64 bits to others, one to one, by the finaliser of SplitMix64."""
    values = values + 0x9E3779B97F4A7C15
    values = (values ^ (values >> 30)) * 0xBF58476D1CE4E5B9
    values = (values ^ (values >> 27)) * 0x94D049BB133111EB
    return values ^ (values >> 31)


def total(digests: Sequence[Digest]) -> Digest:
    """Return the digest of all rows of some partitions."""
    return Digest(sum(each.rows for each in digests), sum(each.checksum for each in digests) % WRAP)


def expected(keys: str, size: Size, grouped: bool) -> Digest:
    """Return the digest of what pandas makes of both sides as a whole."""
    size = Size(size.rows, size.partitions)
    left, right = (
        pd.concat(parts, ignore_index=True)
        for parts in (
            [left_part(part, keys, size) for part in range(size.partitions)],
            [right_part(part, size) for part in range(size.partitions)],
        )
    )
    joined = left.merge(right, on="key")
    if not grouped:
        return digest(joined)
    return digest(joined.groupby("group").payload.agg(["sum", "count"]).reset_index())


def delayed_digests(frame: Any) -> list[Any]:
    """Describe the digest of each partition."""
    return [dask.delayed(digest)(part) for part in frame.to_delayed(optimize_graph=False)]
