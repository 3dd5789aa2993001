"""The priority of communication on a GPU: it changes, it counts, and what was launched keeps its order."""

from __future__ import annotations

import threading
import time
from typing import Any

import dask.dataframe as dd
import pandas as pd
import pytest
from clusters import cluster
from distributed import Client

pytestmark = pytest.mark.gpu

#: Every block stays as long as it is told to.
SPIN = r"""
extern "C" __global__ void spin(long long clocks) {
    for (long long until = clock64() + clocks; clock64() < until;);
}
"""
#: Blocks of compute: with 1024 threads two fit on an SM, so there are dozens of them one after the other.
BLOCKS, THREADS, CLOCKS = 20_000, 1024, 200_000


@pytest.fixture
def device() -> Any:
    from dask_gpurt.device.cuda import CudaDevice

    return CudaDevice()


def test_the_priority_of_a_stream_changes(device: Any) -> None:
    from cuda.bindings.runtime import cudaDeviceGetStreamPriorityRange, cudaStreamGetPriority

    device.try_priorities()
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


def seconds_beside(device: Any, *, first: bool) -> float:
    """How long a small kernel of communication takes that is launched behind many blocks of compute."""
    import cupy

    kernel = cupy.RawKernel(SPIN, "spin")
    kernel((1,), (1,), (1,))
    cupy.cuda.runtime.deviceSynchronize()
    device.prioritised = first
    _, stream = device.stream()
    kernel((BLOCKS,), (THREADS,), (CLOCKS,))
    began = time.perf_counter()
    with stream:
        kernel((132,), (128,), (1000,))
    stream.synchronize()
    seconds = time.perf_counter() - began
    cupy.cuda.runtime.deviceSynchronize()
    return seconds


def test_what_comes_first_waits_for_few_blocks_of_compute(device: Any) -> None:
    """In turns, so that it is the change that counts, not how the stream was made."""
    for first in (True, False):  # loaded, and clocked up
        seconds_beside(device, first=first)
    waits = [(seconds_beside(device, first=True), seconds_beside(device, first=False)) for _ in range(3)]
    assert all(ahead < equal / 3 for ahead, equal in waits), waits


def test_what_was_launched_before_a_change_keeps_its_order(device: Any) -> None:
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
