"""Pause, close, retire or switch off a worker while tasks and fetches wait for room in its memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import numpy as np
import pytest
from distributed import get_worker
from distributed.core import Status

import dask_gpurt
from tests.helpers.in_process import Decorator, Test, gen_client_cluster, until
from tests.helpers.waiting import LIMIT_S

MIB = 2**20
CONFIG = {
    "gpurt.memory.device": 8 * MIB,
    "gpurt.memory.pinned": 8 * MIB,
    "gpurt.memory.host": 0,
    "gpurt.exchange.pool": 4 * MIB,
    "distributed.worker.memory.pause": False,  # for the size of this process
}
#: Set once tasks may end, and what ran where.
_go_on = threading.Event()
_ran: list[tuple[str, str]] = []


@pytest.fixture(autouse=True)
def _tasks() -> Iterator[None]:
    _ran.clear()
    yield
    _go_on.set()


def wide(name: str) -> str:
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
    one = client.submit(wide, "one", key="wide-11", workers=[worker.address], **options)
    await until(lambda: ("one", worker.address) in _ran)
    two = client.submit(wide, "two", key="wide-12", workers=[worker.address], **options)
    await until(lambda: is_waiting(worker))
    return [one, two]


@on_full_cluster(workers=1)
async def test_a_worker_is_paused_while_a_task_waits_for_room(
    client: Any, scheduler: Any, worker: Any
) -> None:
    """The task has a thread, and runs, as those do that have started; others run once it is resumed."""
    futures = await fill(client, worker)
    third = client.submit(wide, "three", key="wide-13")
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
    one = client.submit(wide, "one", key="wide-11", workers=[here.address], allow_other_workers=True)
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
