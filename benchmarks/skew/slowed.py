"""Slow a process down by stopping and continuing it many times per second."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

#: Seconds for which a process is stopped and runs, in turns.
STOPPED_S, RUNNING_S = 0.02, 0.02


class DutyCycle:
    """Stop and continue a process with SIGSTOP and SIGCONT, in turns, on a separate thread.

    The last signal is always SIGCONT, however the thread ends. The thread ends when the process does, and
    never signals another process that has reused its id.

    Parameters
    ----------
    pid
        A child process.

    Attributes
    ----------
    stopped_seconds
        Seconds for which it was stopped so far. A thread wakes up late on a busy machine, so the speed of the
        process follows from this and not from the requested times.
    """

    def __init__(self, pid: int):
        self.stopped_seconds = 0.0
        self._process = psutil.Process(pid)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="duty-cycle", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the duty cycle is still active."""
        return self._thread.is_alive()

    def end(self) -> None:
        """Let the process run at full speed again."""
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
    """Run a process at half speed until the end of the block."""
    cycle = DutyCycle(pid)
    try:
        yield cycle
    finally:
        cycle.end()
