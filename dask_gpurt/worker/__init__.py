"""Install the runtime in workers and their nannies: tiers, tasks, reads, overlap and reports."""

from enum import IntEnum


class Layer(IntEnum):
    """Order the parts of a worker that wrap the same method. The highest layer is called first.

    A call of ``execute`` passes through ``READS``, which counts a task until its result is stored; ``DATA``,
    which waits until memory is reserved and the inputs are live; and then reaches Dask's method. Functions
    that read files are wrapped by ``READS`` alone.
    """

    DATA = 1
    READS = 2
