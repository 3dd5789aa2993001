"""Trace a cluster's workers."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import sleep
from typing import Any
from unittest.mock import patch

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client, Worker, wait

import dask_gpurt
from tests.helpers.clusters import cluster
from tests.helpers.commands import DASK, run
from tests.helpers.trace_format import check, slices

KIB = 2**10
#: Shards are copied instead of read in place, and the tiers fill quickly: every step occurs.
SETTINGS: dict[str, Any] = {
    "exchange__paths": ["comms"],
    "memory__tiers": True,
    "memory__device": 1024 * KIB,
    "memory__pinned": 512 * KIB,
    "memory__host": 512 * KIB,
}
PARTITIONS = 6
STEPS = {"split", "pack", "pull", "assemble", "spill", "unspill"}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with cluster("pandas", **SETTINGS) as client:
        yield client


def make(part: int) -> pd.DataFrame:
    draw = np.random.default_rng(part)
    return pd.DataFrame({"key": draw.integers(0, 2**62, 20_000), "payload": np.arange(20_000)})


def shuffle() -> int:
    """Shuffle more than the tiers hold, and return the number of rows."""
    frame = dd.from_map(make, range(PARTITIONS), meta=make(0).iloc[:0]).persist()
    wait(frame)
    shuffled = frame.shuffle("key").persist()
    wait(shuffled)
    return len(shuffled) + len(frame)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_each_phase_of_a_shuffle_is_seen(client: Client, tmp_path: Path) -> None:
    with dask_gpurt.trace(tmp_path / "trace.json") as recorded:
        assert shuffle() == 2 * PARTITIONS * 20_000
    assert {row.step for row in recorded.found.summary()} >= STEPS
    trace = read(tmp_path / "trace.json")
    check(trace)
    counts = Counter(one.name for one in slices(trace))
    assert counts.keys() >= STEPS
    assert counts["shuffle-transfer"] == PARTITIONS
    # A step that runs out of memory is retried.
    assert counts["split"] >= PARTITIONS <= counts["pack"]
    assert counts["assemble"] == PARTITIONS
    waits = Counter(event["name"] for event in trace["traceEvents"] if event["ph"] == "b")
    assert waits["fetch"] > 0
    said = trace["otherData"]
    assert said["lost events"] == 0
    assert len(said["processes"]) == 3
    assert all(process["events"] > 0 for process in said["processes"].values())

    # Steps lie within their task, and on its thread.
    tasks = {one.args["task"]: one for one in slices(trace) if one.name not in STEPS and "task" in one.args}
    for step in slices(trace):
        if step.name in ("split", "pack", "assemble"):
            task = tasks[step.args["task"]]
            assert (task.pid, task.tid) == (step.pid, step.tid)
            assert task.begin <= step.begin <= step.end <= task.end


def test_afterwards_nothing_is_recorded(client: Client, tmp_path: Path) -> None:
    with dask_gpurt.trace(tmp_path / "trace.json.gz"):
        client.submit(int, 1).result()
        assert all(client.run(lambda dask_worker: is_recording(dask_worker)).values())
    assert not any(client.run(lambda dask_worker: is_recording(dask_worker)).values())
    check(json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes())))


def is_recording(server: Any) -> bool:
    return server.plugins["gpurt"].metrics.recording is not None


def test_one_trace_at_a_time(client: Client, tmp_path: Path) -> None:
    with (
        dask_gpurt.trace(tmp_path / "one.json"),
        pytest.raises(RuntimeError, match="another trace of this cluster is being recorded"),
        dask_gpurt.trace(tmp_path / "two.json"),
    ):
        raise AssertionError("it has begun")
    check(read(tmp_path / "one.json"))
    assert not (tmp_path / "two.json").exists()


def test_a_program_that_fails_leaves_a_trace(client: Client, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), dask_gpurt.trace(tmp_path / "trace.json"):
        client.submit(lambda: 1 // 0, pure=False).result()
    assert [one.name for one in slices(read(tmp_path / "trace.json"))] == ["lambda"]


def store_slowly(dask_worker: Worker) -> None:
    """Make a worker's store take longer for each result than Dask's limit of 5 ms."""
    kind = type(dask_worker.data)
    store = kind.__setitem__

    def slow(data: Any, key: str, value: object) -> None:
        sleep(0.02)
        store(data, key, value)

    slowed = patch.object(kind, "__setitem__", slow)
    slowed.start()
    dask_worker.extensions["slowed"] = slowed


def store_as_before(dask_worker: Worker) -> None:
    dask_worker.extensions.pop("slowed").stop()


def test_a_task_whose_result_is_stored_slowly_is_seen(client: Client, tmp_path: Path) -> None:
    client.run(store_slowly)
    try:
        with dask_gpurt.trace(tmp_path / "trace.json"):
            wait(client.submit(int, 1, pure=False))
    finally:
        client.run(store_as_before)
    assert [one.name for one in slices(read(tmp_path / "trace.json"))] == ["int"]


def test_the_command_writes_a_trace(client: Client, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    address = client.scheduler.address  # type: ignore[union-attr]
    done = run(DASK, "gpurt", "trace", "--scheduler", address, "--seconds", "0.5", "--out", out)
    assert "recording for" in done.stderr
    assert str(out) in done.stdout.replace("\n", "")
    check(read(out))
