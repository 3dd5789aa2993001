"""Decide by how reads go how many tasks leave their slot for them. Pure.

A read waits for its store, and decodes what it has got. Only the wait can be hidden behind other tasks, and
it has to be long: where files lie in memory, or libcudf reads with many threads, a read beside compute is
slower than one before it (docs/decisions/overlap.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: The most tasks that leave their slot: each takes the memory of a partition.
MAX_BESIDE = 4
#: Reads after which it is decided, and the weight of what was known before each further one.
MIN_READS, DECAY = 2, 0.8
#: Frames below this size tell how late a store answers, not how fast it is.
MIN_READ_BYTES = 2**16
#: A store is slow that gives fewer bytes of a frame than this for each second that a thread waits.
SLOW_BYTES_PER_S = 2**28
#: The share of its time that a read waits, from which on tasks leave their slot. Python's lock is waited for
#: too, beside tasks that compute.
MIN_WAIT_SHARE = 0.5


@dataclass
class ReadTimes:
    """Time the reads of one task.

    Attributes
    ----------
    seconds
        From the beginning of each to its end, but for waits for a processor.
    waited_s
        In which the thread did not run.
    nbytes
        Of the frames that were read.
    """

    seconds: float = 0.0
    waited_s: float = 0.0
    nbytes: int = 0

    def add(self, seconds: float, waited_s: float, nbytes: int) -> None:
        """Add a read, if there is enough of it to tell something."""
        if nbytes >= MIN_READ_BYTES:
            self.seconds += seconds
            self.waited_s += min(seconds, max(0.0, waited_s))
            self.nbytes += nbytes


class ReadPace:
    """Learn from the tasks of a worker how long its reads wait, and how long its threads compute meanwhile.

    Attributes
    ----------
    beside
        The tasks that may leave their slot while they read.
    """

    def __init__(self) -> None:
        self.beside = 0
        self._reads = 0
        self._sums = ReadTimes()
        self._computed_s = 0.0

    def note(self, times: ReadTimes, computed_s: float) -> None:
        """Note that a task has ended.

        Parameters
        ----------
        times
            Of its reads.
        computed_s
            The processor seconds of its thread, those of decoding what it has read included.
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
        """Return how many reads hide their waits behind what else there is to compute."""
        sums = self._sums
        if sums.waited_s < MIN_WAIT_SHARE * sums.seconds or sums.nbytes > SLOW_BYTES_PER_S * sums.waited_s:
            return 0
        # While a slot computes for so long for each read, so many reads have to wait for it never to wait.
        return min(MAX_BESIDE, math.ceil(sums.waited_s / max(self._computed_s, 1e-9)))
