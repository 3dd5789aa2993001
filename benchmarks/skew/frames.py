"""Make the frames of joins whose keys are even or skewed, and fingerprint results in any order.

The right side has each key once. So each row of the left side has one match, and a join has as many rows as
the left side whatever its keys: even keys are the yardstick of skewed ones. If both sides were skewed, the
hottest key alone would multiply the rows of both sides, and the benchmark would measure the size of the
output.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import dask
import dask.dataframe as dd
import numpy as np

from benchmarks.common.rows import WRAP, arrays_of

ZIPF = 1.3
HOT_SHARE = 0.3
#: Average rows of the left side per key, and keys per group.
ROWS_PER_KEY, KEYS_PER_GROUP = 4, 8

#: The ``RandomState`` of numpy, or that of cupy, which draws on the GPU.
Draw: TypeAlias = Any


def even_keys(draw: Draw, rows: int, keys: int) -> Any:
    """Draw uniformly distributed keys."""
    return draw.randint(0, keys, rows, dtype="int64")


def zipf_keys(draw: Draw, rows: int, keys: int) -> Any:
    """Draw keys whose frequency is rank**-1.3; ranks beyond the last key wrap around."""
    return (draw.zipf(ZIPF, rows) - 1) % keys


def hot_keys(draw: Draw, rows: int, keys: int) -> Any:
    """Draw even keys, except for one key with 30% of the rows."""
    drawn = even_keys(draw, rows, keys)
    drawn[draw.random_sample(rows) < HOT_SHARE] = keys // 2
    return drawn


KEYS: Mapping[str, Callable[[Draw, int, int], Any]] = {
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
        Rows of the left side and of the result.
    partitions
        Partitions of each side and of the result.
    backend
        ``pandas`` or ``cudf``.
    """

    rows: int
    partitions: int
    backend: str = "pandas"

    @property
    def keys(self) -> int:
        """Return the number of distinct keys, which is the number of rows of the right side."""
        return max(1, self.rows // ROWS_PER_KEY)

    def rows_of(self, part: int) -> int:
        """Return the rows of a partition of the left side."""
        return self.rows * (part + 1) // self.partitions - self.rows * part // self.partitions


def left_part(part: int, keys: str, size: Size) -> Any:
    """Make a partition of the left side, with a kind of keys from :data:`KEYS`."""
    draw, rows = arrays_of(size.backend).random.RandomState(part), size.rows_of(part)
    columns = {
        "key": KEYS[keys](draw, rows, size.keys),
        "payload": draw.randint(0, 2**40, rows, dtype="int64"),
    }
    return importlib.import_module(size.backend).DataFrame(columns)


def right_part(part: int, size: Size) -> Any:
    """Make a partition of the right side."""
    key = arrays_of(size.backend).arange(part, size.keys, size.partitions)
    return with_right_columns(importlib.import_module(size.backend).DataFrame({"key": key}))


def with_right_columns(rows: Any) -> Any:
    """Add the columns of the right side, each of which follows from the key."""
    return rows.assign(group=rows.key // KEYS_PER_GROUP, weight=rows.key * 7919 % 1009)


def left_frame(keys: str, size: Size) -> Any:
    """Return the left side as a lazy frame."""
    meta = left_part(0, keys, Size(1, 1, size.backend)).iloc[:0]
    return dd.from_map(left_part, range(size.partitions), keys=keys, size=size, meta=meta)


def right_frame(size: Size) -> Any:
    """Return the right side as a lazy frame."""
    meta = right_part(0, Size(1, 1, size.backend)).iloc[:0]
    return dd.from_map(right_part, range(size.partitions), size=size, meta=meta)


def join(left: Any, right: Any) -> Any:
    """Join both sides, shuffling both."""
    return left.merge(right, on="key", broadcast=False)


class Digest(NamedTuple):
    """Identify a set of rows, in any order.

    Parameters
    ----------
    rows
        Number of rows.
    checksum
        The sum of the hashes of whole rows, modulo 2**64.
    """

    rows: int
    checksum: int


def digest(frame: Any) -> Digest:
    """Take the digest of a partition of integers, ignoring the index."""
    hashes: Any = 0
    for column in sorted(frame.columns):
        hashes = _scrambled(frame[column].values.astype("uint64") ^ hashes)
    return Digest(len(frame), int(hashes.sum()) % WRAP)


def _scrambled(values: Any) -> Any:
    """Mix the bits of 64-bit integers with the finaliser of SplitMix64, a bijection."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def total(digests: Sequence[Digest]) -> Digest:
    """Combine the digests of partitions."""
    return Digest(sum(each.rows for each in digests), sum(each.checksum for each in digests) % WRAP)


def expected(keys: str, size: Size) -> Digest:
    """Return the digest of the right result.

    It takes no join: the columns of the right side follow from the key of each row of the left side. On a GPU
    it holds one partition at a time.
    """
    parts = (with_right_columns(left_part(part, keys, size)) for part in range(size.partitions))
    return total([digest(part) for part in parts])


def delayed_digests(frame: Any) -> list[Any]:
    """Return the digest of each partition, lazily."""
    return [dask.delayed(digest)(part) for part in frame.to_delayed(optimize_graph=False)]
