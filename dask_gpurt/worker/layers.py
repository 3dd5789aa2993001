"""Order the parts of a worker that wrap the same method of Dask."""

from __future__ import annotations

from enum import IntEnum


class Layer(IntEnum):
    """Order the parts of a worker that wrap the same method. The highest layer is called first.

    A call of ``execute`` passes through ``READS``, which counts a task until its result is stored; ``DATA``,
    which waits until memory is reserved and the inputs are live; ``OVERLAP``, which applies the governor's
    setting to running tasks and must not measure that wait; and then reaches Dask's method. Functions that
    read files are wrapped by ``READS`` alone.
    """

    OVERLAP = 1
    DATA = 2
    READS = 3
