"""Keep workers' data in the runtime's tiers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pandas as pd
import pytest
from distributed import Client, wait

import dask_gpurt
from tests.helpers.clusters import (
    Library,
    assert_same_partitions,
    by_tasks,
    cluster,
    counters,
    partitions,
    to_pandas,
)
from tests.helpers.nightly import nightly
from tests.helpers.shared_cluster import SharedCluster

MIB = 2**20
SMALL = {"memory__tiers": True, "memory__device": 8 * MIB, "memory__pinned": 4 * MIB, "memory__host": 4 * MIB}
TINY = {"memory__tiers": True, "memory__device": 2 * MIB, "memory__pinned": MIB, "memory__host": MIB}


@pytest.fixture(scope="module")
def small(library: Library) -> Iterator[Client]:
    """Yield two workers whose tiers above the disk hold 16 MiB each."""
    with cluster(library.name, **SMALL) as client:
        yield client


def parts(count: int = 24, rows: int = 1 << 17) -> list[pd.DataFrame]:
    """Return partitions of 2 MiB each, or less with fewer rows."""
    return [
        pd.DataFrame({"key": (np.arange(rows) * (i + 7)) % 997, "value": np.arange(rows) + i})
        for i in range(count)
    ]


def on_workers(client: Client, function: Any) -> list[Any]:
    return list(client.run(function).values())


def test_a_shuffle_larger_than_the_tiers_above_the_disk(
    shared_cluster: SharedCluster, library: Library
) -> None:
    """Use two workers whose tiers above the disk hold 4 MiB each."""
    inputs = parts(rows=1 << 15)

    def run(frame: Any) -> Any:
        return frame.shuffle("key")

    with shared_cluster.client(library.name, **TINY) as client:
        ours = partitions(run(library.collection(inputs)))
        counted = counters(client)
        theirs = by_tasks(run, library.lazy(inputs))
    assert_same_partitions(ours, theirs, in_order=False)
    assert counted["shuffle.runs"]
    assert any(name.startswith("memory.spill.bytes") for name in counted)
    assert not counted.get("memory.unspill.unheld", 0)  # that would have been on the event loop


def test_peers_read_what_is_spilled_without_making_it_live(small: Client, library: Library) -> None:
    here, there = small.nthreads()
    made = small.submit(np.arange, MIB, workers=[here], pure=False)
    wait(made)
    small.amm.stop()  # when the peer has a replica too, it might drop the spilled one

    def spill(dask_worker: Any) -> str:
        dask_worker.data.spill(1 << 40)
        return str(dask_worker.data.tier(made_key))

    made_key = made.key
    assert small.run(spill, workers=[here])[here] != "device"
    assert small.submit(np.sum, made, workers=[there]).result() == MIB * (MIB - 1) // 2
    where = small.run(lambda dask_worker: str(dask_worker.data.tier(made_key)), workers=[here])[here]
    small.amm.start()
    assert where != "device"


@pytest.mark.parametrize("tier", [nightly("pinned"), "disk"])
def test_nothing_is_put_together_to_be_sent(library: Library, tier: str) -> None:
    """Frames are not joined on the device, nor elsewhere on the sending worker."""
    first = {f"memory__{name}": 8 * MIB if name == tier else 0 for name in ("pinned", "host")}
    rows = 2**17
    frame = pd.DataFrame({"key": np.arange(rows) % 7, "text": [str(i) for i in range(rows)]})

    def puts_nothing_together(dask_worker: Any) -> str:
        from dask_gpurt.memory import reading

        reading.from_frames = None
        dask_worker.data.spill(1 << 40)
        return str(dask_worker.data.tier(key))

    with cluster(library.name, memory__tiers=True, memory__device=16 * MIB, **first) as client:
        here, there = client.nthreads()
        made = client.submit(library.frame, frame, workers=[here], pure=False)
        wait(made)
        key = made.key
        assert client.run(puts_nothing_together, workers=[here])[here] == tier
        read = client.submit(to_pandas, made, workers=[there])
        pd.testing.assert_frame_equal(read.result(), frame)
        pd.testing.assert_frame_equal(to_pandas(made.result()), frame)


def test_a_task_out_of_memory_is_run_again_after_spilling(library: Library, tmp_path: Path) -> None:
    def greedy(flag: str) -> str:
        if not os.path.exists(flag):
            open(flag, "w").close()
            try:
                raise MemoryError("std::bad_alloc")
            except MemoryError as error:  # as Dask does in its shuffles
                raise RuntimeError("failed during transfer phase") from error
        return "done"

    def hopeless() -> None:
        raise MemoryError("std::bad_alloc: out of everything")

    with cluster(library.name, workers=1, **SMALL, memory__retries=2, failures=0) as client:
        assert client.submit(greedy, str(tmp_path / "flag")).result() == "done"
        assert counters(client)["memory.retries"] == 1
        with pytest.raises(
            MemoryError, match=r"3 times.*out of everything.*Tiers: device .*gpurt.memory.device"
        ):
            client.submit(hopeless).result()


@pytest.mark.gpu
def test_an_allocation_that_finds_no_memory_spills_and_goes_on(tmp_path: Path) -> None:
    """The allocating task succeeds, although the spilled data were within their tier's limit."""

    def limit(nbytes: int) -> None:
        import rmm

        below = rmm.mr.get_current_device_resource()
        rmm.mr.set_current_device_resource(rmm.mr.LimitingResourceAdaptor(below, nbytes))

    def frame(i: int, nbytes: int) -> Any:
        import cudf

        return cudf.DataFrame({"a": np.full(nbytes // 8, i)})

    with cluster("cudf", workers=1, memory__device=1 << 30, failures=0) as client:
        dask_gpurt.disable(client)
        client.run(limit, 128 * MIB)
        dask_gpurt.enable(client)
        kept = client.map(frame, range(5), [16 * MIB] * 5, pure=False)
        wait(kept)
        large = client.submit(frame, 9, 56 * MIB)
        assert client.submit(lambda frame: int(frame.a.min()), large).result() == 9
        assert counters(client)["memory.short"] >= 1
        assert "memory.retries" not in counters(client)
        assert client.gather(client.map(lambda frame: int(frame.a.max()), kept)) == list(range(5))


def test_switched_on_and_off_no_key_is_lost(library: Library) -> None:
    with cluster(library.name, **SMALL) as client:
        dask_gpurt.disable(client)
        before = client.map(lambda i: np.full(MIB, i, np.uint8), range(12), pure=False)
        wait(before)
        with dask.config.set({f"gpurt.{name.replace('__', '.')}": value for name, value in SMALL.items()}):
            dask_gpurt.enable(client)
        assert on_workers(client, lambda dask_worker: type(dask_worker.data).__name__) == ["WorkerBuffer"] * 2
        during = client.map(lambda x: x + 100, before)
        wait(during)
        dask_gpurt.disable(client)
        assert "WorkerBuffer" not in on_workers(client, lambda dask_worker: type(dask_worker.data).__name__)
        assert [int(x[0]) for x in client.gather(before)] == list(range(12))
        assert [int(x[-1]) for x in client.gather(during)] == [i + 100 for i in range(12)]
