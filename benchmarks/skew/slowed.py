"""Slow a process down: it is stopped and goes on, many times a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

#: Seconds for which a process is stopped, and for which it goes on then.
STOPPED_S, RUNNING_S = 0.02, 0.02


class DutyCycle:
    """Stop a process with SIGSTOP and have it go on with SIGCONT, in turns, on a thread of its own.

    The last signal is SIGCONT, whatever ends the thread. A process that has ended, or whose id another one
    has now, gets no signal, and ends the thread.

    Parameters
    ----------
    pid
        A process that this one has started.

    Attributes
    ----------
    stopped_seconds
        For which it was stopped until now. A thread wakes up late on a busy machine, so this, not the times
        that were asked for, says how fast the process was.
    """

    def __init__(self, pid: int):
        self.stopped_seconds = 0.0
        self._process = psutil.Process(pid)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="duty-cycle", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Return whether the process is still stopped now and then."""
        return self._thread.is_alive()

    def end(self) -> None:
        """Have the process go on for good."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with suppress(psutil.NoSuchProcess):
            try:
                while not self._ended.is_set():
                    began = time.perf_counter()
                    self._process.suspend()
                    self._ended.wait(STOPPED_S)
                    self._process.resume()
                    self.stopped_seconds += time.perf_counter() - began
                    self._ended.wait(RUNNING_S)
            finally:
                self._process.resume()


@contextmanager
def half_speed(pid: int) -> Iterator[DutyCycle]:
    """Have a process run for half of the time until the end of the block."""
    cycle = DutyCycle(pid)
    try:
        yield cycle
    finally:
        cycle.end()
