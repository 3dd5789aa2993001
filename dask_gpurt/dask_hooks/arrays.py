"""Name the parts of Dask's rechunk of arrays, and call them."""

from __future__ import annotations

from typing import Any

from dask.array.core import concatenate3
from dask.array.rechunk import old_to_new as _old_to_new
from distributed.shuffle._rechunk import ArrayRechunkSpec

__all__ = ["ArrayRechunkSpec", "concatenate", "old_to_new"]


def old_to_new(
    old: tuple[tuple[float, ...], ...], new: tuple[tuple[float, ...], ...]
) -> list[list[list[tuple[int, slice]]]]:
    """Return what new chunks are made of: along each axis, for each, the old chunks and a slice of each."""
    found: list[list[list[tuple[int, slice]]]] = _old_to_new(old, new)
    return found


def concatenate(arrays: list[Any]) -> Any:
    """Return one array of arrays in nested lists, a level for each axis, as Dask makes it."""
    return concatenate3(arrays)
