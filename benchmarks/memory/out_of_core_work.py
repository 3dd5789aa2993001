"""Make the rows that are shuffled, merged and sorted out of core, and their expected sums."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dask.dataframe as dd
import numpy as np

from benchmarks.common.rows import ROW_BYTES, STRIDE, WEIGHT, WRAP, arrays_of

#: Rows whose products are summed at once; they fit into a cache.
PIECE = 1 << 16


def make(part: int, rows: int, total: int, backend: str) -> Any:
    """Make a partition of a permutation of the keys below ``total``."""
    position = arrays_of(backend).arange(part * rows, (part + 1) * rows, dtype="int64")
    key = position * STRIDE % total
    return importlib.import_module(backend).DataFrame({"key": key, "payload": position})


def collection(size: int, partitions: int, backend: str) -> Any:
    """Return a lazy frame of ``size`` bytes."""
    rows = size // ROW_BYTES // partitions
    meta = make(0, 1, 1, backend).iloc[:0]
    return dd.from_map(make, range(partitions), args=[rows, rows * partitions, backend], meta=meta)


def shuffled(size: int, partitions: int, backend: str) -> Any:
    """Shuffle by key, including the index, half as many bytes again."""
    return collection(size, partitions, backend).shuffle("key")


def shuffled_without_index(size: int, partitions: int, backend: str) -> Any:
    """Shuffle by key and drop the index, if the method supports that."""
    return collection(size, partitions, backend).shuffle("key", ignore_index=True)


def merged(size: int, partitions: int, backend: str) -> Any:
    """Merge two frames of half the size with the same keys."""
    left = collection(size // 2, partitions, backend)
    right = left.assign(weight=left.key * WEIGHT)[["key", "weight"]]
    return left.merge(right, on="key", broadcast=False)


def by_key(size: int, partitions: int, backend: str) -> Any:
    """Sort by key."""
    return collection(size, partitions, backend).set_index("key", npartitions=partitions)


OPERATIONS: dict[str, Callable[[int, int, str], Any]] = {
    "shuffle": shuffled,
    "shuffle-columns": shuffled_without_index,
    "merge": merged,
    "sort": by_key,
}


def expected(operation: str, size: int, partitions: int) -> tuple[int | None, ...]:
    """Compute the expected fingerprints by arithmetic: keys and payloads are permutations."""
    part = size // 2 if operation == "merge" else size
    rows = part // ROW_BYTES // partitions * partitions
    whole = rows * (rows - 1) // 2 % WRAP
    products = sum_of_products(rows)
    return rows, whole, whole, products, whole * WEIGHT % WRAP if operation == "merge" else None


def sum_of_products(rows: int) -> int:
    """Return the expected sum of key times payload, computed with numpy in pieces."""

    def of_piece(start: int) -> int:
        position = np.arange(start, min(start + PIECE, rows), dtype="int64")
        return int((position * STRIDE % rows * position).astype("u8").sum(dtype="u8"))

    with ThreadPoolExecutor(
        os.cpu_count()
    ) as threads:  # on one core 128 GiB would take longer than the shuffle
        return sum(threads.map(of_piece, range(0, rows, PIECE))) % WRAP
