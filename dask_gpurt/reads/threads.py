"""Choose the number of threads with which libcudf reads files, through kvikio."""

from __future__ import annotations

import os
from collections.abc import Callable

#: Environment variable of kvikio and libcudf; libcudf reads it once, at its first read of a file.
NTHREADS = "KVIKIO_NTHREADS"
#: Environment variables by which users choose the number themselves.
GIVEN = frozenset({NTHREADS, "KVIKIO_NUM_THREADS"})
#: The default of libcudf, and the number beyond which reads were not faster in measurements.
MIN_THREADS, MAX_THREADS = 4, 32


def threads_of(cores: int, allowed: int, gpus: int, sharing: int) -> int:
    """Return the number of threads with which a GPU worker reads files.

    Parameters
    ----------
    cores, allowed
        Cores that this container may use, and those of them that this process is bound to: dask-cuda binds
        workers to the cores near their GPU, which several GPUs may share.
    gpus
        GPUs of the host in use by workers.
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
    """Set the number of threads for libraries of this process that have not read a file yet.

    Returns
    -------
    Callable
        Restores the variable. Libraries that have read it are not affected.
    """
    before = os.environ.get(NTHREADS)
    os.environ[NTHREADS] = str(threads)

    def restore() -> None:
        if before is None:
            os.environ.pop(NTHREADS, None)
        else:
            os.environ[NTHREADS] = before

    return restore
