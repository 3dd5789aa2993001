"""Pack pandas frames of numbers, dates and strings through the same buffers, without pickle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from dask.dataframe.dask_expr._shuffle import AssignPartitioningIndex
from dask.dataframe.shuffle import set_partitions_pre
from hypothesis import given
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal

from dask_gpurt.device import Block, PoolFull
from dask_gpurt.device.host import HostDevice
from dask_gpurt.frames import Hashed, Part, Ranged, Routed
from dask_gpurt.frames.columns import Columns, PandasLayout
from dask_gpurt.frames.pandas import PandasTable, order_of

OUTPUTS = 7
NAMES = np.array(["", "a", "Grüße", None, "東京" * 9], dtype=object)


class Heap:
    """Fake an unlimited pool."""

    def allocate(self, nbytes: int) -> Block:
        return Block(0, nbytes, np.empty(nbytes, np.uint8))

    def give_back(self, block: Block) -> None:
        pass


class Full(Heap):
    """Fake a pool without room."""

    def allocate(self, nbytes: int) -> Block:
        raise PoolFull(nbytes)


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
            "name": pd.array(random.choice(NAMES, rows), dtype="str"),
            "when": pd.Timestamp("2026-11-25") + pd.to_timedelta(random.integers(0, 90, rows), unit="D"),
            "code": pd.array(random.choice(NAMES, rows), dtype="string[pyarrow]"),
            "for": pd.to_timedelta(random.integers(0, 90, rows), unit="s"),
        },
        index=index,
    )
    frame.loc[frame.index[::7], "when"] = pd.NaT
    # Labels may be duplicated.
    frame.columns = ["key", "flag", "x", "small", "x", "name", "when", "code", "for"]
    return frame


def hashed(frame: pd.DataFrame, by: list[str]) -> Hashed:
    def assign(rows: pd.DataFrame) -> pd.DataFrame:
        return AssignPartitioningIndex.operation(rows, by, "_partitions", OUTPUTS, frame[:0], False)

    return Hashed(frame, tuple(by), frame, frame[:0], assign)


def ranged(frame: pd.DataFrame, by: str, divisions: pd.Series) -> Ranged:
    def assign(rows: pd.DataFrame) -> pd.DataFrame:
        return rows.assign(_partitions=set_partitions_pre(rows[by], divisions))

    return Ranged(frame, by, divisions, assign)


def outputs(table: PandasTable, frames: list[Any], groups: list[list[int]], **how: Any) -> list[pd.DataFrame]:
    parts: dict[int, list[Part]] = {output: [] for group in groups for output in group}
    for frame in frames:
        for piece in table.split(frame, "_partitions", groups, OUTPUTS, drop_column=True, **how):
            if piece is not None:
                packed = table.pack(piece, Heap())
                for at, output in enumerate(piece.partitions):
                    parts[output].append(Part(packed.header, packed.block.buffer, piece.offsets, at, {}))
    meta = frames[0].frame[:0]
    return [table.assemble(parts[output], meta, **how) for output in sorted(parts)]


def expected(frames: Sequence[Routed]) -> list[pd.DataFrame]:
    rows = pd.concat([frame.assigned() for frame in frames])
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
        assert len(frame._mgr.blocks) == 4 + 4  # one for each dtype of numbers, and for each other column


@pytest.mark.parametrize(
    "frame",
    [
        pd.DataFrame({"a": [1], "b": pd.array(["text"], dtype="string[python]")}),
        pd.DataFrame({"a": [1], "b": pd.Categorical(["text"])}),
        pd.DataFrame({"a": pd.to_datetime(["2026-11-25"]).tz_localize("UTC")}),
        pd.DataFrame({"a": pd.array([1, None], "Int64")}),
        pd.DataFrame({"a": [1]}, index=pd.MultiIndex.from_tuples([(1, 2)])),
        pd.DataFrame({"a": [1]}, index=pd.date_range("2020", periods=1)),
        pd.DataFrame(index=[1, 2]),
    ],
    ids=["python text", "categories", "zones", "missing", "levels", "dates", "no columns"],
)
def test_others_are_pickled(frame: pd.DataFrame) -> None:
    assert PandasLayout.of(frame, ignore_index=False) is None


DIVISIONS = {
    "even": [-50, -30, -20, -5, 10, 12, 40, 49],
    "twice": [-50, -50, -20, -20, 10, 12, 49, 49],
    "rows before the first": [-20, -10, 0, 10, 20, 30, 40, 50],
    "rows behind the last": [-50, -49, -48, -47, -46, -45, -44, -43],
    "floats": np.linspace(-50.5, 50.5, OUTPUTS + 1),
}


@pytest.mark.parametrize("by", ["key", "small", "flag"])
@pytest.mark.parametrize("ignore_index", [False, True])
@pytest.mark.parametrize("divisions", DIVISIONS.values(), ids=list(DIVISIONS))
def test_rows_go_into_the_ranges_that_dask_says(divisions: Any, ignore_index: bool, by: str) -> None:
    frames = [ranged(frame_of(pd.RangeIndex(5000), seed), by, pd.Series(divisions)) for seed in range(3)]
    table = PandasTable(HostDevice(1 << 30))
    groups = [[2, 3, 5], [0, 1], [4, 6]]
    found = outputs(table, frames, groups, ignore_index=ignore_index)
    for frame, wanted in zip(found, expected(frames), strict=True):
        assert_frame_equal(frame, wanted.reset_index(drop=True) if ignore_index else wanted)


TEXTS = st.lists(st.tuples(st.integers(0, OUTPUTS - 1), st.none() | st.text(max_size=9)), max_size=20)


def assemble_all(
    table: PandasTable, parts: dict[int, list[Part]], like: pd.DataFrame
) -> dict[int, pd.DataFrame]:
    return {output: table.assemble(mine, like, ignore_index=False) for output, mine in parts.items() if mine}


@given(st.lists(TEXTS, min_size=1, max_size=4), st.integers(0, 9), st.booleans())
def test_any_strings_arrive(inputs: list[list[tuple[int, str | None]]], cut_off: int, halved: bool) -> None:
    """Of views and of several chunks; pieces that are divided for want of room may be empty."""
    frames = [
        pd.concat(
            [pd.DataFrame({"_partitions": [to], "name": pd.array([text], dtype="str")}) for to, text in rows]
        )[cut_off:]
        for rows in inputs
        if rows
    ]
    table, parts = PandasTable(HostDevice(1 << 30)), dict[int, list[Part]]()
    for frame in frames:
        for piece in table.split(
            frame, "_partitions", [[0, 2, 4, 6], [1, 3, 5]], OUTPUTS, drop_column=True, ignore_index=False
        ):
            for each in () if piece is None else piece.halves(table.cut) if halved else (piece,):
                packed = table.pack(each, Heap())
                for at, output in enumerate(each.partitions):
                    part = Part(packed.header, packed.block.buffer, each.offsets, at, {})
                    parts.setdefault(output, []).append(part)
    like = pd.DataFrame({"name": pd.array([], dtype="str")})
    found = assemble_all(table, parts, like)
    for mine in parts.values():
        for part in mine:
            part.buffer[:] = 0xFF  # nothing is a view of a buffer
    for output, frame in found.items():
        wanted = pd.concat([rows[rows["_partitions"] == output] for rows in frames])[["name"]]
        assert_frame_equal(frame, wanted)


def test_strings_that_find_no_room_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = pd.DataFrame({"_partitions": [1, 0], "name": ["b", "a"]})
    table, taken = PandasTable(HostDevice(1 << 30)), list[np.ndarray]()
    texts = Columns.texts
    monkeypatch.setattr(Columns, "texts", lambda self, order: taken.append(order) or texts(self, order))
    (piece,) = table.split(frame, "_partitions", [[0, 1]], OUTPUTS, drop_column=True, ignore_index=True)
    assert piece is not None
    for _ in range(3):
        with pytest.raises(PoolFull):
            table.pack(piece, Full())
    packed = table.pack(piece, Heap())
    parts = [Part(packed.header, packed.block.buffer, piece.offsets, at, {}) for at in (0, 1)]
    found = table.assemble(parts, frame[["name"]], ignore_index=True)
    assert found["name"].tolist() == ["a", "b"]
    assert len(taken) == 1


NUMBERS = st.sampled_from(["i1", "u1", "i4", "i8", "u8"]).flatmap(
    lambda dtype: st.tuples(
        st.just(dtype),
        st.integers(int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)),
        st.lists(st.integers(0, 2**70), max_size=50),
    )
)


@given(NUMBERS)
def test_numbers_are_ordered_as_by_a_stable_sort(drawn: tuple[str, int, list[int]]) -> None:
    dtype, lowest, steps = drawn
    highest = int(np.iinfo(dtype).max)
    numbers = np.array([lowest + step % (highest - lowest + 1) for step in steps], dtype)
    order = order_of(numbers)
    if order is None:  # only if the values are widely spread
        assert int(numbers.max()) - int(numbers.min()) >= 2**56
    else:
        assert order.tolist() == np.argsort(numbers, kind="stable").tolist()


def test_keys_that_are_no_integers_have_no_order() -> None:
    assert order_of(np.array([0.5, np.nan])) is None
    assert order_of(np.array([False, True])) is None
