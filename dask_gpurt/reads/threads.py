"""Choose the threads with which libcudf reads files, through kvikio."""

from __future__ import annotations

import os
from collections.abc import Callable

#: The variable that kvikio and libcudf read, libcudf once, at its first read.
NTHREADS = "KVIKIO_NTHREADS"
#: Either of these is the user's choice.
GIVEN = frozenset({NTHREADS, "KVIKIO_NUM_THREADS"})
#: The default of libcudf, and the number above which reads did not get faster where it was measured.
MIN_THREADS, MAX_THREADS = 4, 32


def threads_of(cores: int, allowed: int, gpus: int, sharing: int) -> int:
    """Return the threads with which a worker on a GPU reads files.

    Parameters
    ----------
    cores, allowed
        Cores of the host that this container may use, and those of them that this process is bound to: a
        worker of dask-cuda is bound to those near its GPU, which it shares with the workers of other GPUs.
    gpus
        GPUs of the host that workers use.
    sharing
        Workers on this GPU.

    Examples
    --------
    >>> threads_of(128, 64, 8, 1), threads_of(128, 64, 8, 2), threads_of(16, 16, 1, 1), threads_of(8, 8, 8, 1)
    (16, 8, 16, 4)
    """
    share = min(allowed, cores // max(1, gpus)) // sharing
    return min(MAX_THREADS, max(MIN_THREADS, share))


def set_threads(threads: int) -> Callable[[], None]:
    """Have libraries of this process that have not read a file yet use so many threads.

    Returns
    -------
    Callable
        Takes the variable back; what has read it goes on with it.
    """
    before = os.environ.get(NTHREADS)
    os.environ[NTHREADS] = str(threads)

    def restore() -> None:
        if before is None:
            os.environ.pop(NTHREADS, None)
        else:
            os.environ[NTHREADS] = before

    return restore
