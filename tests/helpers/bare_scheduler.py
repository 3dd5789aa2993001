"""Run Dask's scheduler alone: it chooses workers, whose tasks a test finishes."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import dask

from benchmarks.simulate.clock import Clock
from benchmarks.simulate.scheduler import VirtualScheduler

PER_HOST = 8
NBYTES = 64 << 20


class BareState(VirtualScheduler):
    """Dask's scheduler with simulated workers; it keeps the messages to them."""

    def __init__(self, workers: int, threads: int = 1):
        with dask.config.set({"distributed.scheduler.work-stealing": False}):
            super().__init__(Clock(), 0.0, _no_listener)
        self.sent: deque[tuple[str, Any]] = deque()
        for number in range(workers):
            host, device = divmod(number, PER_HOST)
            address = f"tcp://10.{host // 250}.{host % 250}.1:{device + 1}"
            self.join(address, threads, 80 << 30, partial(self._keep, address))

    def _keep(self, address: str, *messages: dict[str, Any]) -> None:
        self.sent.extend((address, m["key"]) for m in messages if m["op"] == "compute-task")

    def run(self) -> list[tuple[Any, str]]:
        """Finish the sent tasks in order; return the worker of each task."""
        done = []
        while self.sent:
            address, key = self.sent.popleft()
            self.finish(key, address)
            done.append((key, address))
        return done

    def finish(self, key: Any, address: str, nbytes: int = NBYTES) -> None:
        """Complete the fetches and the run of a task on a worker."""
        ts, ws = self.tasks[key], self.workers[address]
        for dts in ts.dependencies:
            self.add_replica(dts, ws)
        self.handle_task_finished(
            key=key,
            worker=address,
            stimulus_id="finish",
            run_id=ts.run_id,
            metadata={},
            nbytes=nbytes,
            type=b"",
            typename="int",
            startstops=[{"action": "compute", "start": 0.0, "stop": 0.1}],
        )


def _no_listener(*messages: Any) -> None:
    """Drop reports to the client."""
