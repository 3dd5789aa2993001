"""Read files on a CUDA stream of their own, beside tasks that compute."""

from __future__ import annotations

import gc
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
    # A pool that has room for one buffer only, so that the next one takes the same memory. Arrays of cupy do
    # not come from it, even if another test of this process has told cupy to allocate from rmm.
    rmm.mr.set_current_device_resource(rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), SIZE, SIZE))
    with cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc):
        yield CudaDevice()
    rmm.mr.set_current_device_resource(before)


def busy() -> None:
    """Keep the user's stream busy."""
    import cupy

    cupy.RawKernel(SPIN, "spin")((1,), (1,), (CLOCKS,))


def as_array(buffer: Any) -> Any:
    import cupy

    return cupy.asarray(buffer).view("uint8")


def load_kernels(kept: Any) -> None:
    """Run what the tests run, so that nothing is loaded while the device is busy."""
    import cupy

    kept[:] = 0
    kept[:] = cupy.zeros(SIZE, "uint8")
    busy()
    cupy.cuda.Stream.null.synchronize()


def test_memory_that_was_read_is_not_written_again_before_the_users_kernels_have_used_it(device: Any) -> None:
    import cupy
    import rmm

    load_kernels(kept := cupy.empty(SIZE, "uint8"))
    with device.reading() as (stream, memory):
        first = rmm.DeviceBuffer(size=SIZE, stream=stream, mr=memory)
        with cupy.cuda.Stream.from_external(stream):
            as_array(first)[:] = 1
    with device.reading() as (stream, memory):
        busy()
        kept[:] = as_array(first)  # on the user's stream, after the kernel
        where = first.ptr
        del first
        second = rmm.DeviceBuffer(size=SIZE, stream=stream, mr=memory)
        assert second.ptr == where
        with cupy.cuda.Stream.from_external(stream):
            as_array(second)[:] = 2
    assert bool((kept == 1).all())


def test_memory_that_a_read_frees_is_not_written_by_the_user_before_the_read_has_used_it(device: Any) -> None:
    import cupy
    import rmm

    load_kernels(kept := cupy.empty(SIZE, "uint8"))
    with device.reading() as (stream, memory):
        first = rmm.DeviceBuffer(size=SIZE, stream=stream, mr=memory)
        with cupy.cuda.Stream.from_external(stream):
            as_array(first)[:] = 1
            busy()
            kept[:] = as_array(first)
        where = first.ptr
        del first
        second = rmm.DeviceBuffer(size=SIZE)
        assert second.ptr == where
        as_array(second)[:] = 2  # on the user's stream
    cupy.cuda.Stream.null.synchronize()
    assert bool((kept == 1).all())


def test_the_garbage_collector_may_free_what_was_read(device: Any) -> None:
    import rmm

    class Holder:
        """Refer to itself, so that only the collector can free it."""

        def __init__(self, held: Any) -> None:
            self.me, self.held = self, held

    with device.reading() as (stream, memory):
        Holder(rmm.DeviceBuffer(size=SIZE, stream=stream, mr=memory))
    del memory
    gc.collect()
    assert rmm.DeviceBuffer(size=SIZE).size == SIZE  # the pool has room for one


def test_a_read_does_not_wait_for_kernels_that_are_launched_meanwhile(device: Any) -> None:
    import cupy

    busy()
    cupy.cuda.Stream.null.synchronize()
    done = cupy.cuda.Event()
    with device.reading():
        busy()
        done.record(cupy.cuda.Stream.null)
    assert not done.done
    done.synchronize()


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
