"""Measure the time that the threads of a worker spend in functions that read files or make tables."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from distributed import Client, WorkerPlugin

from dask_gpurt.dask_hooks import PatchSet
from dask_gpurt.dask_hooks.readers import Readers
from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.worker.layers import Layer


class _Clock(threading.local):
    """Count the nested readers on this thread: readers call each other, and only the outermost is timed."""

    depth = 0


class _Total:
    """Sum the seconds of all threads in this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        with self._lock:
            self.seconds += seconds


_clock, _total = _Clock(), _Total()


@contextmanager
def reading() -> Iterator[None]:
    """Count the time of the body as reading."""
    _clock.depth += 1
    began = time.perf_counter()
    try:
        yield
    finally:
        _clock.depth -= 1
        if not _clock.depth:
            _total.add(time.perf_counter() - began)


def timed(reader: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to count its time as reading."""

    @wraps(reader)
    def read(*args: Any, **kwargs: Any) -> Any:
        with reading():
            return reader(*args, **kwargs)

    return read


class ReadClock(WorkerPlugin):
    """Time the file readers of dataframe tasks, including tasks fused with other operations.

    Readers that differ from the known versions are not wrapped, and do not count.
    """

    name = "gpurt-bench-reads"

    def setup(self, worker: WorkerServer) -> None:
        """Wrap the readers that are already imported."""
        # Use the runtime's layer: the runtime may be switched on before or after.
        self._patches = PatchSet(Layer.READS)
        self._readers = Readers(self._patches, timed, lambda difference: None)
        self.wrap_imported()

    def teardown(self, worker: WorkerServer) -> None:
        """Restore the readers."""
        self._patches.restore()

    def wrap_imported(self) -> None:
        """Wrap readers that have been imported since."""
        self._readers.wrap_imported()


def read_seconds(client: Client) -> float:
    """Return the total thread seconds in readers on all workers so far."""
    # Workers that share a process share its total, so count each process once.
    return sum(dict(client.run(_read_seconds).values()).values())


def _read_seconds(dask_worker: WorkerServer) -> tuple[int, float]:
    dask_worker.plugins[ReadClock.name].wrap_imported()
    return os.getpid(), _total.seconds
