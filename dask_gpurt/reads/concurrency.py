"""Decide from measured reads how many tasks leave their slot while they read. Pure.

A read waits for its store, and then decodes the data. On the host only the wait can be hidden behind other
tasks, and only a long one is worth it: if files are in memory, overlapping a read with compute is slower than
reading first. On a GPU, where reads have streams of their own, decoding overlaps too, so that two reads
beside compute pay for files in memory as well (docs/decisions/overlap.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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


@dataclass
class ReadTimes:
    """Time the reads of one task.

    Attributes
    ----------
    seconds
        Total duration of the reads, excluding time on the run queue.
    waited_s
        Part of it in which the thread was blocked.
    nbytes
        Bytes of the frames read.
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

    Parameters
    ----------
    least
        The number of tasks that leave their slot even if reads do not wait.

    Attributes
    ----------
    beside
        The number of tasks that may leave their slot while they read.
    """

    def __init__(self, least: int = 0) -> None:
        self._least = self.beside = least
        self._reads = 0
        self._sums = ReadTimes()
        self._computed_s = 0.0

    def note(self, times: ReadTimes, computed_s: float) -> None:
        """Add a task that has ended.

        Parameters
        ----------
        times
            The times of its reads.
        computed_s
            The CPU seconds of its thread, including those to decode the data.
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
