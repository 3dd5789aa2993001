"""Re-export and call private parts of Dask's p2p rechunk."""

from __future__ import annotations

from typing import Any

from dask.array.core import concatenate3
from dask.array.rechunk import old_to_new as _old_to_new
from distributed.shuffle._rechunk import ArrayRechunkSpec

__all__ = ["ArrayRechunkSpec", "concatenate", "old_to_new"]


def old_to_new(
    old: tuple[tuple[float, ...], ...], new: tuple[tuple[float, ...], ...]
) -> list[list[list[tuple[int, slice]]]]:
    """Return for each axis and new chunk the old chunks that it consists of, with a slice of each."""
    found: list[list[list[tuple[int, slice]]]] = _old_to_new(old, new)
    return found


def concatenate(arrays: list[Any]) -> Any:
    """Concatenate arrays in nested lists, one level for each axis, as Dask does."""
    return concatenate3(arrays)
