"""Objects taken apart, in files: one for each, checked when it is read.

What is spilled would only push everything else out of the page cache, so files are written
and read past it where the file system can do that.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple, TypeVar

import numpy as np

from dask_gpurt.memory.files import CorruptFile, Span, corrupt, file_size, read, write
from dask_gpurt.memory.frames import Frames, Scattered
from dask_gpurt.memory.tiers import NoRoom, Tier

__all__ = ["CorruptFile", "DiskTier"]

logger = logging.getLogger("dask_gpurt")

_T = TypeVar("_T")


class _File(NamedTuple):
    path: str
    size: int
    #: The header, then the buffers.
    spans: list[Span]


class DiskTier(MutableMapping[str, Frames]):
    """A mapping into files of a directory of its own. Thread-safe; not to be read while the key goes.

    A key goes at once. Its file is removed on a thread of the tier's own: for large ones that takes longer
    than an event loop has, or whoever waits for a lock.

    Parameters
    ----------
    directory
        Where that directory is made.
    capacity
        Bytes of files, None for as many as the file system takes.
    """

    def __init__(self, directory: str, capacity: int | None = None):
        try:
            os.makedirs(directory, exist_ok=True)
            self.path = tempfile.mkdtemp(prefix="gpurt-tier-", dir=directory)
        except OSError as error:
            why = f"data can not be spilled here ({error.strerror}), set another local_directory"
            raise OSError(error.errno, why, directory) from error
        self.capacity = capacity
        self.used = 0
        #: Whether the file system has not refused direct I/O so far.
        self.direct = True
        self._files: dict[str, _File] = {}
        self._names = itertools.count()
        self._lock = threading.Lock()
        self._unlinking = ThreadPoolExecutor(1, thread_name_prefix="gpurt-unlink")
        self._remove = weakref.finalize(self, _remove, self.path, os.getpid())

    def __setitem__(self, key: str, frames: Frames) -> None:
        buffers: list[Scattered] = [[np.frombuffer(frames.header, np.uint8)], *frames.buffers]
        size = file_size(sum(piece.nbytes for pieces in buffers for piece in pieces))
        with self._lock:
            if self.capacity is not None and self.used + size > self.capacity:
                raise self._no_room(size, f"{self.used} of {self.capacity} bytes are used")
            self.used += size
            path = os.path.join(self.path, str(next(self._names)))
        try:
            spans = self._write(path, buffers)
        except BaseException as error:
            self._give_back(size)
            with suppress(OSError):  # the first error is the one that says why
                os.unlink(path)
            if isinstance(error, OSError):
                raise self._no_room(size, error.strerror or str(error)) from error
            raise
        with self._lock:
            before = self._files.get(key)
            self._files[key] = _File(path, size, spans)
        if before is not None:
            self._unlink(before)
            self._give_back(before.size)

    def _write(self, path: str, buffers: list[Scattered]) -> list[Span]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            return self._on_file(path, flags, lambda fd: write(fd, buffers))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        self.settle()  # what has gone may still be on the disk
        return self._on_file(path, flags, lambda fd: write(fd, buffers))

    def _no_room(self, size: int, why: str) -> NoRoom:
        what = "free some, set 'gpurt.memory.disk' to what there is, or 'local_directory' to another place"
        return NoRoom(Tier.DISK, size, f"{self.path}: {why}: {what}")

    def __getitem__(self, key: str) -> Frames:
        file = self._files[key]
        header, *buffers = self._read(file, file.spans)
        return Frames(header.tobytes(), tuple([buffer] for buffer in buffers))

    def part(self, key: str, which: int) -> Scattered:
        """One buffer of an object, without reading the others."""
        file = self._files[key]
        return self._read(file, [file.spans[1 + which]])

    def part_size(self, key: str, which: int) -> int:
        """Bytes of one buffer of an object."""
        return self._files[key].spans[1 + which].nbytes

    def _read(self, file: _File, spans: list[Span]) -> list[np.ndarray]:
        try:
            return self._on_file(file.path, os.O_RDONLY, lambda fd: read(fd, file.path, spans))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EIO) and not isinstance(error, CorruptFile):
                raise corrupt(file.path, error.strerror) from error
            raise

    def stored(self, key: str) -> int:
        """Bytes in the file of an object."""
        return self._files[key].size

    def __delitem__(self, key: str) -> None:
        with self._lock:
            file = self._files.pop(key)
        self._unlinking.submit(self._unlink, file)
        self._give_back(file.size)

    def clear(self) -> None:
        # Without reading them, unlike the method of the base class.
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            self._unlink(file)
            self._give_back(file.size)

    def __contains__(self, key: object) -> bool:
        return key in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._files))

    def __len__(self) -> int:
        return len(self._files)

    def settle(self) -> None:
        """Wait until the files of keys that have gone are gone too."""
        self._unlinking.submit(int).result()  # they go one by one, in order

    def close(self) -> None:
        """Remove all files, and the directory."""
        self._unlinking.shutdown()
        self.clear()
        self._remove()

    def _unlink(self, file: _File) -> None:
        try:
            os.unlink(file.path)
        except FileNotFoundError:
            pass  # somebody cleaned up, which is what we want
        except OSError as error:
            logger.warning("a spilled file that nobody needs any more stays: %s", error)

    def _give_back(self, size: int) -> None:
        with self._lock:
            self.used -= size

    def _on_file(self, path: str, flags: int, action: Callable[[int], _T]) -> _T:
        if self.direct:
            try:
                return _with_fd(path, flags | os.O_DIRECT, action)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
        return _with_fd(path, flags, action)


def _with_fd(path: str, flags: int, action: Callable[[int], _T]) -> _T:
    fd = os.open(path, flags, 0o600)
    try:
        return action(fd)
    finally:
        os.close(fd)


def _remove(path: str, pid: int) -> None:
    # At the end of a forked process the files are still its parent's. What can not be removed
    # at the end of an interpreter is left to Dask, which cleans its local directories up.
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)
