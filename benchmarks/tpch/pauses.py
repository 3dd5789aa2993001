"""Time the garbage collections of a cluster's processes, each of which stops its process."""

from __future__ import annotations

import gc
from time import perf_counter
from typing import Any

from distributed import Client

#: Where a collection stops: the scheduler runs in the client's process if that has started the cluster.
PLACES = ("workers", "scheduler", "client")


class Collections:
    """Sum the seconds of this process's collections."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._began = perf_counter()
        else:
            self.seconds += perf_counter() - self._began


_HERE = Collections()


def take(**_: Any) -> float:
    """Return the seconds of collections in this process since the last call; record from the first one on."""
    if _HERE not in gc.callbacks:
        gc.callbacks.append(_HERE)
    seconds, _HERE.seconds = _HERE.seconds, 0.0
    return seconds


def take_pauses(client: Client) -> dict[str, float]:
    """Return the seconds of collections since the last call; those of the worker that was stopped longest."""
    spent: dict[str, float] = client.run(take)
    # First: the scheduler may be in this process, whose pauses are then the scheduler's.
    at_scheduler: float = client.run_on_scheduler(take)
    return dict(zip(PLACES, (max(spent.values(), default=0.0), at_scheduler, take()), strict=True))
