"""Rechunk random arrays on a cluster, and check every element."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd

from benchmarks.chaos.operation import Operation
from benchmarks.chaos.plan import FrameSpec, OperationSpec

Sizes = tuple[int, ...]
#: Columns of an array, which has as many elements as a frame has rows.
COLUMNS = 24


def array(spec: FrameSpec, backend: str) -> Any:
    """Create an array whose chunks are created by tasks, so that lost chunks can be recomputed."""
    rows = _divided(_rows(spec), spec.partitions)
    meta = _chunk_of(spec, 0, 0, backend)
    return da.map_blocks(_chunk, chunks=(rows, (COLUMNS,)), dtype="f8", meta=meta, spec=spec, backend=backend)


class Rechunk(Operation):
    """Rechunk an array by columns, by other rows, or by both, optionally after a transposition."""

    def build(self, spec: OperationSpec, backend: str) -> Any:
        before = array(spec.frame, backend)
        if spec.persisted:
            before = before.persist()
        return (before.T if _transposed(spec) else before).rechunk(_new_chunks(spec), method="p2p")

    def check(self, spec: OperationSpec, parts: Sequence[pd.DataFrame], backend: str) -> str | None:
        return _difference(spec, parts)


def _difference(spec: OperationSpec, parts: Sequence[pd.DataFrame]) -> str | None:
    """Describe the first wrong chunk, given all chunks as frames in array order; None if all are right."""
    rows = _divided(_rows(spec.frame), spec.frame.partitions)
    whole = np.concatenate([_chunk_of(spec.frame, at, size, "pandas") for at, size in enumerate(rows)])
    whole = whole.T if _transposed(spec) else whole
    corners = [np.concatenate([[0], np.cumsum(sizes)]) for sizes in _new_chunks(spec)]
    boxes = list(product(*(pairwise(ends) for ends in corners)))
    if len(parts) != len(boxes):
        return f"{len(parts)} chunks, expected {len(boxes)}"
    for part, ((top, bottom), (left, right)) in zip(parts, boxes, strict=True):
        expected, found = whole[top:bottom, left:right], part.to_numpy()
        if found.shape != expected.shape:
            return f"chunk {top}:{bottom}, {left}:{right} has the shape {found.shape}"
        if wrong := int((found != expected).sum()):
            return f"{wrong} of {expected.size} elements of chunk {top}:{bottom}, {left}:{right} are wrong"
    return None


def _rows(spec: FrameSpec) -> int:
    return max(spec.rows // COLUMNS, spec.partitions, COLUMNS)


def _transposed(spec: OperationSpec) -> bool:
    return bool(spec.variant & 4)


def _new_chunks(spec: OperationSpec) -> tuple[Sizes, Sizes]:
    """Return the new chunks of the (possibly transposed) array."""
    rows, columns = _divided(_rows(spec.frame), spec.outputs), _divided(COLUMNS, spec.outputs)
    by_columns, by_rows = ((_rows(spec.frame),), columns), (rows, (COLUMNS,))
    by_both = (_divided(_rows(spec.frame), 3), columns)
    one, other = (by_columns, by_rows, by_both)[spec.variant % 3]
    return (other, one) if _transposed(spec) else (one, other)


def _divided(total: int, parts: int) -> Sizes:
    """Divide a length into non-empty parts."""
    parts = min(parts, total)
    ends = [total * at // parts for at in range(parts + 1)]
    return tuple(stop - start for start, stop in pairwise(ends))


def _chunk(spec: FrameSpec, backend: str, block_info: Any = None) -> Any:
    place = block_info[None]
    return _chunk_of(spec, place["chunk-location"][0], place["chunk-shape"][0], backend)


def _chunk_of(spec: FrameSpec, number: int, rows: int, backend: str) -> Any:
    values = np.random.default_rng((spec.seed, number)).random((rows, COLUMNS))
    return importlib.import_module("cupy").asarray(values) if backend == "cudf" else values
