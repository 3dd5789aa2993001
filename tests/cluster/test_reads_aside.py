"""Overlap reads of files with other tasks' compute on one thread; ordered by events instead of sleeps."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import fsspec
import pandas as pd
import pytest
from dask.dataframe.io.parquet.core import ParquetFunctionWrapper
from distributed import worker_client
from distributed.core import Status
from fsspec.implementations.local import LocalFileSystem

import dask_gpurt
from tests.helpers.clusters import cluster
from tests.helpers.in_process import gen_client_cluster, on_cluster, until
from tests.helpers.waiting import LIMIT_S

# ---- reads that stop at a gate in this process -----------------------------------------------------


class Gate:
    """Block reads while it is closed."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        #: Paths opened while the gate was closed, in order.
        self.came: list[str] = []

    def close(self) -> None:
        """Block reads from now on."""
        self.came.clear()
        self._open.clear()

    def open(self) -> None:
        """Release all reads."""
        self._open.set()

    def wait(self, path: str) -> None:
        """Block a read of this path while the gate is closed."""
        if not self._open.is_set():
            self.came.append(path)
            assert self._open.wait(LIMIT_S)


#: The gate of this process.
GATE = Gate()


class GatedFiles(LocalFileSystem):
    """Open local files under ``gated://`` behind the gate."""

    protocol = "gated"

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> Any:
        GATE.wait(path)
        return super()._open(path, mode, block_size, **kwargs)


