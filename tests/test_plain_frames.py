"""pandas frames of plain numbers go through a packed buffer as all others do, without pickle."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pandas as pd
import pytest
from dask.dataframe.dask_expr._shuffle import AssignPartitioningIndex
from pandas.testing import assert_frame_equal

from dask_gpurt.device import Block
from dask_gpurt.device.host import HostDevice
from dask_gpurt.table import Hashed, Part
from dask_gpurt.table.pandas import PandasTable
from dask_gpurt.table.plain import Layout

OUTPUTS = 7


class Heap:
    """Room without an end."""

    def allocate(self, nbytes: int) -> Block:
        return Block(0, nbytes, np.empty(nbytes, np.uint8))

    def give_back(self, block: Block) -> None:
        pass


def frame_of(index: pd.Index, seed: int = 0) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    rows = len(index)
    frame = pd.DataFrame(
        {
            "key": random.integers(-50, 50, rows),
            "flag": random.random(rows) < 0.5,
            "x": random.random(rows),
            "small": random.integers(0, 9, rows).astype("int8"),
            "y": random.random(rows),
        },
        index=index,
    )
    frame.columns = ["key", "flag", "x", "small", "x"]  # labels may come twice
    return frame


def hashed(frame: pd.DataFrame, by: list[str]) -> Hashed:
    assign = functools.partial(
        AssignPartitioningIndex.operation, frame, by, "_partitions", OUTPUTS, frame[:0], False
    )
    return Hashed(frame, tuple(by), frame, frame[:0], assign)


def outputs(table: PandasTable, frames: list[Any], groups: list[list[int]], **how: Any) -> list[pd.DataFrame]:
    parts: dict[int, list[Part]] = {output: [] for group in groups for output in group}
    for frame in frames:
        for piece in table.split(frame, "_partitions", groups, OUTPUTS, drop_column=True, **how):
            if piece is not None:
                packed = table.pack(piece, Heap())
                for at, output in enumerate(piece.partitions):
                    parts[output].append(Part(packed.header, packed.block.buffer, piece.offsets, at, {}))
    meta = frames[0].frame[:0]
    return [table.assemble(parts[output], meta, ignore_index=how["ignore_index"]) for output in sorted(parts)]


def expected(frames: list[Hashed]) -> list[pd.DataFrame]:
    rows = pd.concat([frame.assign() for frame in frames])
    return [rows[rows["_partitions"] == p].drop(columns="_partitions") for p in range(OUTPUTS)]


@pytest.mark.parametrize("by", [["key"], ["key", "small"]])
@pytest.mark.parametrize("ignore_index", [False, True])
@pytest.mark.parametrize(
    "index",
    [pd.RangeIndex(0, 60_000, 3), pd.Index(np.linspace(0, 1, 20_000), name="when")],
    ids=["counted", "named"],
)
def test_rows_go_where_dask_sends_them(index: pd.Index, ignore_index: bool, by: list[str]) -> None:
    frames = [hashed(frame_of(index, seed), by) for seed in range(3)]
    table = PandasTable(HostDevice(1 << 30))
    found = outputs(table, frames, [[2, 3, 5], [0, 1], [4, 6]], ignore_index=ignore_index)
    for frame, wanted in zip(found, expected(frames), strict=True):
        assert_frame_equal(frame, wanted.reset_index(drop=True) if ignore_index else wanted)
        assert len(frame._mgr.blocks) == 4  # one for each dtype, in memory of their own


def test_dtypes_that_differ_are_brought_together() -> None:
    index = pd.RangeIndex(1000)
    ints, floats = frame_of(index), frame_of(index, 1).astype({"key": "f8"})
    frames = [hashed(frame, ["key"]) for frame in (ints, floats)]
    table = PandasTable(HostDevice(1 << 30))
    found = outputs(table, frames, [[p] for p in range(OUTPUTS)], ignore_index=False)
    for frame, wanted in zip(found, expected(frames), strict=True):
        assert_frame_equal(frame, wanted)


@pytest.mark.parametrize(
    "frame",
    [
        pd.DataFrame({"a": [1], "b": ["text"]}),
        pd.DataFrame({"a": pd.array([1, None], "Int64")}),
        pd.DataFrame({"a": [1]}, index=pd.MultiIndex.from_tuples([(1, 2)])),
        pd.DataFrame({"a": [1]}, index=pd.date_range("2020", periods=1)),
        pd.DataFrame(index=[1, 2]),
    ],
    ids=["text", "missing", "levels", "dates", "no columns"],
)
def test_others_are_pickled(frame: pd.DataFrame) -> None:
    assert Layout.of(frame, ignore_index=False) is None
