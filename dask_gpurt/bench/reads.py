"""Count the seconds that the threads of a worker are in functions that read files, or make tables."""

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
from dask_gpurt.plugins.switching import Layer


class _Clock(threading.local):
    """Count the readers that this thread is in: they call each other, and the outermost counts."""

    depth = 0


class _Total:
    """Sum the seconds of all threads of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        with self._lock:
            self.seconds += seconds


_clock, _total = _Clock(), _Total()


@contextmanager
def reading() -> Iterator[None]:
    """Count the body as reading."""
    _clock.depth += 1
    began = time.perf_counter()
    try:
        yield
    finally:
        _clock.depth -= 1
        if not _clock.depth:
            _total.add(time.perf_counter() - began)


def timed(reader: Callable[..., Any]) -> Callable[..., Any]:
    """Count the calls of a function as reading."""

    @wraps(reader)
    def read(*args: Any, **kwargs: Any) -> Any:
        with reading():
            return reader(*args, **kwargs)

    return read


class ReadClock(WorkerPlugin):
    """Count the functions by which tasks of dataframes read files, also where they are fused with others.

    A function that differs from the one that is known is left alone, and does not count.
    """

    name = "gpurt-bench-reads"

    def setup(self, worker: Any) -> None:
        """Begin with the readers that are imported."""
        # That of the runtime, which may be switched on before, and after.
        self._patches = PatchSet(Layer.READS)
        self._readers = Readers(self._patches, timed, lambda difference: None)
        self.look()

    def teardown(self, worker: Any) -> None:
        """Leave the readers as they were."""
        self._patches.restore()

    def look(self) -> None:
        """Count the readers too that have been imported meanwhile."""
        self._readers.look()


def read_seconds(client: Client) -> float:
    """Return the seconds of all threads of all workers in readers so far."""
    # Workers may be threads of one process, which has one clock.
    return sum(dict(client.run(_read_seconds).values()).values())


def _read_seconds(dask_worker: Any) -> tuple[int, float]:
    dask_worker.plugins[ReadClock.name].look()
    return os.getpid(), _total.seconds
