"""Lose and add workers during shuffles, and fail shuffles that cannot continue."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from distributed import Client, Event, Variable, futures_of, get_worker, wait
from distributed.core import Status
from distributed.shuffle._core import id_from_key
from distributed.shuffle._exceptions import P2PConsistencyError
from distributed.utils import sync

import dask_gpurt
from dask_gpurt.scheduler import worker_calls
from dask_gpurt.scheduler.recovery import Recovery
from tests.helpers.clusters import Library, canonical, cluster, counters, partitions, to_pandas
from tests.helpers.waiting import until

PARTS, ROWS = 8, 5_000


def frames() -> list[pd.DataFrame]:
    random = np.random.default_rng(7)
    return [
        pd.DataFrame({"key": random.integers(0, 99, ROWS), "row": np.arange(ROWS) + p * ROWS})
        for p in range(PARTS)
    ]


def build(library: Library, slow: Callable[[Any, int], Any] | None = None) -> Any:
    """Return a collection whose partitions are made by tasks that the shuffle depends on."""
    import dask.dataframe as dd

    parts = frames()

    def make(i: int) -> Any:
        frame = library.frame(parts[i])
        return slow(frame, i) if slow else frame

    return dd.from_map(make, range(PARTS), meta=library.frame(parts[0].iloc[:0]))


def assert_right(out: Any) -> None:
    """Assert that all rows arrived once, and each key in one partition."""
    shuffled = partitions(out)
    rows = canonical(pd.concat(shuffled), index=False)
    pd.testing.assert_frame_equal(rows, canonical(pd.concat(frames()), index=False))
    homes = pd.concat([frame.key.drop_duplicates() for frame in shuffled])
    assert homes.is_unique
    if len(shuffled) > 1:
        assert sum(map(bool, map(len, shuffled))) > 1


@pytest.fixture
def own(library: Library) -> Iterator[Client]:
    """Yield a cluster of three workers that a test may damage."""
    with cluster(library.name, workers=3) as client:
        yield client


def kill(client: Client, address: str) -> None:
    pid = client.run(os.getpid, workers=[address])[address]
    os.kill(pid, signal.SIGKILL)


def waits_at(event: str, part: int) -> Callable[[Any, int], Any]:
    """Make one partition wait for an event, and report its worker."""

    def slow(frame: Any, i: int) -> Any:
        if i == part and not Event(event).is_set():
            Variable(f"{event}-worker").set(get_worker().address)
            Event(f"{event}-reached").set()
            Event(event).wait(timeout=60)
        return frame

    return slow


def test_a_preferred_worker_that_is_lost_is_only_a_preference(own: Client, library: Library) -> None:
    """Tasks run on it until it is killed, if they are not stolen; then on the others."""
    worker = next(iter(own.nthreads()))
    out = build(library, waits_at("go", PARTS - 1)).shuffle("key")
    future = own.compute(out, workers=[worker], allow_other_workers=True, optimize_graph=False)
    Event("go-reached", client=own).wait(timeout=60)
    kill(own, worker)
    Event("go", client=own).set()
    rows = canonical(to_pandas(future.result(timeout=60)), index=False)
    pd.testing.assert_frame_equal(rows, canonical(pd.concat(frames()), index=False))
    assert counters(own).get("shuffle.runs.restarted", 0) == 0


def stop_at_barrier(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stop a worker with SIGSTOP when the first barrier is sent to another one.

    Returns a list that receives its address. Silence is noticed after a second.
    """
    monkeypatch.setattr(worker_calls, "SILENT_S", 1.0)
    monkeypatch.setattr(worker_calls, "MISSED", 2)
    processes, transition, stopped = client.run(os.getpid), Recovery.transition, list[str]()

    def stops(self: Recovery, key: Any, finish: str, worker: str | None) -> None:
        transition(self, key, finish, worker)
        if finish == "processing" and id_from_key(key) and not stopped:
            where = self._scheduler.tasks[key].processing_on.address
            stopped.append(next(each for each in processes if each != where))
            os.kill(processes[stopped[0]], signal.SIGSTOP)

    monkeypatch.setattr(Recovery, "transition", stops)
    return stopped


