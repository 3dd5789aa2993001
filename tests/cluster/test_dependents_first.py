"""Run the consumer of a result before the producer of the next one, when memory is short."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client

import dask_gpurt
from tests.helpers.clusters import cluster

MIB = 2**20
SIZE = 24 * MIB


@pytest.fixture
def tight() -> Iterator[Client]:
    """Yield a cluster with one thread, and memory for one and a half results."""
    room = {"memory__device": SIZE * 3 // 2, "memory__host": 0, "memory__pinned": 0}
    with dask.config.set({"distributed.worker.memory.pause": False}), cluster(workers=1, **room) as client:
        yield client  # the test pauses the worker


def spilled(client: Client) -> float:
    counters = dask_gpurt.report(client)["counters"]
    return sum(n for name, n in counters.items() if name.startswith("memory.spill.bytes.device"))


def make(number: int) -> np.ndarray:
    return np.full(SIZE, number, np.uint8)


def test_results_are_read_before_the_next_is_made(tight: Client) -> None:
    made = [dask.delayed(make)(number, pure=False) for number in range(20)]
    read = [dask.delayed(lambda array: int(array[0]))(one) for one in made]
    assert tight.compute(dask.delayed(sum)(read), sync=True) == sum(range(20))
    assert spilled(tight) < 20 * SIZE / 2


def test_results_that_are_not_read_are_not_waited_for(tight: Client) -> None:
    kept = tight.map(make, range(12))
    assert [int(array[-1]) for array in tight.gather(kept)] == list(range(12))
    assert spilled(tight) >= 10 * SIZE


def test_a_worker_that_dask_pauses_stays_paused(tight: Client) -> None:
    async def pause(dask_worker: object) -> bool:
        following = dask_worker.plugins["gpurt"].data._dependents_first  # type: ignore[attr-defined]
        following.finished("some-task", 100 * SIZE, 0)
        held = bool(following.holds)
        dask_worker.status = dask_worker.status.paused  # type: ignore[attr-defined]
        while following.holds:
            await asyncio.sleep(0.001)
        return held

    def go_on(dask_worker: object) -> None:
        dask_worker.status = dask_worker.status.running  # type: ignore[attr-defined]

    def running(dask_worker: object) -> bool:
        return bool(dask_worker.state.running)  # type: ignore[attr-defined]

    assert all(tight.run(pause).values())
    assert not any(tight.run(running).values())
    tight.run(go_on)  # closing the cluster blocks while a worker stays paused


def keys(number: int) -> pd.DataFrame:
    return pd.DataFrame({"key": np.arange(SIZE // 8) * 20 + number})


def test_all_that_reads_a_result_comes_first_whatever_dask_has_in_mind(tight: Client) -> None:
    # Quantiles, then the smallest and the largest key of each partition; for the latter two Dask would read
    # the keys again at the end.
    divisions = dd.from_map(keys, range(20)).set_index("key", npartitions=20).divisions
    assert (divisions[0], divisions[-1]) == (0, SIZE // 8 * 20 - 1)
    assert spilled(tight) < 20 * SIZE / 2
