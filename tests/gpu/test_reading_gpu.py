"""Read files on a CUDA stream of their own, beside tasks that compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

import dask_gpurt
from tests.helpers.clusters import cluster

pytestmark = pytest.mark.gpu

#: Runs for a given number of clocks.
SPIN = r"""
extern "C" __global__ void spin(long long clocks) {
    for (long long until = clock64() + clocks; clock64() < until;);
}
"""
#: About half a second.
CLOCKS = 800_000_000
SIZE = 64 << 20
FILES, ROWS = 12, 200_000


@pytest.fixture
def device() -> Any:
    import cupy
    import rmm

    from dask_gpurt.device.cuda import CudaDevice

    before = rmm.mr.get_current_device_resource()
    # A pool that has room for one column only, so that the next one takes the same memory. Arrays of cupy do
    # not come from it, even if another test of this process has told cupy to allocate from rmm.
    room = SIZE + (1 << 20)
    rmm.mr.set_current_device_resource(rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), room, room))
    with cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc):
        yield CudaDevice()
    rmm.mr.set_current_device_resource(before)


def busy() -> None:
    """Keep the user's stream busy."""
    import cupy

    cupy.RawKernel(SPIN, "spin")((1,), (1,), (CLOCKS,))


def column(value: int, beside: Any) -> Any:
    """Return a column that takes nearly the whole pool, made on a stream of this thread."""
    import pylibcudf as plc

    uint8 = plc.DataType(plc.TypeId.UINT8)
    scalar = plc.Scalar.from_py(value, uint8, stream=beside.stream)
    return plc.Column.from_scalar(scalar, SIZE, stream=beside.stream)


def as_array(column: Any) -> Any:
    import cupy

    return cupy.asarray(column.data()).view("uint8")


def load_kernels(device: Any) -> Any:
    """Run what the tests run, so that nothing is loaded while the device is busy; return an array."""
    import cupy

    beside = device.beside()
    first = column(0, beside)
    beside.join([first])
    kept = as_array(first).copy()
    kept[:] = cupy.zeros(SIZE, "uint8")
    busy()
    cupy.cuda.Device().synchronize()
    return kept


def test_memory_that_was_read_is_not_written_again_before_the_users_kernels_have_used_it(device: Any) -> None:
    kept = load_kernels(device)
    beside = device.beside()
    first = column(1, beside)
    beside.join([first])
    beside = device.beside()
    busy()
    kept[:] = as_array(first)  # on the user's stream, after the kernel
    where = first.data().ptr
    del first
    second = column(2, beside)
    assert second.data().ptr == where
    assert bool((kept == 1).all())


def test_memory_is_used_by_the_user_after_the_work_of_the_read(device: Any) -> None:
    import cupy

    kept = load_kernels(device)
    beside = device.beside()
    with cupy.cuda.Stream.from_external(beside.stream):
        busy()
    first = column(1, beside)
    beside.join([first])
    kept[:] = as_array(first)
    del first
    second = column(2, beside)
    assert second.size() == SIZE
    assert bool((kept == 1).all())


def test_a_read_does_not_wait_for_kernels_that_are_launched_meanwhile(device: Any) -> None:
    import cupy

    load_kernels(device)
    done = cupy.cuda.Event()
    beside = device.beside()
    busy()
    done.record(cupy.cuda.Stream.null)
    first = column(1, beside)
    beside.stream.synchronize()
    assert not done.done
    beside.join([first])
    done.synchronize()


def test_memory_of_others_is_not_taken_over(device: Any) -> None:
    import cupy
    import pylibcudf as plc

    with pytest.raises(TypeError):
        device.beside().join([plc.Column.from_array(cupy.zeros(4))])


def test_what_is_read_beside_compute_is_what_the_files_have(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for part in range(FILES):
        values = {"key": random.integers(0, 1000, ROWS), "x": random.random(ROWS), "text": f"part {part}"}
        pd.DataFrame(values).to_parquet(tmp_path / f"{part}.parquet")
    expected = pd.read_parquet(tmp_path)
    with cluster("cudf", reads__beside=2) as client, dask.config.set({"dataframe.backend": "cudf"}):
        frame = dd.read_parquet(tmp_path, blocksize=None)  # a partition for each file
        for turn in range(3):
            kept = frame[frame.x > turn / 4]
            wanted = expected[expected.x > turn / 4]
            found = kept.merge(kept.groupby("key").x.max().reset_index(), on=["key", "x"])
            rows = found.compute().to_pandas().sort_values("key", ignore_index=True)
            best = wanted.loc[wanted.groupby("key").x.idxmax()].sort_values("key", ignore_index=True)
            pd.testing.assert_frame_equal(rows[["key", "x", "text"]], best, check_dtype=False)
        report = dask_gpurt.report(client)
        assert report["counters"]["reads.aside"] > 0
        assert report["counters"]["reads.streams"] >= 3 * FILES
        assert "reads.share-stream" not in report["fallbacks"]
