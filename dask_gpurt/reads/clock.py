"""Measure how long a thread runs, waits for a core, and is blocked."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

#: Kernel statistics of the current thread: nanoseconds on a CPU, and on a run queue.
_COUNTS = "/proc/thread-self/schedstat"


class ThreadTime(NamedTuple):
    """Hold a snapshot of the clocks of a thread.

    Attributes
    ----------
    at
        Wall clock time in seconds.
    ran_s
        CPU time of the thread in seconds.
    delayed_s
        Time on the run queue in seconds, runnable but waiting for a CPU; 0 if the kernel does not report it.
    """

    at: float
    ran_s: float
    delayed_s: float

    @classmethod
    def now(cls) -> ThreadTime:
        """Return the current times of this thread. Takes a few µs."""
        try:
            ran, delayed, _ = _read(_COUNTS).split()
        except (OSError, ValueError):  # not available, for example in some sandboxes
            return cls(time.perf_counter(), time.thread_time(), 0.0)
        return cls(time.perf_counter(), int(ran) / 1e9, int(delayed) / 1e9)

    def since(self, before: ThreadTime) -> tuple[float, float]:
        """Return the seconds since ``before``, without those on the run queue, and their blocked part."""
        seconds = self.at - before.at - (self.delayed_s - before.delayed_s)
        return seconds, seconds - (self.ran_s - before.ran_s)


def _read(path: str) -> bytes:
    """Read a short file with three system calls; a Python file object takes more."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 256)
    finally:
        os.close(file)
