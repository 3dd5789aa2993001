"""Sample how long the event loop of a worker is blocked."""

from __future__ import annotations

import statistics
import time
from typing import Any

from distributed import Client, Worker, WorkerPlugin
from tornado.ioloop import PeriodicCallback

from dask_gpurt.observe.waiting import thread_stacks

INTERVAL = 0.005


class LoopStalls(WorkerPlugin):
    """Record the delay of a callback that is due every 5 ms."""

    name = "loop-stalls"

    def setup(self, worker: Worker) -> None:
        self.late: list[float] = []
        self._last = time.perf_counter()
        self._callback = PeriodicCallback(self._tick, INTERVAL * 1000)
        self._callback.start()

    def teardown(self, worker: Worker) -> None:
        self._callback.stop()

    def _tick(self) -> None:
        now = time.perf_counter()
        # Tornado skips missed calls, so measure the time between two calls.
        self.late.append(max(0.0, now - self._last - INTERVAL))
        self._last = now

    def take(self) -> list[float]:
        """Return the seconds of lateness since the last call."""
        late, self.late = self.late, []
        return late


def take_stalls(client: Client) -> dict[str, float]:
    """Return the longest and the median stall of all workers since the last call, in seconds."""

    def take(dask_worker: Any) -> list[float]:
        return dask_worker.plugins[LoopStalls.name].take()

    late = [seconds for of_worker in client.run(take).values() for seconds in of_worker]
    return {"max": max(late, default=0.0), "median": statistics.median(late) if late else 0.0}


def take_stacks(client: Client) -> dict[str, dict[str, str]]:
    """Return the stacks of all threads of each worker, to diagnose a run that hangs."""
    return dict(client.run(thread_stacks))
