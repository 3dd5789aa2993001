"""Decide which tasks of a worker leave their slot while they read, and how many, so that the next ones start.

A read waits for its store, and then decodes the data. On the host only the wait can be hidden behind other
tasks, and only a long one is worth it: if files are in memory, overlapping a read with compute is slower than
reading first. On a GPU, where reads have streams of their own, decoding overlaps too, so that two reads
beside compute pay for files in memory as well (docs/decisions/overlap.md).
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from typing import NamedTuple

from dask.typing import Key

#: The most tasks that leave their slot, since each takes the memory of a partition.
MAX_BESIDE = 4
#: The number of tasks that leave their slot on a GPU in any case. TPC-H at scale 100 on two H200s, files in
#: memory, takes 0.79 times as long as with 0 (95%: 0.76 to 0.83; tpch-reads-default-2xh200-sf100.json).
BESIDE_ON_GPU = 2
#: Reads before the first decision, and the factor by which each further read decays the earlier ones.
MIN_READS, DECAY = 2, 0.8
#: Smaller frames are ignored, since they reflect the latency of the store instead of its bandwidth.
MIN_READ_BYTES = 2**16
#: A store is slow if it delivers fewer bytes of a frame per second of waiting.
SLOW_BYTES_PER_S = 2**28
#: The least share of waiting in the time of reads for tasks to leave their slot. It includes waits for the
#: GIL, which computing tasks hold.
MIN_WAIT_SHARE = 0.5
#: Kernel statistics of the current thread: nanoseconds on a CPU, and on a run queue.
_COUNTS = "/proc/thread-self/schedstat"


class DetachedReads:
    """Track the tasks that have left their slot, in which other tasks have started. Not thread-safe.

    A task may leave its slot from when it reads, waits for its turn (:mod:`dask_gpurt.reads.turns`), or
    writes. It counts from when it leaves its slot until it ends, since its frame takes memory even after the
    read. So a worker has at most ``limit`` more tasks started than threads. In a steady state, one task reads
    while another one, whose read is done, computes::

        A reads, and leaves its slot. B starts, and reads; the limit is reached, so B keeps its slot
        A computes, and ends. B is now the oldest candidate, and leaves its slot, whether it reads or computes
        C starts, and reads, while B computes

    ``limit``: the most tasks started beyond the slots of the worker. Lowering it does not affect tasks that
    have already left their slot.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._aside: set[Key] = set()
        #: Tasks with a slot that may leave it, oldest first.
        self._keeping: dict[Key, None] = {}

    def __contains__(self, key: Key) -> bool:
        """Return whether a task has left its slot and has not ended."""
        return key in self._aside

    @property
    def count(self) -> int:
        """Return the number of tasks that have left their slot and have not ended."""
        return len(self._aside)

    def add(self, key: Key) -> Key | None:
        """Note that a task may leave its slot; return the task that should leave its slot, if any."""
        if key not in self._aside:
            self._keeping[key] = None
        return self.next()

    def end(self, key: Key) -> Key | None:
        """Note that a task has ended or has no slot; return the task that should leave its slot, if any."""
        self._aside.discard(key)
        self._keeping.pop(key, None)
        return self.next()

    def next(self) -> Key | None:
        """Return the task that should leave its slot now, if any; from here on it counts as such."""
        if not self._keeping or len(self._aside) >= self.limit:
            return None
        key = next(iter(self._keeping))
        del self._keeping[key]
        self._aside.add(key)
        return key


@dataclass
class ReadTimes:
    """Time the reads of one task.

    ``seconds``: total duration of the reads, excluding time on the run queue.
    ``waited_s``: part of it in which the thread was blocked.
    ``nbytes``: bytes of the frames read.
    """

    seconds: float = 0.0
    waited_s: float = 0.0
    nbytes: int = 0

    def add(self, seconds: float, waited_s: float, nbytes: int) -> None:
        """Add a read, unless it is too small to be significant."""
        if nbytes >= MIN_READ_BYTES:
            self.seconds += seconds
            self.waited_s += min(seconds, max(0.0, waited_s))
            self.nbytes += nbytes


class ReadConcurrency:
    """Learn from the tasks of a worker how long reads wait, and how long threads compute per read.

    ``least``: the number of tasks that leave their slot even if reads do not wait.
    ``beside``: the number of tasks that may leave their slot while they read.
    """

    def __init__(self, least: int = 0) -> None:
        self._least = self.beside = least
        self._reads = 0
        self._sums = ReadTimes()
        self._computed_s = 0.0

    def note(self, times: ReadTimes, computed_s: float) -> None:
        """Add a task that has ended.

        ``computed_s``: the CPU seconds of its thread, including those to decode the data.
        """
        if not times.nbytes:
            self._computed_s += computed_s
            return
        self._reads += 1
        self._computed_s = DECAY * self._computed_s + computed_s
        self._sums = ReadTimes(
            DECAY * self._sums.seconds + times.seconds,
            DECAY * self._sums.waited_s + times.waited_s,
            round(DECAY * self._sums.nbytes + times.nbytes),
        )
        if self._reads >= MIN_READS:
            self.beside = self._worth()

    def _worth(self) -> int:
        """Return how many concurrent reads suffice to hide their waits behind compute."""
        sums = self._sums
        if sums.waited_s < MIN_WAIT_SHARE * sums.seconds or sums.nbytes > SLOW_BYTES_PER_S * sums.waited_s:
            return self._least
        # A slot never idles if as many reads are in flight as computations fit into the wait of one read.
        hide = math.ceil(sums.waited_s / max(self._computed_s, 1e-9))
        return max(self._least, min(MAX_BESIDE, hide))


class ThreadTime(NamedTuple):
    """Hold a snapshot of the clocks of a thread.

    ``at``: wall clock time in seconds.
    ``ran_s``: CPU time of the thread in seconds.
    ``delayed_s``: time on the run queue in seconds, runnable but waiting for a CPU; 0 if the kernel does not
    report it.
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
