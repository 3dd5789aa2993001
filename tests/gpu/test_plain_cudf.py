"""Pack cudf frames with and without the parts that contiguous split needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.helpers.clusters import canonical

pytestmark = pytest.mark.gpu
OUTPUTS = 7


@pytest.fixture(scope="module")
def table() -> Any:
    from dask_gpurt.device.cuda import CudaDevice
    from dask_gpurt.frames.cudf import CudfTable

    return CudfTable(CudaDevice())


@pytest.fixture(scope="module")
def room(table: Any) -> Any:
    from dask_gpurt.frames.cudf import _Spare

    pool = table.device.create_pool(64 << 20)
    yield _Spare(pool)
    pool.close()


def frame_of(rows: int, seed: int, *, nulls: bool = False) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "_partitions": random.integers(0, OUTPUTS, rows).astype("int32"),
            "flag": random.random(rows) < 0.5,
            "x": random.random(rows),
            "small": random.integers(-100, 100, rows).astype("int8"),
            "when": pd.Timestamp("2020-01-01") + pd.to_timedelta(random.integers(0, 10**6, rows), "s"),
            "maybe": pd.array(np.where(random.random(rows) < (0.3 if nulls else -1), None, 5), dtype="Int64"),
        },
        index=pd.Index(random.permutation(rows) + seed * 10**6, name="row"),
    )


def test_rows_keep_their_order_where_asked(table: Any, room: Any) -> None:
    """Libcudf's hash partitioning has threads of a block race for the next place in a partition."""
    import cudf

    from dask_gpurt.frames import Part

    targets = np.random.default_rng(0).integers(0, OUTPUTS, 300_000).astype("int32")
    frame = cudf.DataFrame({"_partitions": targets, "row": np.arange(len(targets)), "text": "abc"})
    (piece,) = table.split(
        frame, "_partitions", [range(OUTPUTS)], OUTPUTS, drop_column=True, ignore_index=True, in_order=True
    )
    packed = table.pack(piece, room)
    table.settle()
    for at in range(OUTPUTS):
        part = Part(packed.header, packed.block.buffer, piece.offsets, at, {})
        found = table.assemble([part], frame[["row", "text"]].iloc[:0], ignore_index=True)
        assert found.row.to_numpy().tolist() == np.flatnonzero(targets == at).tolist()
    table.fence()()


@pytest.mark.parametrize("groups", [[[0, 1, 2], [3, 4], [5, 6]], [[i] for i in range(OUTPUTS)], [[0, 2, 5]]])
@pytest.mark.parametrize("nulls", [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize("halves", [False, True])
def test_parts_come_back_as_they_went_in(
    table: Any, room: Any, groups: list[list[int]], nulls: tuple[bool, bool], halves: bool
) -> None:
    import cudf

    from dask_gpurt.frames import Part
    from dask_gpurt.frames.cudf import PlainRows

    frames = [frame_of(1000 + 300 * i, i, nulls=null) for i, null in enumerate(nulls)]
    parts: dict[int, list[Part]] = {}
    for frame, null in zip(frames, nulls, strict=True):
        split = table.split(
            cudf.from_pandas(frame), "_partitions", groups, OUTPUTS, drop_column=True, ignore_index=False
        )
        for piece in split:
            assert isinstance(piece.rows, PlainRows) is not null
            for part in piece.halves(table.cut) if halves else [piece]:
                packed = table.pack(part, room)
                table.settle()
                for at, output in enumerate(part.partitions):
                    read = Part(packed.header, packed.block.buffer, part.offsets, at, {})
                    parts.setdefault(output, []).append(read)
    meta = cudf.from_pandas(frames[0].drop(columns="_partitions").iloc[:0])
    assert set(parts) == {output for group in groups for output in group}
    for output, mine in parts.items():
        found = table.assemble(mine, meta, ignore_index=False).to_pandas()
        table.fence()()
        rows = [frame[frame._partitions == output].drop(columns="_partitions") for frame in frames]
        expected = cudf.from_pandas(pd.concat(rows)).to_pandas()
        pd.testing.assert_frame_equal(canonical(found), canonical(expected))
