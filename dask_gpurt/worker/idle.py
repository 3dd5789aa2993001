"""Find running tasks that wait for something: a result, an event, a lock, a reply."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from dask.typing import Key
from distributed.utils import sync

from dask_gpurt.dask_hooks.types import WorkerServer

#: Seconds for which the thread of a task has to be blocked before the task counts as waiting.
IDLE_S = 1.0
#: The share of this time that the thread may still run, as it does if it polls.
POLLING_SHARE = 0.05
#: Cores that the process may use meanwhile. If it uses more, other threads may compute for the task.
HELPING_CORES = 0.2
#: Seconds after which a sample is too old: nobody has looked in between.
STALE_S = 5.0


class Sample(NamedTuple):
    """Hold the clocks of a task's thread in seconds, and those of its process.

    Attributes
    ----------
    active, process
        Time that the thread ran or could have run, and CPU time of the process, when it was first blocked.
    at, since
        When this was last looked at, and since when the thread has been blocked.
    """

    thread: int
    active: float
    process: float
    at: float
    since: float


class IdleTasks:
    """Tell which tasks of a worker wait, by the clocks of their threads. On the event loop.

    A task is idle once its thread has been blocked for ``IDLE_S``, and either is in a call of Dask that waits
    for the cluster, or the whole process does next to nothing. Otherwise threads of a library may compute for
    it. A task in a read that the runtime knows of is not idle: it waits for no other task.

    Where the kernel keeps no clocks of threads, no task is idle.

    Parameters
    ----------
    is_reading
        Returns whether a task is in such a read.
    """

    def __init__(self, worker: WorkerServer, is_reading: Callable[[Key], bool]):
        self._worker = worker
        self._is_reading = is_reading
        self._samples: dict[Key, Sample] = {}

    def is_idle(self, key: Key) -> bool:
        """Return whether a running task waits. Has to be called repeatedly, and is cheap."""
        now = time.monotonic()
        self._samples = {each: sample for each, sample in self._samples.items() if now - sample.at < STALE_S}
        before, sample = self._samples.get(key), self._sample(key, now)
        if sample is None or self._is_reading(key):
            self._samples.pop(key, None)
            return False
        if before is None or before.thread != sample.thread or _has_run(before, sample):
            self._samples[key] = sample
            return False
        self._samples[key] = before._replace(at=now)
        seconds = now - before.since
        if seconds < IDLE_S:
            return False
        helped = sample.process - before.process > HELPING_CORES * seconds
        return not helped or _waits_for_cluster(sample.thread)

    def _sample(self, key: Key, now: float) -> Sample | None:
        for thread, running in list(self._worker.active_threads.items()):
            if running == key and (active := _active_s(thread)) is not None:
                return Sample(thread, active, time.process_time(), now, now)
        return None


def _has_run(before: Sample, after: Sample) -> bool:
    return after.active - before.active > POLLING_SHARE * max(IDLE_S, after.at - before.since)


def _active_s(ident: int) -> float | None:
    """Return for how long a thread has run, or waited for a processor; None if that is not known."""
    native = next((each.native_id for each in threading.enumerate() if each.ident == ident), None)
    try:
        with open(f"/proc/self/task/{native}/schedstat", "rb") as file:
            ran, delayed, _ = file.read().split()
    except (OSError, ValueError):  # it has ended, or this kernel does not report it
        return None
    return (int(ran) + int(delayed)) / 1e9


def _waits_for_cluster(ident: int) -> bool:
    """Return whether a thread is in Dask's ``sync``, as in ``Future.result``, ``gather`` or ``Lock``."""
    frame = sys._current_frames().get(ident)
    while frame is not None and frame.f_code is not sync.__code__:
        frame = frame.f_back
    return frame is not None
