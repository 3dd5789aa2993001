"""Count progress in each run of a shuffle: per worker, in its heartbeats, and summed over workers.

Dask's heartbeat covers a run only while it is active. A run may end between two heartbeats, so the last runs
of a worker are kept here for the next heartbeat to report their final figures.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from time import perf_counter, time
from typing import Any, Self

#: Maximum number of runs that a worker keeps; the earliest are dropped first.
MAX_RUNS = 8
#: The steps of a run on task threads.
STEPS = ("splitting", "packing", "assembling")


@dataclass
class Figures:
    """Hold the figures of one worker in one run, or their sum over workers.

    ``offered_bytes``, ``offered_shards``: shards published for owners, including this worker.
    ``received_bytes``: bytes of shards accepted from producers, including this worker.
    ``splitting``, ``packing``, ``assembling``: thread time in seconds; packing includes waits for room.
    ``outputs``, ``rows``: output partitions assembled here, and their rows.
    ``largest``, ``largest_rows``: the output with the most rows, and its number of rows; -1 before the first
    output.
    """

    offered_bytes: int = 0
    offered_shards: int = 0
    received_bytes: int = 0
    splitting: float = 0.0
    packing: float = 0.0
    assembling: float = 0.0
    outputs: int = 0
    rows: int = 0
    largest: int = -1
    largest_rows: int = -1

    @classmethod
    def of(cls, reported: Mapping[str, Any]) -> Self:
        """Build figures from plain values; a worker with another version may report more."""
        return cls(**{item.name: reported[item.name] for item in fields(cls) if item.name in reported})

    @classmethod
    def total(cls, workers: Iterable[Self]) -> Self:
        """Sum figures; the largest output is that of all workers."""
        whole = cls()
        largest = max(workers := list(workers), key=lambda one: one.largest_rows, default=whole)
        for name in _SUMMED:
            setattr(whole, name, sum(getattr(one, name) for one in workers))
        whole.largest, whole.largest_rows = largest.largest, largest.largest_rows
        return whole

    @property
    def skew(self) -> float | None:
        """Return the rows of the largest output over the mean of the outputs; None without rows."""
        return self.largest_rows * self.outputs / self.rows if self.rows else None


_SUMMED = [item.name for item in fields(Figures) if not item.name.startswith("largest")]


class RunProgress:
    """Count the progress of one run. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._figures = Figures()
        self._assembled: dict[int, int] = {}
        self._began = time()

    def offered(self, nbytes: int) -> None:
        """Count a published shard."""
        with self._lock:
            self._figures.offered_bytes += nbytes
            self._figures.offered_shards += 1

    def received(self, nbytes: int) -> None:
        """Count an accepted shard."""
        with self._lock:
            self._figures.received_bytes += nbytes

    def assembled(self, output: int, rows: int) -> None:
        """Count an assembled output; an output that is assembled again counts once."""
        with self._lock:
            figures = self._figures
            figures.rows += rows - self._assembled.get(output, 0)
            self._assembled[output] = rows
            figures.outputs = len(self._assembled)
            if rows > figures.largest_rows:
                figures.largest, figures.largest_rows = output, rows

    @contextmanager
    def seconds(self, step: str) -> Iterator[None]:
        """Add the duration of the body to one of :data:`STEPS`."""
        start = perf_counter()
        try:
            yield
        finally:
            took = perf_counter() - start
            with self._lock:
                setattr(self._figures, step, getattr(self._figures, step) + took)

    def snapshot(self) -> dict[str, Any]:
        """Return the fields of :class:`Figures` as plain values."""
        with self._lock:
            return asdict(self._figures)

    def for_dask(self, pools: Iterable[Mapping[str, int]]) -> dict[str, Any]:
        """Return the figures that Dask's page of shuffles reads.

        ``pools``: the exchange pools, which all runs of the worker share: shown as Dask's buffer for comms.
        There is none for the disk, since spilled data are written at once.
        """
        figures, pools = self.snapshot(), list(pools)
        shards = max(1, figures["offered_shards"])
        comm = {
            "memory": sum(pool["used"] - pool["retained"] for pool in pools),
            "memory_limit": sum(pool["capacity"] for pool in pools),
            "total": figures["offered_bytes"],
            "written": figures["offered_bytes"],
            "read": figures["received_bytes"],
            "avg_size": figures["offered_bytes"] / shards,
            "avg_duration": figures["packing"] / shards,
        }
        none = dict.fromkeys((*comm, "buckets"), 0)
        return {"comm": {**none, **comm}, "disk": none, "start": self._began}


class RecentRuns:
    """Keep the progress of the last runs of a worker. On the event loop, except :meth:`snapshot`."""

    def __init__(self) -> None:
        self._runs: OrderedDict[tuple[str, int], RunProgress] = OrderedDict()

    def begin(self, run: tuple[Any, int]) -> RunProgress:
        """Return the counter of a new run; drop the earliest run beyond :data:`MAX_RUNS`."""
        shuffle, run_id = run
        progress = self._runs[str(shuffle), run_id] = RunProgress()
        if len(self._runs) > MAX_RUNS:
            self._runs.popitem(last=False)
        return progress

    def snapshot(self) -> list[list[Any]]:
        """Return shuffle, run id and figures of each run, the earliest first, as plain values."""
        return [[*run, progress.snapshot()] for run, progress in list(self._runs.items())]