@contextmanager
def continued(client: Client) -> Iterator[None]:
    """Continue all processes after the body."""
    processes = client.run(os.getpid).values()
    try:
        yield
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_worker_is_stopped_at_the_barrier(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others finish without it. Afterwards it takes part again."""
    with cluster(library.name, workers=3) as client:
        stopped = stop_at_barrier(client, monkeypatch)
        with continued(client):
            out = build(library).shuffle("key").persist()
            assert_right(out)
            (worker,) = stopped
            state = client.cluster.scheduler.workers[worker]
            assert state.status is Status.paused, "it would get tasks of Dask otherwise"
        del out
        until(lambda: state.status is Status.running)
        assert_right(build(library).shuffle("key", npartitions=6))
        counted = counters(client)
        assert counted["shuffle.workers.silent"] >= 1
        assert counted["shuffle.runs.recovered"] >= 1
        assert not counted.get("shuffle.runs.restarted")


def test_an_output_task_that_fails_finds_its_shards_again(own: Client, library: Library) -> None:
    def flaky(frame: Any, partition_info: Any = None) -> Any:
        if partition_info and not Event(f"tried-{partition_info['number']}").is_set():
            Event(f"tried-{partition_info['number']}").set()
            raise ValueError("not yet")
        return frame

    shuffled = build(library).shuffle("key")
    out = shuffled.map_partitions(flaky, meta=shuffled._meta).persist(retries=3)
    assert_right(out)


def test_a_shuffle_whose_barrier_has_failed_keeps_nothing_and_can_be_retried(
    own: Client, library: Library
) -> None:
    """Although the client keeps the error: other shuffles need the memory of its shards."""

    def fail_barriers(fail: bool) -> None:
        from dask_gpurt.shuffle.offers import Sealing

        async def failing(self: Any, results: Any) -> Any:
            if fail:
                raise ValueError("a test")
            return await self.kept(results)

        Sealing.kept = getattr(Sealing, "kept", Sealing.seal)
        Sealing.seal = failing

    def kept(dask_worker: Any) -> int:
        pools = dask_worker.plugins["gpurt"].exchange.pools.describe().values()
        runs = dask_worker.plugins["shuffle"].shuffle_runs._active_runs
        return len(runs) + sum(pool["used"] for pool in pools)

    own.run(fail_barriers, True)
    out = build(library).shuffle("key").persist()
    with pytest.raises(RuntimeError, match="failed during barrier phase"):
        out.compute()
    until(lambda: not any(own.run(kept).values()))
    own.run(fail_barriers, False)
    with suppress(KeyError):  # of the barrier, which the scheduler retries, but the client does not know
        own.retry(futures_of(out))
    assert_right(out)


def test_after_too_many_runs_the_shuffle_says_so(library: Library) -> None:
    def begin_again(frame: Any, i: int) -> Any:
        """End the run at each input after another task has begun it, as losing a worker would."""
        worker = get_worker()
        runs = list(worker.plugins["shuffle"].shuffle_runs._active_runs.values())
        if runs:
            sync(worker.loop, runs[0]._begin_again, "a test")
        return frame

    with cluster(library.name, workers=1, shuffle__retries=2) as client:
        out = build(library, begin_again).shuffle("key").persist()
        with pytest.raises(
            P2PConsistencyError, match=r"given up after 3 runs.*'gpurt\.shuffle\.retries' is 2"
        ):
            out.compute()
        del out
        assert_right(build(library).shuffle("key", npartitions=5))
        assert counters(client)["shuffle.runs"] == 4


def test_the_runtime_is_switched_off_during_a_shuffle(library: Library) -> None:
    with cluster(library.name, workers=2) as client:
        out = build(library, waits_at("go", PARTS - 1)).shuffle("key").persist()
        Event("go-reached", client=client).wait(timeout=60)
        dask_gpurt.disable(client)
        Event("go", client=client).set()
        with pytest.raises(RuntimeError, match="failed during transfer phase") as caught:
            out.compute()
        assert "the runtime" in str(caught.value.__cause__)
        del out
        dask_gpurt.enable(client)
        assert_right(build(library).shuffle("key", npartitions=5))


def mapped_pools(pid: str = "self") -> set[tuple[str, str]]:
    """Return path and inode of each shared-memory pool that a process maps."""
    with suppress(FileNotFoundError, PermissionError):  # the process ended, or belongs to another user
        fields = [line.split(maxsplit=5) for line in Path("/proc", pid, "maps").read_text().splitlines()]
        return {(f[5], f[4]) for f in fields if len(f) == 6 and f[5].startswith(("/dev/shm/", "/memfd:dask"))}
    return set()


def test_nothing_is_left_behind(library: Library) -> None:
    """Pools have no names in /dev/shm that a killed worker could leave; their bytes are freed with it."""
    with cluster(library.name, workers=2) as client:
        out = build(library).shuffle("key").persist()
        wait(out)
        assert counters(client)["shuffle.runs"]
        pools = set[tuple[str, str]]().union(*client.run(mapped_pools).values())
        if library.name == "pandas":
            assert len(pools) >= 2
        assert all(path.endswith("(deleted)") or path.startswith("/dev/shm/sem.") for path, _ in pools)
        kill(client, next(iter(client.nthreads())))
        assert_right(out)
        del out
    assert not any(pools & mapped_pools(process) for process in os.listdir("/proc") if process.isdigit())
