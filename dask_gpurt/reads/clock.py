"""Tell what a thread does with its time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

#: Nanoseconds that this thread has run, and that it has waited for a processor; the kernel keeps count.
_COUNTS = Path("/proc/thread-self/schedstat")


class ThreadTime(NamedTuple):
    """Read the clocks of this thread.

    Attributes
    ----------
    at
        Seconds of a clock on the wall.
    ran_s
        Seconds that it has run.
    delayed_s
        Seconds that it could have run, and waited for a processor; 0 where the kernel does not tell.
    """

    at: float
    ran_s: float
    delayed_s: float

    @classmethod
    def now(cls) -> ThreadTime:
        """Return the times as they are now. Takes some 10 µs."""
        try:
            ran, delayed, _ = _COUNTS.read_bytes().split()
        except (OSError, ValueError):  # as in some sandboxes
            return cls(time.perf_counter(), time.thread_time(), 0.0)
        return cls(time.perf_counter(), int(ran) / 1e9, int(delayed) / 1e9)

    def since(self, before: ThreadTime) -> tuple[float, float]:
        """Return the seconds since then but for delays, and those of them in which the thread did not run."""
        seconds = self.at - before.at - (self.delayed_s - before.delayed_s)
        return seconds, seconds - (self.ran_s - before.ran_s)
