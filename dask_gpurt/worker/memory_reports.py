"""Report a worker's tiers to the scheduler: changes after a short delay, everything with each heartbeat."""

from __future__ import annotations

import time
from typing import Any

from distributed.comm.core import CommClosedError

from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.memory.ledger import KINDS, Ledger
from dask_gpurt.protocol import MEMORY_METRIC, MEMORY_OP
from dask_gpurt.worker.heartbeats import add_metric

#: Changes within this interval are sent in one message, in seconds.
REPORT_INTERVAL_S = 0.05
#: The most messages between two heartbeats. Dask limits all workers together to 200 heartbeats per second, so
#: the scheduler receives at most 2,000 reports per second.
MAX_REPORTS_PER_HEARTBEAT = 10


class Reporter:
    """Send the changes of a worker's ledger to the scheduler. Thread-safe."""

    def __init__(self, worker: WorkerServer, ledger: Ledger):
        self._worker = worker
        self._ledger = ledger
        self._scheduled = False
        self._closed = False
        self._reported_at = 0.0
        self._remove_metric = add_metric(worker, MEMORY_METRIC, self._whole)

    @property
    def pause(self) -> float:
        """Return the shortest interval between two messages, in seconds."""
        heartbeat: float = self._worker.periodic_callbacks["heartbeat"].callback_time / 1000
        return max(REPORT_INTERVAL_S, heartbeat / MAX_REPORTS_PER_HEARTBEAT)

    def _whole(self, _worker: WorkerServer) -> dict[str, Any]:
        return self._ledger.snapshot()

    def changed(self) -> None:
        """Schedule a report of pending changes."""
        # A benign race: two threads may both schedule a report. The second one finds no changes.
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._worker.loop.add_callback(self._later)

    def _later(self) -> None:
        since = time.monotonic() - self._reported_at
        self._worker.loop.call_later(max(REPORT_INTERVAL_S, self.pause - since), self._send)

    def _send(self) -> None:
        self._scheduled = False
        message = None if self._closed else self._ledger.changes()
        if message is None:
            return
        self._reported_at = time.monotonic()
        try:
            self._worker.batched_stream.send({"op": MEMORY_OP, **message})
        except CommClosedError:
            return  # the next heartbeat carries everything

    def send_now(self) -> None:
        """Send all pending changes at once. On the event loop."""
        self._send()

    def close(self) -> None:
        """Stop reporting."""
        self._closed = True
        self._remove_metric()


def amounts(ledger: Ledger) -> list[tuple[str, str, int]]:
    """Return tier, kind and bytes for each cell of a ledger; ``capacity`` counts as a kind."""
    return [
        (str(tier), kind, capacity if kind == "capacity" else ledger.cell(tier, kind))
        for tier, capacity in ledger.capacity.items()
        for kind in ("capacity", *KINDS)
    ]
