"""Shuffle on clusters of different workers: work runs only where it can, and where it is allowed to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import psutil
import pytest
from distributed import Client, LocalCluster, Worker, wait
from hypothesis import given
from hypothesis import strategies as st

import dask_gpurt
from dask_gpurt.device import mps
from dask_gpurt.device.mps import CONTROL
from dask_gpurt.observe import Fallback
from dask_gpurt.worker.colocation import divided_size
from tests.helpers.clusters import QUICK, canonical
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

MEMORY = 2**30


@contextmanager
def started(workers: int, expected: int, **options: Any) -> Iterator[Client]:
    """Start a cluster of processes whose nannies apply the settings, like those of `dask cuda worker`."""
    asked = {"gpurt.enabled": True, "gpurt.compute.concurrency": 2}
    hook = {"distributed.nanny.preload": ["dask_gpurt.preload"]}
    given = {"n_workers": workers, "threads_per_worker": 2, "memory_limit": MEMORY, "dashboard_address": ":0"}
    with (
        dask.config.set({**QUICK, **hook, **asked}),
        LocalCluster(**given, **options) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(expected, timeout=60)
        try:
            yield client
        finally:
            dask_gpurt.disable(client)


def test_each_worker_has_its_part_and_all_shuffle() -> None:
    frame = pd.DataFrame({"key": range(1000), "value": 1.5})
    with started(2, 4) as client:
        workers = client.scheduler_info()["workers"].values()
        assert {str(worker["name"]) for worker in workers} == {"0", "1", "0-1", "1-1"}
        assert [worker["nthreads"] for worker in workers] == [1] * 4
        assert [worker["memory_limit"] for worker in workers] == [MEMORY // 2] * 4
        found = dd.from_pandas(frame, npartitions=8).shuffle("key").compute()
        pd.testing.assert_frame_equal(found.sort_values("key").reset_index(drop=True), frame)
        report = dask_gpurt.report(client)
        assert len(report["workers"]) == 4
        assert not any(worker.fallbacks for worker in report["workers"].values())


def test_workers_beside_others_close_with_them() -> None:
    with started(2, 4) as client:
        names = {address: str(told["name"]) for address, told in client.scheduler_info()["workers"].items()}
        processes = {names[address]: psutil.Process(pid) for address, pid in client.run(os.getpid).items()}
        client.cluster.scale(1)
        for name in ("1", "1-1"):
            processes[name].wait(60)
        assert {str(told["name"]) for told in client.scheduler_info()["workers"].values()} == {"0", "0-1"}
    for process in processes.values():
        process.wait(60)


def test_without_mps_a_worker_of_a_gpu_stays_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(mps.PIPE, raising=False)
    monkeypatch.setattr(mps, "USUAL_PIPE", tmp_path)
    with started(1, 1, env={"CUDA_VISIBLE_DEVICES": "0"}) as client:
        (worker,) = dask_gpurt.report(client)["workers"].values()
        assert worker.fallbacks[Fallback.DEVICE_NOT_SHARED.id].reason == f"{CONTROL} is not installed"
        (told,) = client.scheduler_info()["workers"].values()
        assert told["memory_limit"] == MEMORY


@given(st.integers(2, 2**40), st.integers(1, 8))
def test_the_parts_of_bytes_are_no_more_than_all(nbytes: int, count: int) -> None:
    assert nbytes - count < divided_size(nbytes, count) * count <= nbytes
    assert divided_size(f"{nbytes} B", count) == divided_size(nbytes, count)
