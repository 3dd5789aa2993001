"""Limit how long producers wait for host memory that no worker of theirs holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpurt.exchange import outgoing
from dask_gpurt.exchange.outgoing import FOREIGN_PATIENCE_S, ROUND_FORGOTTEN_S, HostRoom
from dask_gpurt.observe import Metrics

ADDRESS = "tcp://127.0.0.1:1"


class Loop:
    """Run callbacks immediately."""

    def add_callback(self, function: Callable[..., Any], *args: Any) -> None:
        asyncio.run(function(*args))


class Clock:
    """Stand still, until the test advances it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


async def _held(host: str) -> dict[str, int]:
    return {ADDRESS: 0}


def test_many_tasks_do_not_each_wait_for_what_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused task is retried, and further tasks follow: all of them are refused at once."""
    clock = Clock()
    monkeypatch.setattr(outgoing, "time", clock)
    worker = SimpleNamespace(address=ADDRESS, loop=Loop(), scheduler=SimpleNamespace(gpurt_host_room=_held))
    room = HostRoom(worker, lambda: 0, lambda: None, Metrics(), lambda function: function())
    began = clock.now
    while clock.now - began <= FOREIGN_PATIENCE_S:
        room.ask(1)
        clock.now += 1
    for _ in range(20):  # for much longer than the result of a round is remembered
        clock.now += ROUND_FORGOTTEN_S / 2
        with pytest.raises(MemoryError):
            room.ask(1)
    clock.now += 2 * ROUND_FORGOTTEN_S
    room.ask(1)  # waits again