class LateFiles(LocalFileSystem):
    """Open local files under ``late://`` with a delay, as on slow storage.

    ``delay_s``: delay of each open, in seconds.
    """

    protocol = "late"

    def __init__(self, delay_s: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.delay_s = delay_s

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> Any:
        time.sleep(self.delay_s)
        return super()._open(path, mode, block_size, **kwargs)


fsspec.register_implementation("gated", GatedFiles, clobber=True)
fsspec.register_implementation("late", LateFiles, clobber=True)


# ---- tests ----------------------------------------------------------------------------------------

PARTS, ROWS = 4, 10
ONE_BESIDE = {"gpurt.reads.beside": 1}
#: Sum of the column.
TOTAL = sum(range(PARTS * ROWS))


@pytest.fixture(autouse=True)
def _open_gate() -> Iterator[None]:
    _events.clear()
    yield
    GATE.open()
    for event in _events.values():
        event.set()


@pytest.fixture
def files(tmp_path: Path) -> str:
    for part in range(PARTS):
        frame = pd.DataFrame({"a": range(part * ROWS, (part + 1) * ROWS), "b": 1.0})
        frame.to_parquet(tmp_path / f"{part}.parquet")
    return f"gated://{tmp_path}"


#: Events by name, which functions in tasks look up in this process.
_events: dict[str, threading.Event] = {}
_lock = threading.Lock()


def event(name: str) -> threading.Event:
    with _lock:
        return _events.setdefault(name, threading.Event())


def meet(mine: str, other: str, value: Any = None) -> Any:
    """Set one event, and wait for another."""
    event(mine).set()
    assert event(other).wait(LIMIT_S)
    return value


def noting(frame: Any, name: str) -> Any:
    event(name).set()
    return frame


def total_of(collection: Any, function: Any, *args: Any) -> Any:
    """Sum a column; a function of the user runs in the same task as the read of each partition."""
    mapped = collection.map_partitions(function, *args, meta=collection._meta)
    return mapped.a.sum().optimize()  # fuses here, as a client would not


def reads(worker: Any) -> Any:
    return worker.plugins["gpurt"].reads


def on_reading_cluster(**settings: Any) -> Any:
    """Run a coroutine as :func:`on_cluster` does, by default with one read beside compute."""
    return on_cluster(**ONE_BESIDE | settings)


async def has_begun_aside(worker: Any) -> None:
    """Wait until a task is blocked at the gate, and another task may begin."""
    await until(lambda: bool(GATE.came) and bool(worker.state.long_running))


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_task_reads_while_another_one_computes(kind: str, files: str, tmp_path: Path) -> None:
    """And waits for its turn afterwards, until the other one has ended."""
    pd.DataFrame({"a": range(ROWS)}).to_csv(tmp_path / "0.csv", index=False)
    first = dd.read_parquet(files).partitions[0]

    @on_reading_cluster(workers=1)
    async def run(client: Any, scheduler: Any, worker: Any) -> None:
        GATE.close()
        computing = client.compute(total_of(first, lambda frame: meet("computing", "go on", frame)))
        await has_begun_aside(worker)
        GATE.open()
        await until(event("computing").is_set)
        # Read here, since Dask's tasks hold its function for blocks of text as it is when they are made.
        second = dd.read_csv(f"gated://{tmp_path}/0.csv") if kind == "csv" else first
        total = total_of(second, noting, "computed")
        GATE.close()
        reading = client.compute(total)
        await until(lambda: bool(GATE.came))
        GATE.open()
        await until(lambda: bool(reads(worker).turns.waiting))
        assert not event("computed").is_set()
        event("go on").set()
        assert await client.gather([computing, reading]) == [sum(range(ROWS))] * 2
        report = await dask_gpurt.report(client)
        assert report["workers"][worker.address]["reads"]["beside"] == 1
        counters = report["counters"]
        assert counters["reads.aside"] >= 1
        assert 0 < counters["reads.seconds.beside"] <= counters["reads.seconds.reading"]
        assert not worker.state.long_running

    run()


def test_a_task_that_writes_leaves_its_slot_too(tmp_path: Path) -> None:
    frame = dd.from_pandas(pd.DataFrame({"a": range(ROWS)}), npartitions=1)
    written = frame.to_parquet(f"gated://{tmp_path}/written", compute=False)

    @on_reading_cluster(workers=1)
    async def run(client: Any, scheduler: Any, worker: Any) -> None:
        GATE.close()
        future = client.compute(written)
        await has_begun_aside(worker)
        assert await client.submit(sum, [1, 2]) == 3
        assert not future.done()  # the result cannot be ready before the file is
        GATE.open()
        await future
        assert sum(pd.read_parquet(tmp_path / "written").a) == sum(range(ROWS))

    run()


@on_reading_cluster(workers=1)
async def test_a_task_that_has_rejoined_the_pool_waits_for_its_turn(
    client: Any, scheduler: Any, worker: Any, files: str
) -> None:
    """Its worker has more threads than turns, for reads."""

    def waits_for_another() -> int:
        with worker_client() as client:
            found = client.submit(lambda: 6, pure=False).result()
            client.submit(meet, "other", "go on", key="other")
            assert event("other").wait(LIMIT_S)
            event("leaving").set()
        event("rejoined").set()
        return int(found) + 1

    future = client.submit(waits_for_another)
    await until(event("leaving").is_set)
    turns = reads(worker).turns
    await until(lambda: any(turn.was_held for turn in turns.waiting))
    assert not event("rejoined").is_set()
    event("go on").set()
    assert await future == 7


@on_reading_cluster(workers=1)
async def test_a_read_that_fails_fails_its_task_alone(
    client: Any, scheduler: Any, worker: Any, tmp_path: Path, files: str
) -> None:
    total = dd.read_parquet(files).partitions[0].a.sum()
    GATE.close()
    future = client.compute(total)
    await has_begun_aside(worker)
    (tmp_path / "0.parquet").unlink()
    GATE.open()
    with pytest.raises(FileNotFoundError):
        await future
    assert await client.submit(sum, [1, 2]) == 3
    assert await client.compute(dd.read_parquet(files).partitions[0].a.sum()) == sum(range(ROWS, 2 * ROWS))


@on_reading_cluster(workers=1)
async def test_a_task_is_cancelled_while_it_reads(
    client: Any, scheduler: Any, worker: Any, files: str
) -> None:
    collection = dd.read_parquet(files)
    GATE.close()
    future = client.compute(collection.partitions[0].a.sum())
    await has_begun_aside(worker)
    (key,) = (task.key for task in worker.state.long_running)
    await future.cancel()
    GATE.open()
    assert await client.submit(sum, [1, 2]) == 3
    await until(lambda: not reads(worker).is_aside(key) and not worker.state.tasks)
    assert await client.compute(collection.a.sum()) == TOTAL


@gen_client_cluster(nthreads=[("127.0.0.1", 1)], config=ONE_BESIDE)
async def test_tasks_take_turns_until_they_have_ended_when_it_is_switched_off(
    client: Any, scheduler: Any, worker: Any, files: str
) -> None:
    """Then the pool is Dask's again, with as many threads as it had."""
    await dask_gpurt.enable(client)
    pool, turns = worker.executor, reads(worker).turns
    first = dd.read_parquet(files).partitions[0]
    GATE.close()
    future = client.compute(total_of(first, lambda frame: meet("reader", "go on", frame)))
    await has_begun_aside(worker)
    other = client.submit(noting, 1, "other")
    await until(lambda: bool(turns.waiting))
    await dask_gpurt.disable(client)
    GATE.open()
    await until(event("reader").is_set)
    assert not event("other").is_set()
    event("go on").set()
    assert await client.gather([future, other]) == [sum(range(ROWS)), 1]
    await until(lambda: len(pool._threads) == pool._max_workers == 1)
    assert "submit" not in vars(pool)
    assert await client.submit(sum, [1, 2]) == 3


@gen_client_cluster(nthreads=[("127.0.0.1", 1)], config=ONE_BESIDE)
async def test_a_task_that_waits_for_its_turn_does_not_run_when_its_worker_closes(
    client: Any, scheduler: Any, worker: Any, files: str
) -> None:
    await dask_gpurt.enable(client)
    turns, total = reads(worker).turns, dd.read_parquet(files).partitions[0].a.sum()
    GATE.close()
    future = client.compute(total)
    await has_begun_aside(worker)
    other = client.submit(noting, 1, "other")
    await until(lambda: bool(turns.waiting))
    closing = asyncio.ensure_future(worker.close(executor_wait=False))
    await until(lambda: not turns.waiting)
    assert not event("other").is_set()
    GATE.open()
    await closing
    assert not event("other").is_set()
    assert not future.done()
    assert not other.done()
    await dask_gpurt.disable(client)


@on_reading_cluster(workers=1, **{"distributed.worker.memory.pause": False})
async def test_a_worker_is_paused_while_tasks_wait_for_their_turns(
    client: Any, scheduler: Any, worker: Any, files: str
) -> None:
    """Those that have started end; the others run once it is resumed."""
    total = total_of(dd.read_parquet(files), lambda frame: meet("reader", "go on", frame))
    future = client.compute(total)
    await until(event("reader").is_set)
    await until(lambda: bool(reads(worker).turns.waiting))
    worker.status = Status.paused
    await until(lambda: scheduler.workers[worker.address].status == Status.paused)
    event("go on").set()
    await until(lambda: not worker.state.executing and not worker.state.long_running)
    assert worker.state.ready
    assert not future.done()
    worker.status = Status.running
    assert await future == TOTAL


@pytest.mark.parametrize("beside", [0, "auto"])
def test_with_none_beside_a_task_that_reads_keeps_its_slot(files: str, beside: Any) -> None:
    @on_reading_cluster(workers=1, **{"gpurt.reads.beside": beside})
    async def run(client: Any, scheduler: Any, worker: Any) -> None:
        total = total_of(dd.read_parquet(files).partitions[0], noting, "computed")
        GATE.close()
        future = client.compute(total)
        await until(lambda: bool(GATE.came))
        other = client.submit(lambda: event("computed").is_set())
        await until(lambda: bool(worker.state.ready))
        assert not worker.state.long_running
        GATE.open()
        assert await other
        assert await future == sum(range(ROWS))
        assert "reads.aside" not in (await dask_gpurt.report(client))["counters"]

    run()


def test_a_worker_finds_out_that_files_come_slowly(tmp_path: Path) -> None:
    """Each file takes 0.1 s to open; a partition has 1 MiB."""
    frame = pd.DataFrame({"a": range(1 << 17)})
    for part in range(10):
        frame.to_parquet(tmp_path / f"{part}.parquet")

    @on_reading_cluster(workers=1, **{"gpurt.reads.beside": "auto"})
    async def run(client: Any, scheduler: Any, worker: Any) -> None:
        total = dd.read_parquet(f"late://{tmp_path}", storage_options={"delay_s": 0.1}).a.sum()
        assert await client.compute(total) == 10 * frame.a.sum()
        report = await dask_gpurt.report(client)
        assert report["workers"][worker.address]["reads"]["beside"] > 0
        assert report["counters"]["reads.aside"] > 0

    run()


@gen_client_cluster(nthreads=[("127.0.0.1", 2)] * 2, config=ONE_BESIDE)
async def test_dask_is_as_it_was_once_it_is_switched_off(
    client: Any, scheduler: Any, *workers: Any, files: str
) -> None:
    before = vars(ParquetFunctionWrapper)["__call__"]
    await dask_gpurt.enable(client)
    assert await client.compute(dd.read_parquet(files).a.sum()) == TOTAL
    assert vars(ParquetFunctionWrapper)["__call__"] is not before
    assert [worker.executors["default"]._max_workers for worker in workers] == [3, 3]
    await dask_gpurt.disable(client)
    assert vars(ParquetFunctionWrapper)["__call__"] is before
    assert [worker.executors["default"]._max_workers for worker in workers] == [2, 2]
    assert await client.compute(dd.read_parquet(files).a.sum()) == TOTAL


def test_a_task_that_runs_out_of_memory_after_its_read_is_run_again(tmp_path: Path) -> None:
    pd.DataFrame({"a": range(ROWS), "b": 1.0}).to_parquet(tmp_path / "0.parquet")
    marker = tmp_path / "tried"

    def fails_once(frame: Any) -> Any:
        if not marker.exists():
            marker.touch()
            raise MemoryError("std::bad_alloc")
        return frame

    with cluster("pandas", workers=1, failures=0, memory__retries=2, reads__beside=1) as client:
        total = total_of(dd.read_parquet(tmp_path / "*.parquet"), fails_once)
        assert total.compute() == sum(range(ROWS))
        found = dask_gpurt.report(client)["counters"]
        assert (found["memory.retries"], found["reads.aside"]) == (1, 1)
