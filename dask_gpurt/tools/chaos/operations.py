"""Define the operations, each computed on a cluster and, for the check, in pandas or numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import dask.dataframe as dd
import pandas as pd

from dask_gpurt.tools.chaos.arrays import Rechunk
from dask_gpurt.tools.chaos.compare import difference
from dask_gpurt.tools.chaos.files import Files
from dask_gpurt.tools.chaos.frames import KEY, OTHER_ROW, ROW, make_partition, whole_frame
from dask_gpurt.tools.chaos.operation import Operation
from dask_gpurt.tools.chaos.plan import FrameSpec, OperationSpec

Frame = Any
#: Limits on the rows and distinct keys of a join, which keep its result small: there are few rows per key.
JOIN_ROWS, JOIN_DISTINCT = 20_000, 2_000
How = Literal["inner", "left", "right", "outer"]
HOWS: tuple[How, ...] = ("inner", "left", "right", "outer")


@dataclass(frozen=True)
class FrameOperation(Operation):
    """Define an operation on frames.

    Attributes
    ----------
    apply
        Builds the collection from the collections of its inputs.
    compare
        Describes the difference of the result's partitions from the expected ones, given the inputs in
        pandas.
    narrow
        Restricts a drawn specification to values that are valid for this operation.
    """

    apply: Callable[[OperationSpec, Frame, Frame], Frame]
    compare: Callable[
        [OperationSpec, Sequence[pd.DataFrame], pd.DataFrame, Callable[[], pd.DataFrame]], str | None
    ]
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
        return self.compare(spec, parts, frame, lambda: whole_frame(spec.other, OTHER_ROW, backend))


def collection(spec: FrameSpec, row: str, backend: str) -> Frame:
    """Create a collection whose partitions are created by tasks, so that they can be recomputed if lost."""
    empty = replace(spec, rows=0)
    return dd.from_map(
        make_partition,
        range(spec.partitions),
        args=[spec, row, backend],
        meta=make_partition(0, empty, row, backend),
    )


# ---- shuffle -------------------------------------------------------------------------


def _shuffle(spec: OperationSpec, frame: Frame, other: Frame) -> Frame:
    return frame.shuffle(KEY, npartitions=spec.outputs)


def _check_shuffle(
    spec: OperationSpec, parts: Sequence[pd.DataFrame], frame: pd.DataFrame, _: Any
) -> str | None:
    return difference(parts, frame.reset_index(drop=True), by=[ROW], homes=KEY)


# ---- join ----------------------------------------------------------------------------


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


def _join(spec: OperationSpec, frame: Frame, other: Frame) -> Frame:
    return frame.merge(other, on=KEY, how=_how(spec), broadcast=False, npartitions=spec.outputs)


def _check_join(
    spec: OperationSpec, parts: Sequence[pd.DataFrame], frame: pd.DataFrame, other: Callable[[], pd.DataFrame]
) -> str | None:
    return difference(parts, frame.merge(other(), on=KEY, how=_how(spec)), by=[ROW, OTHER_ROW])


# ---- sorts ---------------------------------------------------------------------------


def _sortable(spec: OperationSpec) -> OperationSpec:
    """Restrict keys to numbers and times, since Dask needs their quantiles, and ensure a column of floats."""
    key = "int" if spec.frame.key == "string" else spec.frame.key
    columns = ("float", *(name for name in spec.frame.columns if name != "float"))
    return replace(spec, frame=replace(spec.frame, key=key, columns=columns))


def _set_index(spec: OperationSpec, frame: Frame, other: Frame) -> Frame:
    return frame.set_index(KEY, npartitions=spec.outputs)


def _check_set_index(
    spec: OperationSpec, parts: Sequence[pd.DataFrame], frame: pd.DataFrame, _: Any
) -> str | None:
    return difference(parts, frame.set_index(KEY), by=[ROW], index=True, ordered_by=KEY)


def _sorted_by(spec: OperationSpec) -> str:
    return (KEY, f"float_{ROW}")[spec.variant & 1]


def _ascending(spec: OperationSpec) -> bool:
    return bool(spec.variant & 2)


def _sort_values(spec: OperationSpec, frame: Frame, other: Frame) -> Frame:
    return frame.sort_values(_sorted_by(spec), ascending=_ascending(spec), npartitions=spec.outputs)


def _check_sort_values(
    spec: OperationSpec, parts: Sequence[pd.DataFrame], frame: pd.DataFrame, _: Any
) -> str | None:
    return difference(
        parts,
        frame.reset_index(drop=True),
        by=[ROW],
        ordered_by=_sorted_by(spec),
        ascending=_ascending(spec),
    )


# ---- groupby and drop_duplicates -----------------------------------------------------


#: Only integers are summed, since sums of floats depend on the order.
AGGREGATIONS = {ROW: ["sum", "min", "max", "count"], f"float_{ROW}": ["min", "max", "count"]}


def _groupby(spec: OperationSpec, frame: Frame, other: Frame) -> Frame:
    return frame.groupby(KEY).agg(AGGREGATIONS, split_out=spec.outputs)


def _flat(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.set_axis(["-".join(name) for name in frame.columns], axis=1)


def _check_groupby(
    spec: OperationSpec, parts: Sequence[pd.DataFrame], frame: pd.DataFrame, _: Any
) -> str | None:
    expected = _flat(frame.groupby(KEY).agg(AGGREGATIONS))
    return difference([_flat(part) for part in parts], expected, by=[KEY], index=True)


def _drop_duplicates(spec: OperationSpec, frame: Frame, other: Frame) -> Frame:
    return frame[[KEY]].drop_duplicates(split_out=spec.outputs)


def _check_drop_duplicates(
    spec: OperationSpec, parts: Sequence[pd.DataFrame], frame: pd.DataFrame, _: Any
) -> str | None:
    return difference(parts, frame[[KEY]].drop_duplicates(), by=[KEY])


OPERATIONS: dict[str, Operation] = {
    "shuffle": FrameOperation(_shuffle, _check_shuffle),
    "join": FrameOperation(_join, _check_join, _narrow_join),
    "set_index": FrameOperation(_set_index, _check_set_index, _sortable),
    "sort_values": FrameOperation(_sort_values, _check_sort_values, _sortable),
    "groupby": FrameOperation(_groupby, _check_groupby, _sortable),
    "drop_duplicates": FrameOperation(_drop_duplicates, _check_drop_duplicates),
    "rechunk": Rechunk(),
    "files": Files(),
}
