"""Admit tasks and fetches only once a worker's memory has room."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, Event, get_worker, wait, worker_client
from distributed.core import Status

import dask_gpurt
from dask_gpurt.memory import admission
from dask_gpurt.observe import Fallback
from tests.helpers.clusters import cluster, counters, nested
from tests.helpers.in_process import Decorator, Test, gen_client_cluster, until
from tests.helpers.waiting import LIMIT_S

MIB = 2**20


TIGHT = {"memory__device": 8 * MIB, "memory__pinned": 8 * MIB, "memory__host": 0, "exchange__pool": 4 * MIB}


def wide(seconds: float = 0.0) -> Any:
    time.sleep(seconds)
    return np.ones(5 * MIB, np.uint8)


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    with cluster("pandas", workers=1, threads=2, failures=0, **TIGHT) as client:
        yield client


def test_a_task_without_room_waits_until_another_has_finished(two_threads: Client) -> None:
    two_threads.submit(wide, pure=False).result()  # teaches the estimator what the prefix needs
    at_once = two_threads.map(_overlap, range(6), key=[f"overlap-{i}" for i in range(6)])
    assert max(two_threads.gather(at_once)) == 2, "small tasks run beside each other"
    for future in two_threads.map(wide, [0.05] * 6, pure=False):
        future.release()
    futures = two_threads.map(wide, [0.05] * 6, pure=False)
    wait(futures)
    assert counters(two_threads)["memory.waits"] > 0
    assert [future.result().nbytes for future in futures] == [5 * MIB] * 6


_at_once: Counter[str] = Counter()


_lock = threading.Lock()


def _overlap(_: int) -> int:
    with _lock:
        _at_once["running"] += 1
    time.sleep(0.1)
    with _lock:
        found = _at_once["running"]
    time.sleep(0.1)
    with _lock:
        _at_once["running"] -= 1
    return found


def _slow_sum(*parts: Any) -> int:
    time.sleep(0.2)
    return sum(int(part[-1]) for part in parts)


def test_data_from_peers_wait_for_room_as_tasks_do() -> None:
    """Two workers want each other's data, three times as much as fits, one object at a time."""
    one_by_one = dask.config.set({"distributed.worker.transfer.message-bytes-limit": MIB})
    with one_by_one, cluster("pandas", workers=2, threads=1, failures=0, **TIGHT) as client:
        here, there = client.nthreads()
        made = {
            name: client.map(np.full, [3 * MIB] * 8, range(8), dtype="u1", workers=[name], pure=False)
            for name in (here, there)
        }
        wait([*made[here], *made[there]])
        sums = [
            client.submit(_slow_sum, *two, workers=[name], pure=False)
            for name, other in ((here, there), (there, here))
            for two in zip(*[iter(made[other])] * 2, strict=True)
        ]
        assert client.gather(sums) == [1, 5, 9, 13] * 2
        peaks = client.run(lambda dask_worker: dask_worker.plugins["gpurt"].metrics.snapshot())
        # Data sent to a peer, one object at a time, never wait for room: they may exceed the limit.
        assert max(one["counters"]["memory.device.peak"] for one in peaks.values()) <= (8 + 3) * MIB


def test_a_task_that_waits_for_tasks_of_its_own_does_not_stop_them(two_threads: Client) -> None:
    def parent() -> int:
        held = np.ones(5 * MIB, np.uint8)
        with worker_client() as client:  # secedes
            return int(client.submit(wide, pure=False).result().nbytes + held.nbytes)

    two_threads.submit(wide, pure=False).result()
    parents = two_threads.map(lambda _: parent(), range(3), pure=False)
    assert two_threads.gather(parents) == [10 * MIB] * 3


_met: defaultdict[str, threading.Event] = defaultdict(threading.Event)


def _meet(mine: str, other: str, _: Any = None) -> bool:
    held = np.ones(5 * MIB, np.uint8)
    _met[mine].set()
    return _met[other].wait(60) and bool(held.all())


