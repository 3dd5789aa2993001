"""Shuffle on clusters of different workers: work runs only where it can, and where it is allowed to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Worker, wait

from tests.helpers.clusters import canonical
from tests.helpers.in_process import on_cluster

GPU = {"resources": {"GPU": 1}}
#: Two workers with a GPU, and one without, which comes first.
MIXED = [("127.0.0.1", 1), ("127.0.0.1", 1, GPU), ("127.0.0.1", 1, GPU)]


def frame(parts: int = 6, rows: int = 50) -> pd.DataFrame:
    random = np.random.default_rng(0)
    return pd.DataFrame({"key": random.integers(0, 30, parts * rows), "value": np.arange(parts * rows)})


def collection() -> Any:
    return dd.from_pandas(frame(), npartitions=6, sort=False)


#: Computations on a collection, or on pandas frames without the options that only Dask has.
BUILDS: dict[str, Callable[..., Any]] = {
    "shuffle": lambda one, **_: one.shuffle("key") if hasattr(one, "shuffle") else one,
    "merge": lambda one, broadcast, **_: one.merge(
        one.rename(columns={"value": "other"}), on="key", **broadcast
    ),
    "groupby": lambda one, split_out, **_: one.groupby("key").value.sum(**split_out).reset_index(),
}
OF_DASK = {"broadcast": {"broadcast": False}, "split_out": {"split_out": 3}}
OF_PANDAS: dict[str, dict[str, Any]] = {"broadcast": {}, "split_out": {}}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
@on_cluster(nthreads=MIXED)
async def test_tasks_that_ask_for_a_resource_run_where_it_is(
    client: Any, scheduler: Any, plain: Worker, *gpus: Worker, build: Callable[..., Any]
) -> None:
    done = client.persist(build(collection(), **OF_DASK), resources={"GPU": 1})
    await wait(done)
    assert not plain.data
    assert all(worker.data for worker in gpus)
    found = pd.concat(await client.gather(client.futures_of(done)))
    expected = build(frame(), **OF_PANDAS)
    pd.testing.assert_frame_equal(canonical(found, index=False), canonical(expected, index=False))


# Dask's validation does not work for a closed worker, whose tiers are gone.
@on_cluster(nthreads=MIXED, validate=False)
async def test_lost_inputs_are_transferred_again_where_the_resource_is(
    client: Any, scheduler: Any, plain: Worker, one: Worker, other: Worker
) -> None:
    done = client.persist(collection().shuffle("key"), resources={"GPU": 1})
    await wait(done)
    await one.close()
    await wait(done)
    found = pd.concat(await client.gather(client.futures_of(done)))
    pd.testing.assert_frame_equal(canonical(found, index=False), canonical(frame(), index=False))
    assert not plain.data
    assert len(other.data) >= done.npartitions


@on_cluster(nthreads=MIXED)
async def test_outputs_go_only_to_workers_with_the_device_of_their_frames(
    client: Any, scheduler: Any, plain: Worker, *able: Worker
) -> None:
    # It does not matter which kind a worker lacks, so this worker lacks the host's.
    runtime = scheduler.extensions["gpurt"]
    runtime.workers.note_devices(plain.address, [])
    assert runtime.workers.ready_with("host") == {worker.address for worker in able}
    done = client.persist(collection().shuffle("key"))
    await wait(done)
    outputs = {future.key for future in client.futures_of(done)}
    assert not outputs & set(plain.data)
    assert all(outputs & set(worker.data) for worker in able)


# ---- several workers in place of one: `gpurt.compute.concurrency` ---------------------------------
