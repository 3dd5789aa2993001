"""Sample how long the event loop of a worker is blocked, and find out why nothing happens.

If a loop is blocked, a signal writes the stacks of all threads without the loop or the GIL, provided that
:func:`arm` was called before. :class:`Watchdog` detects from its own thread that nothing happens.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from distributed import Client, Worker, WorkerPlugin
from tornado.ioloop import PeriodicCallback

from benchmarks.common.waiting import thread_stacks

INTERVAL = 0.005
#: Poll interval of a watchdog, in seconds.
WATCHDOG_POLL_S = 0.25
#: Time that a signalled process gets to write its stacks, in seconds.
SIGNAL_ANSWER_S = 0.5
#: The files that the signal handler writes stacks to, which have to stay open.
_armed: dict[Path, TextIO] = {}


class LoopStalls(WorkerPlugin):
    """Record the delay of a callback that is due every 5 ms."""

    name = "loop-stalls"

    def setup(self, worker: Worker) -> None:
        self.late: list[float] = []
        self._last = time.perf_counter()
        self._callback = PeriodicCallback(self._tick, INTERVAL * 1000)
        self._callback.start()

    def teardown(self, worker: Worker) -> None:
        self._callback.stop()

    def _tick(self) -> None:
        now = time.perf_counter()
        # Tornado skips missed calls, so measure the time between two calls.
        self.late.append(max(0.0, now - self._last - INTERVAL))
        self._last = now

    def take(self) -> list[float]:
        """Return the seconds of lateness since the last call."""
        late, self.late = self.late, []
        return late


def take_stalls(client: Client) -> dict[str, float]:
    """Return the longest and the median stall of all workers since the last call, in seconds."""

    def take(dask_worker: Any) -> list[float]:
        return dask_worker.plugins[LoopStalls.name].take()

    late = [seconds for of_worker in client.run(take).values() for seconds in of_worker]
    return {"max": max(late, default=0.0), "median": statistics.median(late) if late else 0.0}


def take_stacks(client: Client) -> dict[str, dict[str, str]]:
    """Return the stacks of all threads of each worker, to diagnose a run that hangs."""
    return dict(client.run(thread_stacks))


def arm(directory: str | Path) -> str:
    """Make SIGUSR1 write the stacks of all threads of this process to a file; return its path.

    ``faulthandler`` writes them from the signal handler itself, even while a C function holds the GIL.
    """
    path = Path(directory) / f"stacks-{os.getpid()}.txt"
    if path not in _armed:
        path.parent.mkdir(parents=True, exist_ok=True)
        _armed[path] = path.open("a", encoding="utf-8")
        faulthandler.register(signal.SIGUSR1, file=_armed[path], all_threads=True, chain=False)
    return str(path)


def signalled_stacks(directory: str | Path, pids: Iterable[int]) -> dict[int, str]:
    """Signal armed processes, wait, and return the stacks that they wrote, by process id."""
    files = {pid: Path(directory) / f"stacks-{pid}.txt" for pid in pids}
    sizes = {pid: path.stat().st_size for pid, path in files.items() if path.exists()}
    for pid in sizes:
        try:
            os.kill(pid, signal.SIGUSR1)
        except ProcessLookupError:
            continue
    time.sleep(SIGNAL_ANSWER_S)
    return {pid: _text_from(files[pid], size) or "no answer to the signal" for pid, size in sizes.items()}


def _text_from(path: Path, start: int) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        file.seek(start)
        return file.read()


class Watchdog:
    """Call ``stalled`` from its own thread, once for each stall.

    Parameters
    ----------
    last
        Returns the time of the last activity, by ``time.monotonic``; None while no activity is expected.
    limit_s
        Seconds without activity that count as a stall.
    stalled
        Called with the seconds since the last activity.
    """

    def __init__(self, last: Callable[[], float | None], limit_s: float, stalled: Callable[[float], None]):
        self._last = last
        self._limit_s = limit_s
        self._stalled = stalled
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpurt-watchdog", daemon=True)
        #: The largest delay of a poll, in seconds: a busy machine delays this thread too.
        self.lateness_s = 0.0

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def take_lateness(self) -> float:
        """Return the largest delay of a poll since the last call, in seconds."""
        lateness, self.lateness_s = self.lateness_s, 0.0
        return lateness

    def _watch(self) -> None:
        said: float | None = None
        looked = time.monotonic()
        while not self._stop.wait(WATCHDOG_POLL_S):
            now, last = time.monotonic(), self._last()
            self.lateness_s = max(self.lateness_s, now - looked - WATCHDOG_POLL_S)
            looked = now
            if last is not None and last != said and now - last > self._limit_s:
                said = last
                self._stalled(now - last)
                looked = time.monotonic()
