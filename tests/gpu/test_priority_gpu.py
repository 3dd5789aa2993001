"""Change the priority of communication on a GPU: it takes effect, and launches keep their order."""

from __future__ import annotations

import threading
from typing import Any

import dask.dataframe as dd
import pandas as pd
import pytest
from distributed import Client

from tests.helpers.clusters import cluster

pytestmark = pytest.mark.gpu

#: A block of ``spin`` runs for a given time, then increments a counter; ``look`` reads the counter.
KERNELS = r"""
extern "C" __global__ void spin(long long clocks, unsigned int *ended) {
    for (long long until = clock64() + clocks; clock64() < until;);
    if (threadIdx.x == 0)
        atomicAdd(ended, 1u);
}
extern "C" __global__ void look(unsigned int *ended, unsigned int *seen) {
    if (threadIdx.x == 0)
        seen[blockIdx.x] = *(volatile unsigned int *)ended;
}
"""
#: Blocks of compute: with 1024 threads two fit on an SM, so each SM runs dozens of them in turn.
BLOCKS, THREADS, CLOCKS = 20_000, 1024, 200_000
#: Blocks of communication.
LOOKS = 132


@pytest.fixture
def device() -> Any:
    from dask_gpurt.device.cuda import CudaDevice

    return CudaDevice()


def test_the_priority_of_a_stream_changes(device: Any) -> None:
    from cuda.bindings.runtime import cudaDeviceGetStreamPriorityRange, cudaStreamGetPriority

    _, least, greatest = cudaDeviceGetStreamPriorityRange()
    assert least != greatest
    found, streams = [], set()
    for first in (True, False, True):
        device.prioritised = first
        _, stream = device.stream()
        streams.add(stream.ptr)
        found.append(cudaStreamGetPriority(stream.ptr)[1])
    assert found == [greatest, least, greatest]
    assert len(streams) == 1


def blocks_before(device: Any, *, first: bool) -> int:
    """Count the blocks of compute that end before a small communication kernel, which is launched later."""
    import cupy

    module = cupy.RawModule(code=KERNELS)
    spin, look = module.get_function("spin"), module.get_function("look")
    ended, seen = cupy.zeros(1, "uint32"), cupy.zeros(LOOKS, "uint32")
    device.prioritised = first
    _, stream = device.stream()
    with stream:
        look((LOOKS,), (128,), (ended, seen))  # loads the kernel
    stream.synchronize()
    spin((BLOCKS,), (THREADS,), (CLOCKS, ended))
    with stream:
        look((LOOKS,), (128,), (ended, seen))
    stream.synchronize()
    return int(seen.max())


def test_a_prioritised_kernel_waits_for_few_blocks_of_compute(device: Any) -> None:
    """Alternate the priorities, so that the change is measured rather than how the stream was created.

    On a GPU that other processes use, time slices end compute early: then a kernel of equal priority may not
    have to wait, but not every time.
    """
    found = [(blocks_before(device, first=True), blocks_before(device, first=False)) for _ in range(3)]
    assert all(ahead < BLOCKS / 3 for ahead, _ in found), found
    assert max(equal for _, equal in found) > 2 * BLOCKS / 3, found


def test_kernels_launched_before_a_change_keep_their_order(device: Any) -> None:
    import cupy

    values = cupy.zeros(1 << 26)
    _, stream = device.after_compute()
    for turn in range(20):
        device.prioritised = turn % 2 == 0
        with device.stream()[1]:
            values += turn
            values *= 2
    stream.synchronize()
    expected = 0.0
    for turn in range(20):
        expected = (expected + turn) * 2
    assert bool((values == expected).all())


def test_a_change_in_the_middle_of_shuffles_changes_no_result() -> None:
    frame = pd.DataFrame({"key": range(200_000), "value": 0.5})
    stop = threading.Event()

    def change(dask_worker: Any, first: bool) -> None:
        exchange = dask_worker.plugins["gpurt"].exchange
        exchange.pools.device(exchange.pools.main).prioritised = first

    def keep_changing(address: str) -> None:
        with Client(address, set_as_default=False) as other:
            while not stop.is_set():
                for first in (False, True):
                    other.run(change, first=first)

    with cluster("cudf") as client:
        changing = threading.Thread(target=keep_changing, args=(client.scheduler.address,))
        changing.start()
        try:
            for _ in range(3):
                parts = dd.from_pandas(frame, npartitions=16).to_backend("cudf")
                found = parts.shuffle("key").compute().to_pandas()
                pd.testing.assert_frame_equal(found.sort_values("key", ignore_index=True), frame)
        finally:
            stop.set()
            changing.join()
