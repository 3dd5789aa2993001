"""Share files in the user's cache folder: a writer is alone, and replaces the file atomically."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

#: Seconds between two attempts to get a lock that another process has.
_ATTEMPT_S = 0.02


def directory() -> Path:
    """Return the folder for files of the runtime that outlive a process."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dask-gpurt")


@contextlib.contextmanager
def alone(path: Path, timeout_s: float) -> Iterator[None]:
    """Lock a file against other processes, between reading and replacing it.

    ``timeout_s``: how long to wait for another process, which may be stopped.
    Raises TimeoutError if another process still has the lock.
    """
    import fcntl  # only on systems that the runtime supports

    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(path.with_name(f".{path.name}.lock"), flags, 0o600), "w") as lock:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process is writing {path}") from None
                time.sleep(_ATTEMPT_S)
        yield  # the lock is released when the file is closed


def replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace a file atomically: no process reads a partial one, and only the user can read it."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            write(file)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
