"""Assert that no task on a worker hangs because another part failed or was disabled."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

import dask_gpurt
from benchmarks.common.waiting import describe_scheduler, describe_worker
from dask_gpurt.memory.admission import FETCH
from dask_gpurt.memory.disk import CorruptFile
from dask_gpurt.observe import Fallback
from tests.helpers.in_process import on_cluster

MIB = 2**20
TIGHT = {
    "gpurt.memory.device": 8 * MIB,
    "gpurt.memory.pinned": 8 * MIB,
    "gpurt.memory.host": 0,
    "gpurt.exchange.pool": 4 * MIB,
}
#: Timeout in seconds for operations that used to hang; none of them takes a second.
SOON_S = 20

_events: defaultdict[str, threading.Event] = defaultdict(threading.Event)


def fail(*_: Any) -> Any:
    raise OSError(5, "Input/output error")


def fallbacks(worker: Any) -> dict[str, Any]:
    found: dict[str, Any] = worker.plugins["gpurt"].metrics.snapshot()["fallbacks"]
    return found


@on_cluster(**TIGHT)
async def test_a_look_that_fails_does_not_leave_the_worker_paused(
    client: Any, scheduler: Any, a: Any, b: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    holding = a.plugins["gpurt"].data._dependents_first
    monkeypatch.setattr(holding, "_outlived", fail)
    holding.finished("a-task", 100 * MIB, 0)
    assert not a.state.running
    assert await asyncio.wait_for(client.submit(int, 7, workers=[a.address]), SOON_S) == 7
    assert Fallback.MEMORY_DEPENDENTS_FIRST.id in fallbacks(a)


@on_cluster(**TIGHT)
async def test_a_worker_that_is_held_back_goes_on_when_the_runtime_is_switched_off(
    client: Any, scheduler: Any, a: Any, b: Any
) -> None:
    a.plugins["gpurt"].data._dependents_first.finished("a-task", 100 * MIB, 0)
    assert not a.state.running
    await dask_gpurt.disable(client)
    assert await asyncio.wait_for(client.submit(int, 7, workers=[a.address]), SOON_S) == 7


@pytest.mark.parametrize("step", ["before it comes", "when it has come"])
@on_cluster(**TIGHT)
async def test_data_come_from_a_peer_though_no_room_can_be_made_for_them(
    client: Any, scheduler: Any, a: Any, b: Any, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk to which other data would be evicted fails. Dask would never see the end of the fetch."""
    made = client.submit(np.ones, MIB, np.uint8, workers=[a.address])
    await made
    tiered_buffer = b.plugins["gpurt"].tiers.tiered_buffer
    kept, at_once = tiered_buffer.reservations.replace, tiered_buffer.reservations.try_reserve
    monkeypatch.setattr(tiered_buffer.reservations, "spill_and_try", fail)
    monkeypatch.setattr(tiered_buffer.reservations, "spill_for_all", fail)
    # For fetches only: a task fails with its own error.
    if step == "before it comes":
        monkeypatch.setattr(
            tiered_buffer.reservations,
            "try_reserve",
            lambda who, *to: who[0] != FETCH and at_once(who, *to),
        )
    else:
        monkeypatch.setattr(
            tiered_buffer.reservations, "replace", lambda who, to: who[0] != FETCH and kept(who, to)
        )
    assert await asyncio.wait_for(client.submit(len, made, workers=[b.address]), SOON_S) == MIB
    assert "memory.fetch-without-room" in fallbacks(b)


@on_cluster(**TIGHT)
async def test_a_task_fails_when_not_even_its_lost_inputs_can_be_found(
    client: Any, scheduler: Any, a: Any, b: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_: Any) -> Any:
        raise CorruptFile("a file is damaged")

    data = a.plugins["gpurt"].data
    monkeypatch.setattr(data._runner, "run", lost)
    monkeypatch.setattr(data._tiered_buffer, "unreadable", fail)
    with pytest.raises(OSError, match="Input/output error"):
        await asyncio.wait_for(client.submit(int, 7, workers=[a.address]), SOON_S)


def _hold(name: str) -> int:
    held = np.ones(5 * MIB, np.uint8)
    _events[f"{name} runs"].set()
    assert _events["go on"].wait(60)
    return int(held.nbytes)


# ---- reports of waits --------------------------------------------------------------------


@on_cluster(**TIGHT)
async def test_a_worker_and_the_scheduler_tell_what_waits(
    client: Any, scheduler: Any, a: Any, b: Any
) -> None:
    _events.clear()
    running = client.submit(_hold, "1", key="hold-1", workers=[a.address])
    behind = client.submit(int, running, key="behind", workers=[a.address])
    while not _events["1 runs"].is_set():
        await asyncio.sleep(0.01)
    told = (await client.run(describe_worker))[a.address]
    assert told["executing"] == ["hold-1"]
    assert "hold-1" in told["runtime"]["memory"]
    assert any("_hold" in stack for stack in told["threads"].values())
    assert any("describe" not in stack for stack in told["coroutines"])
    assert not [part for part in told["runtime"].values() if str(part).startswith("unknown: ")]
    told = await client.run_on_scheduler(describe_scheduler)
    assert told["processing"][a.address] == ["hold-1"]
    assert "('behind', ['hold-1'])" in told["waiting"]
    _events["go on"].set()
    await behind
