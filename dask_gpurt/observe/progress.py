"""Count what a worker does for each run of a shuffle, and keep that for a while after the run.

Dask's heartbeat tells of a run as long as it is active. A run may end between two heartbeats: the last runs
of a worker are kept here, so that the next heartbeat has what became of them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

#: Runs of one worker that are kept; the ones that began first go first.
MAX_RUNS = 8
#: The steps of a run on the threads of tasks.
STEPS = ("splitting", "packing", "assembling")


@dataclass
class Figures:
    """Hold what one worker has done in one run.

    Attributes
    ----------
    offered_bytes, offered_shards
        Published here for owners, this worker among them.
    received_bytes, received_shards
        Taken here from producers, this worker among them.
    splitting, packing, assembling
        Seconds of task threads; packing counts the wait for room too.
    outputs, rows
        Output partitions that were put together here, and their rows.
    largest, largest_rows
        The output with the most rows, and these; -1 before the first.
    """

    offered_bytes: int = 0
    offered_shards: int = 0
    received_bytes: int = 0
    received_shards: int = 0
    splitting: float = 0.0
    packing: float = 0.0
    assembling: float = 0.0
    outputs: int = 0
    rows: int = 0
    largest: int = -1
    largest_rows: int = -1


class RunProgress:
    """Count for one run. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._figures = Figures()
        self._assembled: dict[int, int] = {}

    def offered(self, nbytes: int) -> None:
        """Count a shard that was published."""
        with self._lock:
            self._figures.offered_bytes += nbytes
            self._figures.offered_shards += 1

    def received(self, nbytes: int) -> None:
        """Count a shard that was taken."""
        with self._lock:
            self._figures.received_bytes += nbytes
            self._figures.received_shards += 1

    def assembled(self, output: int, rows: int) -> None:
        """Count an output that was put together; one that is put together once more counts once."""
        with self._lock:
            figures = self._figures
            figures.rows += rows - self._assembled.get(output, 0)
            self._assembled[output] = rows
            figures.outputs = len(self._assembled)
            if rows > figures.largest_rows:
                figures.largest, figures.largest_rows = output, rows

    @contextmanager
    def seconds(self, step: str) -> Iterator[None]:
        """Add the time that the body takes to one of :data:`STEPS`."""
        start = perf_counter()
        try:
            yield
        finally:
            took = perf_counter() - start
            with self._lock:
                setattr(self._figures, step, getattr(self._figures, step) + took)

    def snapshot(self) -> dict[str, Any]:
        """Return the fields of :class:`Figures`, as plain values."""
        with self._lock:
            return asdict(self._figures)


class RecentRuns:
    """Keep the progress of the last runs of a worker. On the event loop, but for :meth:`snapshot`."""

    def __init__(self) -> None:
        self._runs: OrderedDict[tuple[str, int], RunProgress] = OrderedDict()

    def begin(self, run: tuple[Any, int]) -> RunProgress:
        """Return what counts for a new run; forgets the earliest beyond :data:`MAX_RUNS`."""
        shuffle, run_id = run
        progress = self._runs[str(shuffle), run_id] = RunProgress()
        if len(self._runs) > MAX_RUNS:
            self._runs.popitem(last=False)
        return progress

    def snapshot(self) -> list[list[Any]]:
        """Return shuffle, run and figures of each run, the earliest first, as plain values."""
        return [[*run, progress.snapshot()] for run, progress in list(self._runs.items())]
