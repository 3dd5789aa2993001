"""Define the operations, each computed on a cluster and, for the check, in pandas or numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import dask.dataframe as dd
import pandas as pd

from benchmarks.chaos.arrays import Rechunk
from benchmarks.chaos.files import Files
from benchmarks.chaos.frames import KEY, OTHER_ROW, ROW, make_partition, whole_frame
from benchmarks.chaos.operation import Operation, difference
from benchmarks.chaos.plan import FrameSpec, OperationSpec

Frame = Any
#: Limits on the rows and distinct keys of a join, which keep its result small: there are few rows per key.
JOIN_ROWS, JOIN_DISTINCT = 20_000, 2_000
How = Literal["inner", "left", "right", "outer"]
HOWS: tuple[How, ...] = ("inner", "left", "right", "outer")


#: Only integers are summed, since sums of floats depend on the order.
AGGREGATIONS = {ROW: ["sum", "min", "max", "count"], f"float_{ROW}": ["min", "max", "count"]}


@dataclass(frozen=True)
class FrameOperation(Operation):
    """Define an operation on frames.

    ``apply``: builds the collection from the collections of its inputs.
    ``expected``: returns the expected rows, given functions that create the inputs in pandas.
    ``compared``: how they are compared: options of :func:`~benchmarks.chaos.operation.difference`.
    ``narrow``: restricts a drawn specification to values that are valid for this operation.
    """

    apply: Callable[[OperationSpec, Frame, Frame], Frame]
    expected: Callable[[OperationSpec, Frame, Callable[[], Frame]], Frame]
    compared: Callable[[OperationSpec], Mapping[str, Any]]
    narrow: Callable[[OperationSpec], OperationSpec] = lambda spec: spec

    def build(self, spec: OperationSpec, backend: str) -> Frame:
        spec = self.narrow(spec)
        frame, other = collection(spec.frame, ROW, backend), collection(spec.other, OTHER_ROW, backend)
        if spec.persisted:
            frame = frame.persist()
        return self.apply(spec, frame, other)

    def check(self, spec: OperationSpec, parts: Sequence[pd.DataFrame], backend: str) -> str | None:
        spec = self.narrow(spec)
        frame = whole_frame(spec.frame, ROW, backend)
        expected = self.expected(spec, frame, lambda: whole_frame(spec.other, OTHER_ROW, backend))
        if expected.columns.nlevels > 1:
            expected, *parts = map(_flat, [expected, *parts])
        return difference(parts, expected, **self.compared(spec))


def collection(spec: FrameSpec, row: str, backend: str) -> Frame:
    """Create a collection whose partitions are created by tasks, so that they can be recomputed if lost."""
    empty = replace(spec, rows=0)
    return dd.from_map(
        make_partition,
        range(spec.partitions),
        args=[spec, row, backend],
        meta=make_partition(0, empty, row, backend),
    )


def _flat(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.set_axis(["-".join(name) for name in frame.columns], axis=1)


def _how(spec: OperationSpec) -> How:
    return HOWS[spec.variant % len(HOWS)]


def _narrow_join(spec: OperationSpec) -> OperationSpec:
    left = replace(spec.frame, rows=min(spec.frame.rows, JOIN_ROWS * 5))
    right = replace(
        spec.other,
        rows=min(spec.other.rows, JOIN_ROWS),
        key=left.key,
        distinct=max(spec.other.distinct, JOIN_DISTINCT),
        skewed=False,
    )
    return replace(spec, frame=left, other=right)


def _sortable(spec: OperationSpec) -> OperationSpec:
    """Restrict keys to numbers and times, since Dask needs their quantiles, and ensure a column of floats."""
    key = "int" if spec.frame.key == "string" else spec.frame.key
    columns = ("float", *(name for name in spec.frame.columns if name != "float"))
    return replace(spec, frame=replace(spec.frame, key=key, columns=columns))


def _sorted_by(spec: OperationSpec) -> str:
    return (KEY, f"float_{ROW}")[spec.variant & 1]


def _ascending(spec: OperationSpec) -> bool:
    return bool(spec.variant & 2)


OPERATIONS: dict[str, Operation] = {
    "shuffle": FrameOperation(
        lambda spec, frame, other: frame.shuffle(KEY, npartitions=spec.outputs),
        lambda spec, frame, other: frame,
        lambda spec: {"by": [ROW], "homes": KEY},
    ),
    "join": FrameOperation(
        lambda spec, frame, other: frame.merge(
            other, on=KEY, how=_how(spec), broadcast=False, npartitions=spec.outputs
        ),
        lambda spec, frame, other: frame.merge(other(), on=KEY, how=_how(spec)),
        lambda spec: {"by": [ROW, OTHER_ROW]},
        _narrow_join,
    ),
    "set_index": FrameOperation(
        lambda spec, frame, other: frame.set_index(KEY, npartitions=spec.outputs),
        lambda spec, frame, other: frame.set_index(KEY),
        lambda spec: {"by": [ROW], "index": True, "ordered_by": KEY},
        _sortable,
    ),
    "sort_values": FrameOperation(
        lambda spec, frame, other: frame.sort_values(
            _sorted_by(spec), ascending=_ascending(spec), npartitions=spec.outputs
        ),
        lambda spec, frame, other: frame,
        lambda spec: {"by": [ROW], "ordered_by": _sorted_by(spec), "ascending": _ascending(spec)},
        _sortable,
    ),
    "groupby": FrameOperation(
        lambda spec, frame, other: frame.groupby(KEY).agg(AGGREGATIONS, split_out=spec.outputs),
        lambda spec, frame, other: frame.groupby(KEY).agg(AGGREGATIONS),
        lambda spec: {"by": [KEY], "index": True},
        _sortable,
    ),
    "drop_duplicates": FrameOperation(
        lambda spec, frame, other: frame[[KEY]].drop_duplicates(split_out=spec.outputs),
        lambda spec, frame, other: frame[[KEY]].drop_duplicates(),
        lambda spec: {"by": [KEY]},
    ),
    "rechunk": Rechunk(),
    "files": Files(),
}
