"""Steal work on running clusters, only between suitable workers."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from benchmarks.common.faults import differing_links
from tests.helpers.in_process import believed_full, on_cluster, placed_apart, until

#: Event that a test's tasks wait for; the workers are in this process.
GO = threading.Event()
PLACEMENT: dict[str, Any] = {
    "gpurt.placement.enabled": True,
    "distributed.scheduler.work-stealing": True,
    "distributed.scheduler.work-stealing-interval": "20 ms",
}


@pytest.fixture(autouse=True)
def _go() -> Any:
    GO.clear()
    with differing_links():
        yield
    GO.set()


def held_up(i: int, data: bytes = b"") -> int:
    assert GO.wait(60)
    return i


def moves_of(scheduler: Any) -> list[tuple[str, str]]:
    """Record the source and target of each steal request."""
    found: list[tuple[str, str]] = []
    stealing = scheduler.extensions["stealing"]
    request = stealing.move_task_request

    def move_task_request(ts: Any, victim: Any, thief: Any) -> Any:
        found.append((victim.address, thief.address))
        return request(ts, victim, thief)

    stealing.move_task_request = move_task_request
    return found


def load(client: Any, worker: str, tasks: int) -> list[Any]:
    """Submit blocking tasks to one worker that other workers may steal."""
    futures: list[Any] = client.map(held_up, range(tasks), workers=[worker], allow_other_workers=True)
    return futures


def fallbacks(scheduler: Any) -> dict[str, Any]:
    found: dict[str, Any] = scheduler.extensions["gpurt"].metrics.snapshot()["fallbacks"]
    return {name: known for name, known in found.items() if name.startswith("placement")}


@on_cluster(workers=3, **PLACEMENT)
async def test_a_thief_without_room_gets_nothing(
    client: Any, scheduler: Any, victim: Any, full: Any, roomy: Any
) -> None:
    believed_full(scheduler, full.address)
    moves = moves_of(scheduler)
    futures = load(client, victim.address, 12)
    await until(lambda: bool(roomy.state.tasks))
    GO.set()
    assert await client.gather(futures) == list(range(12))
    assert moves
    assert {thief for _, thief in moves} <= {victim.address, roomy.address}
    assert not fallbacks(scheduler)


@on_cluster(workers=3, **PLACEMENT)
async def test_with_room_nowhere_else_work_stays(
    client: Any, scheduler: Any, victim: Any, *others: Any
) -> None:
    for worker in others:
        believed_full(scheduler, worker.address)
    moves, asked = moves_of(scheduler), []
    choose = scheduler.extensions["stealing"]._get_thief
    scheduler.extensions["stealing"]._get_thief = lambda *args, **kwargs: (
        asked.append(args[1].key) or choose(*args, **kwargs)
    )
    futures = load(client, victim.address, 12)
    await until(lambda: len(asked) > 20)
    GO.set()
    assert await client.gather(futures) == list(range(12))
    assert not moves
    assert not fallbacks(scheduler)


@on_cluster(workers=3, **PLACEMENT)
async def test_inputs_move_within_the_nvlink_domain_first(
    client: Any, scheduler: Any, victim: Any, near: Any, far: Any
) -> None:
    await placed_apart(scheduler, victim, near, far)
    kept = await client.scatter(
        bytes(10**6), workers=[near.address]
    )  # Dask would pick the worker that holds less
    data = await client.scatter(bytes(10**6), workers=[victim.address])
    moves = moves_of(scheduler)
    where = {"workers": [victim.address], "allow_other_workers": True}
    futures = [client.submit(held_up, i, data, **where) for i in range(3)]
    await until(lambda: bool(moves))
    assert moves[0] == (victim.address, near.address)
    assert kept.status == "finished"
    GO.set()
    assert await client.gather(futures) == list(range(3))
    assert not fallbacks(scheduler)