@pytest.mark.parametrize("of", ["tasks", "a task and a fetch"])
def test_tasks_that_wait_for_each_other_both_run_though_memory_is_short(
    of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for the other's event; if one also waited for the other's memory, they would deadlock."""
    monkeypatch.setattr(admission, "ADMISSION_PATIENCE_S", 0.2)
    monkeypatch.setattr(sys.modules[__name__], "_met", defaultdict(threading.Event))
    workers = [("127.0.0.1", 2), ("127.0.0.1", 1)]

    @gen_client_cluster(nthreads=workers, config=nested(TIGHT))
    async def run(client: Any, scheduler: Any, here: Any, there: Any) -> None:
        await dask_gpurt.enable(client)
        await client.submit(wide, key="meet-0", workers=[here.address])  # teaches the prefix's needs
        far = None
        if of == "a task and a fetch":
            far = client.submit(np.ones, 5 * MIB, np.uint8, key="far", workers=[there.address])
            await far
        one = client.submit(_meet, "first", "second", key="meet-1", workers=[here.address])
        while not _met["first"].is_set():
            await asyncio.sleep(0.01)
        two = client.submit(_meet, "second", "first", far, key="meet-2", workers=[here.address])
        assert await client.gather([one, two]) == [True, True]
        report = await dask_gpurt.report(client)
        assert report["counters"]["memory.waits.overdue"] >= 1
        assert Fallback.MEMORY_ADMITTED_OVERDUE.id in report["workers"][here.address]["fallbacks"]
        await dask_gpurt.disable(client)

    run()


def _await(mine: str, other: str) -> bool:
    held = np.ones(5 * MIB, np.uint8)
    Event(mine).set()
    return bool(Event(other).wait(60)) and bool(held.all())


def test_a_task_that_waits_for_another_does_not_keep_it_from_starting(two_threads: Client) -> None:
    """At once, since it waits in a call of Dask, and not when the patience has run out."""
    two_threads.submit(wide, key="await-0").result()  # teaches the prefix's needs
    pair = [("one", "two"), ("two", "one")]
    both = [two_threads.submit(_await, *names, key=f"await-{i}") for i, names in enumerate(pair, 1)]
    assert two_threads.gather(both) == [True, True]
    assert counters(two_threads)["memory.waits.past-idle"] == 1
    assert "memory.waits.overdue" not in counters(two_threads)


def test_a_task_with_tiny_inputs_does_not_make_others_push_everything_out() -> None:
    with cluster("pandas", workers=1, failures=0) as client:
        tiny, kept = client.submit(int, 7, pure=False), client.submit(wide, pure=False)
        client.submit(lambda _: wide(), tiny, key="grow-1").result()
        client.submit(lambda array: array[:1], kept, key="grow-2").result()
        assert not [name for name in counters(client) if name.startswith("memory.spill.bytes")]


# ---- workers that pause, close, retire or go off while tasks and fetches wait for room ---------------

#: Dask would pause workers for the size of this process.
CONFIG = {**nested(TIGHT), "distributed.worker.memory.pause": False}
#: Set once tasks may end, and what ran where.
_go_on = threading.Event()
_ran: list[tuple[str, str]] = []


@pytest.fixture(autouse=True)
def _tasks() -> Iterator[None]:
    _ran.clear()
    yield
    _go_on.set()


def holding(name: str) -> str:
    """Run, as a task that needs most of the memory, until tasks may end."""
    _ran.append((name, get_worker().address))
    assert _go_on.wait(LIMIT_S)
    return name


def is_waiting(worker: Any) -> bool:
    """Return whether requests wait for room on a worker."""
    return "for memory wait []" not in repr(worker.plugins["gpurt"].data)


def on_full_cluster(workers: int) -> Decorator:
    """Run a coroutine on workers of two threads, which know what a task needs."""

    def decorate(test: Test) -> Callable[..., None]:
        @wraps(test)
        async def body(client: Any, scheduler: Any, *crew: Any, **fixtures: Any) -> None:
            await dask_gpurt.enable(client)
            _go_on.clear()
            for at, worker in enumerate(crew):
                await client.submit(np.ones, 5 * MIB, np.uint8, key=f"wide-{at}", workers=[worker.address])
            await test(client, scheduler, *crew, **fixtures)
            await dask_gpurt.disable(client)

        return gen_client_cluster(nthreads=[("127.0.0.1", 2)] * workers, config=CONFIG)(body)

    return decorate


async def fill(client: Any, worker: Any, **options: Any) -> list[Any]:
    """Start a task, and then one that has to wait for its room."""
    one = client.submit(holding, "one", key="wide-11", workers=[worker.address], **options)
    await until(lambda: ("one", worker.address) in _ran)
    two = client.submit(holding, "two", key="wide-12", workers=[worker.address], **options)
    await until(lambda: is_waiting(worker))
    return [one, two]


@on_full_cluster(workers=1)
async def test_a_worker_is_paused_while_a_task_waits_for_room(
    client: Any, scheduler: Any, worker: Any
) -> None:
    """The task has a thread, and runs, as those do that have started; others run once it is resumed."""
    futures = await fill(client, worker)
    third = client.submit(holding, "three", key="wide-13")
    await until(lambda: bool(worker.state.ready))
    worker.status = Status.paused
    await until(lambda: scheduler.workers[worker.address].status == Status.paused)
    _go_on.set()
    assert await client.gather(futures) == ["one", "two"]
    assert worker.state.ready
    assert not third.done()
    worker.status = Status.running
    assert await third == "three"


@pytest.mark.parametrize("ends", ["closes", "retires"])
@on_full_cluster(workers=2)
async def test_a_worker_ends_while_a_task_waits_for_room(
    client: Any, scheduler: Any, here: Any, there: Any, ends: str
) -> None:
    """Both tasks run on the other worker, where the second has to wait again."""
    futures = await fill(client, here, allow_other_workers=True)
    end = here.close(executor_wait=False) if ends == "closes" else client.retire_workers([here.address])
    ending = asyncio.ensure_future(end)
    await until(lambda: ("one", there.address) in _ran or ("two", there.address) in _ran)
    await until(lambda: is_waiting(there))
    _go_on.set()
    assert await client.gather(futures) == ["one", "two"]
    await ending
    await until(lambda: here.address not in scheduler.workers)
    assert ("two", here.address) not in _ran


@on_full_cluster(workers=2)
async def test_a_worker_closes_while_a_fetch_waits_for_room(
    client: Any, scheduler: Any, here: Any, there: Any
) -> None:
    far = client.submit(np.ones, 5 * MIB, np.uint8, key="far", workers=[there.address])
    await far
    one = client.submit(holding, "one", key="wide-11", workers=[here.address], allow_other_workers=True)
    await until(lambda: ("one", here.address) in _ran)
    total = client.submit(np.sum, far, workers=[here.address], allow_other_workers=True)
    await until(lambda: is_waiting(here))
    closing = asyncio.ensure_future(here.close(executor_wait=False))
    await until(lambda: ("one", there.address) in _ran)
    _go_on.set()
    assert await client.gather([one, total]) == ["one", 5 * MIB]
    await closing


@on_full_cluster(workers=1)
async def test_the_runtime_is_switched_off_while_a_task_waits_for_room(
    client: Any, scheduler: Any, worker: Any
) -> None:
    """The task runs as one of Dask's does, at once."""
    futures = await fill(client, worker)
    disabling = asyncio.ensure_future(dask_gpurt.disable(client))
    _go_on.set()
    await disabling
    assert await client.gather(futures) == ["one", "two"]
    assert await client.submit(sum, [1, 2]) == 3
