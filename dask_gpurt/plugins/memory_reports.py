"""Report a worker's tiers to the scheduler: changes soon, and all with each heartbeat."""

from __future__ import annotations

import time
from typing import Any

from distributed.comm.core import CommClosedError

from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.memory.ledger import KINDS, Ledger

#: The name of the stream operation and of the heartbeat metric.
OP, METRIC = "gpurt-memory", "gpurt_memory"
#: Seconds within which changes go in one message.
REPORT_INTERVAL_S = 0.05
#: The most messages between two heartbeats. Dask lets workers' hearts beat more slowly the more workers there
#: are, at most 200 times a second in all: so the scheduler never gets more than 2,000 messages a second.
MAX_REPORTS_PER_HEARTBEAT = 10


class Reporter:
    """Send the changes of a ledger; from any thread.

    Parameters
    ----------
    worker
        The Dask worker whose ledger it is.
    """

    def __init__(self, worker: WorkerServer, ledger: Ledger):
        self._worker = worker
        self._ledger = ledger
        self._scheduled = False
        self._closed = False
        self._reported_at = 0.0
        # In a new dictionary: a heartbeat that is being put together goes over the old one.
        self._before = {METRIC: worker.metrics[METRIC]} if METRIC in worker.metrics else {}
        worker.metrics = {**worker.metrics, METRIC: self._whole}

    @property
    def pause(self) -> float:
        """Return the least seconds from one message to the next."""
        heartbeat: float = self._worker.periodic_callbacks["heartbeat"].callback_time / 1000
        return max(REPORT_INTERVAL_S, heartbeat / MAX_REPORTS_PER_HEARTBEAT)

    def _whole(self, _worker: Any) -> dict[str, Any]:
        return self._ledger.snapshot()

    def changed(self) -> None:
        """Note that there may be something to report."""
        # Two threads may both find that nothing is scheduled: the second message has nothing to tell.
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
            self._worker.batched_stream.send({"op": OP, **message})
        except CommClosedError:
            return  # the next heartbeat carries all of it

    def send_now(self) -> None:
        """Send all pending changes at once. On the event loop."""
        self._send()

    def close(self) -> None:
        """Stop reporting."""
        self._closed = True
        metrics = self._worker.metrics
        if metrics.get(METRIC) == self._whole:  # else another has put its own there
            self._worker.metrics = {name: m for name, m in metrics.items() if name != METRIC} | self._before


def amounts(ledger: Ledger) -> list[tuple[str, str, int]]:
    """Return tier, kind and bytes of all that a ledger knows; a tier's ``capacity`` counts as a kind."""
    return [
        (str(tier), kind, capacity if kind == "capacity" else ledger.cell(tier, kind))
        for tier, capacity in ledger.capacity.items()
        for kind in ("capacity", *KINDS)
    ]
