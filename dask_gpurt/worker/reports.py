"""Report a worker to the scheduler: its tiers, the progress of its runs and its transfers.

Progress and transfers travel with each heartbeat. Changes of the tiers are sent after a short delay.

Decisions and their figures: ``docs/decisions/scheduler.md``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from distributed.comm.core import CommClosedError

from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.exchange.paths import COMMS, Traffic
from dask_gpurt.memory.ledger import KINDS, Ledger
from dask_gpurt.observe import Metrics
from dask_gpurt.observe.progress import RecentRuns
from dask_gpurt.protocol import MEMORY_OP

#: Changes within this interval are sent in one message, in seconds.
REPORT_INTERVAL_S = 0.05
#: The most messages between two heartbeats. Dask limits all workers together to 200 heartbeats per second, so
#: the scheduler receives at most 2,000 reports per second.
MAX_REPORTS_PER_HEARTBEAT = 10


def add_metric(worker: WorkerServer, name: str, read: Callable[[Any], dict[str, Any]]) -> Callable[[], None]:
    """Send a value with each heartbeat of a worker.

    ``read``: called with the worker; returns the value.
    Returns a function that ends that.
    """
    # Copies: a heartbeat may be iterating over the old dict.
    worker.metrics = {**worker.metrics, name: read}

    def remove() -> None:
        if worker.metrics.get(name) == read:  # and not the metric of a later plugin
            worker.metrics = {each: m for each, m in worker.metrics.items() if each != name}

    return remove


class MemoryReporter:
    """Send a worker's ledger to the scheduler as it changes. Thread-safe."""

    def __init__(self, worker: WorkerServer, ledger: Ledger):
        self._worker = worker
        self._ledger = ledger
        self._scheduled = False
        self._closed = False
        self._reported_at = 0.0

    @property
    def pause(self) -> float:
        """Return the shortest interval between two messages, in seconds."""
        heartbeat: float = self._worker.periodic_callbacks["heartbeat"].callback_time / 1000
        return max(REPORT_INTERVAL_S, heartbeat / MAX_REPORTS_PER_HEARTBEAT)

    def changed(self) -> None:
        """Schedule a report of pending changes."""
        # A benign race: two threads may both schedule a report. The second one finds no change.
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._worker.loop.add_callback(self._later)

    def _later(self) -> None:
        since = time.monotonic() - self._reported_at
        self._worker.loop.call_later(max(REPORT_INTERVAL_S, self.pause - since), self.send)

    def send(self) -> None:
        """Send what has changed at once. On the event loop."""
        self._scheduled = False
        message = None if self._closed else self._ledger.changes()
        if message is None:
            return
        self._reported_at = time.monotonic()
        with contextlib.suppress(CommClosedError):  # then the scheduler forgets this worker
            self._worker.batched_stream.send({"op": MEMORY_OP, **message})

    def close(self) -> None:
        """Stop reporting."""
        self._closed = True


def amounts(ledger: Ledger) -> list[tuple[str, str, int]]:
    """Return tier, kind and bytes for each cell of a ledger; ``capacity`` counts as a kind."""
    return [
        (str(tier), kind, capacity if kind == "capacity" else ledger.cell(tier, kind))
        for tier, capacity in ledger.capacity.items()
        for kind in ("capacity", *KINDS)
    ]


class Progress:
    """Tell heartbeats the progress of the latest runs, the bytes moved between tiers, and the transfers."""

    def __init__(self, runs: RecentRuns, traffic: Traffic, metrics: Metrics):
        self._runs = runs
        self._traffic = traffic
        self._metrics = metrics
        self._looked = 0.0

    def __call__(self, worker: WorkerServer) -> dict[str, Any]:
        self._note_dasks_own(worker)
        moves = self._metrics.total("memory.spill.bytes.{from}.{to}")
        return {
            "runs": self._runs.snapshot(),
            "moved": [[source, target, nbytes] for (source, target), nbytes in moves.items()],
            "traffic": self._traffic.largest(),
        }

    def _note_dasks_own(self, worker: WorkerServer) -> None:
        """Add the dependencies that Dask has fetched since the last call, from its log."""
        since = self._looked
        for entry in reversed(worker.transfer_incoming_log):
            if entry["stop"] <= since:
                break
            self._looked = max(self._looked, entry["stop"])
            self._traffic.note(entry["who"], COMMS, entry["total"], entry["duration"])
