"""Store serialised objects in files: one file for each object, with a checksum for each buffer.

Spilled bytes would only evict other files from the page cache, so they bypass it with direct I/O where the
file system supports that. Direct I/O requires page-aligned addresses, offsets and lengths, so host buffers
are written through an aligned bounce buffer, and read into aligned memory. Device buffers follow the host
buffers in the file, each aligned to a page; the device moves them and computes their checksums. The offsets
of buffers are kept in memory only, since a file is never read by another process than its writer.
"""

from __future__ import annotations

import errno
import itertools
import logging
import mmap
import os
import shutil
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np

from dask_gpurt.device.base import PAGE, Device, DeviceFiles, Fence, no_fence
from dask_gpurt.device.pool import Buffer
from dask_gpurt.device.staging import BOUNCE_BUFFER_BYTES, BounceBuffers, Chunk, read_pages, whole_pages
from dask_gpurt.memory.ledger import NoRoom, Tier
from dask_gpurt.memory.serialize import Frames, Scattered, on_device

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_TOO_SHORT = "the file is truncated"
#: One buffer is enough, since copies of host bytes are synchronous.
_bounce = BounceBuffers(1, lambda nbytes: np.frombuffer(mmap.mmap(-1, nbytes), np.uint8))


class CorruptFile(OSError):
    """A spilled file is corrupt or missing."""


def corrupt(path: str, why: str | None) -> CorruptFile:
    """Return the error for a corrupt file."""
    return CorruptFile(errno.EIO, f"spilled data is lost and has to be recomputed ({why})", path)


class Span(NamedTuple):
    """Locate a buffer in its file, with its checksum."""

    offset: int
    nbytes: int
    checksum: int


def file_size(nbytes: int) -> int:
    """Return the size of a file with ``nbytes`` of buffers, rounded up to whole pages.

    Truncating a file after direct I/O would take longer than writing a small one.
    """
    return whole_pages(nbytes)


def write(fd: int, buffers: Sequence[Scattered]) -> list[Span]:
    """Write buffers to a file, one after the other."""
    sizes = [sum(piece.size for piece in pieces) for pieces in buffers]
    packing, total = _ChunkPacker(buffers), sum(sizes)
    chunks = (
        Chunk(min(BOUNCE_BUFFER_BYTES, total - at), at, packing.fill)
        for at in range(0, total, BOUNCE_BUFFER_BYTES)
    )
    _bounce.write(fd, chunks)
    starts = itertools.accumulate(sizes, initial=0)
    return [Span(*each) for each in zip(starts, sizes, packing.checksums, strict=False)]


class _ChunkPacker:
    """Copy consecutive buffers into chunks of memory, and compute their checksums."""

    def __init__(self, buffers: Sequence[Scattered]):
        self.checksums = [0] * len(buffers)
        self._pieces = ((which, piece) for which, pieces in enumerate(buffers) for piece in pieces)
        self._left: tuple[int, np.ndarray] = 0, np.empty(0, np.uint8)

    def fill(self, memory: np.ndarray) -> Fence:
        """Fill memory with the next bytes. Synchronous."""
        which, piece = self._left
        while memory.size:
            if not piece.size:
                which, piece = next(self._pieces)
            part = piece[: memory.size]
            np.copyto(memory[: part.size], part)
            self.checksums[which] = zlib.crc32(part.data, self.checksums[which])
            memory, piece = memory[part.size :], piece[part.size :]
        self._left = which, piece
        return no_fence


def write_from_device(
    files: DeviceFiles, fd: int, path: str, parts: Sequence[tuple[Buffer, int]], *, ordered: bool
) -> list[Span]:
    """Write device buffers to a file, behind its host buffers, each aligned to a page.

    ``parts``: pairs of a buffer and its offset.
    ``ordered``: whether pending work on the device may still write the buffers.
    """
    if not parts:
        return []
    last, at = parts[-1]
    # Raises ENOSPC if the disk is full, for which the device's own error would have no errno.
    os.posix_fallocate(fd, 0, at + file_size(last.nbytes))
    checksums = files.write(fd, path, parts, ordered=ordered)
    return [Span(at, source.nbytes, crc) for (source, at), crc in zip(parts, checksums, strict=True)]


def aligned(nbytes: int) -> np.ndarray:
    """Allocate page-aligned host memory.

    From 4 MiB, numpy requests huge pages, whose page faults are far cheaper, so one large allocation is
    better than several small ones.
    """
    memory = np.empty(nbytes + PAGE, np.uint8)
    return memory[-memory.ctypes.data % PAGE :][:nbytes]


def extent(spans: Sequence[Span]) -> tuple[int, int]:
    """Return the page-aligned offset of adjacent buffers in their file, and the size of their pages."""
    first = min(span.offset for span in spans) // PAGE * PAGE
    end = max(span.offset + span.nbytes for span in spans)
    return first, file_size(end - first)


def read(fd: int, path: str, spans: Sequence[Span], into: np.ndarray | None = None) -> list[np.ndarray]:
    """Read adjacent buffers into one allocation of host memory.

    ``into``: page-aligned memory of the size that :func:`extent` returns; by default newly allocated.
    Raises CorruptFile if the file is truncated or a checksum does not match.
    """
    if not spans:
        return []
    first, size = extent(spans)
    memory = aligned(size) if into is None else into
    try:
        read_pages(fd, memory, first, memory.size)
    except EOFError:
        raise corrupt(path, _TOO_SHORT) from None
    found = [memory[span.offset - first :][: span.nbytes] for span in spans]
    for buffer, span in zip(found, spans, strict=True):
        _check(path, span, zlib.crc32(buffer.data))
    return found


def read_to_device(files: DeviceFiles, fd: int, path: str, spans: Sequence[Span]) -> list[Buffer]:
    """Read buffers into new memory of a device; raise CorruptFile as :func:`read` does."""
    try:
        found = files.read(fd, path, [(span.offset, span.nbytes) for span in spans])
    except EOFError:
        raise corrupt(path, _TOO_SHORT) from None
    for (_, checksum), span in zip(found, spans, strict=True):
        _check(path, span, checksum)
    return [buffer for buffer, _ in found]


def _check(path: str, span: Span, checksum: int) -> None:
    if checksum != span.checksum:
        raise corrupt(path, f"checksum mismatch in the buffer at offset {span.offset}")


class _File(NamedTuple):
    path: str
    size: int
    #: The header, then the buffers.
    spans: list[Span]
    #: Numbers of the spans that a device has written.
    from_device: frozenset[int]


class _Layout:
    """Lay out the buffers of an object in its file: host buffers first, then device buffers."""

    def __init__(self, frames: Frames):
        self.host: list[Scattered] = [[np.frombuffer(frames.header, np.uint8)]]
        self.device: list[tuple[Buffer, int]] = []
        self.from_device = frozenset(n for n, buffer in enumerate(frames.buffers, 1) if on_device(buffer))
        self.host += [buffer for buffer in frames.buffers if not on_device(buffer)]
        self.size = file_size(sum(piece.nbytes for pieces in self.host for piece in pieces))
        for number in sorted(self.from_device):
            [source] = frames.buffers[number - 1]
            self.device.append((source, self.size))
            self.size += file_size(source.nbytes)

    def in_order(self, spans: list[Span]) -> list[Span]:
        """Reorder spans, first of host and then of device buffers, to the order of the object's buffers."""
        host, device = iter(spans[: len(self.host)]), iter(spans[len(self.host) :])
        return [next(device if number in self.from_device else host) for number in range(len(spans))]


class DiskTier:
    """Map keys to files in a directory of its own. Thread-safe; keys must not be deleted while read.

    A key is used once. See :class:`~dask_gpurt.memory.lower_tiers.LowerTier`.

    Deleting a key takes effect immediately. Its file is removed in a thread of the tier: unlinking a large
    file is too slow for the event loop, or under a lock.

    ``directory``: the parent of that directory.
    ``capacity``: the most bytes of files; None for as many as the file system has room for.
    ``device_files``: moves buffers between files and the device.
    """

    reads_block = True

    def __init__(self, directory: str, capacity: int | None = None, device_files: DeviceFiles | None = None):
        try:
            os.makedirs(directory, exist_ok=True)
            self.path = tempfile.mkdtemp(prefix="gpurt-tier-", dir=directory)
        except OSError as error:
            why = f"data cannot be spilled here ({error.strerror}): set another local_directory"
            raise OSError(error.errno, why, directory) from error
        self.capacity = capacity
        self.used = 0
        self._device_files = device_files
        #: Whether to use direct I/O; False once the file system has refused it.
        self.direct = True
        self._files: dict[str, _File] = {}
        self._names = itertools.count()
        self._lock = threading.Lock()
        self._unlinking = ThreadPoolExecutor(1, thread_name_prefix="gpurt-unlink")
        self._closed = False
        self._remove = weakref.finalize(self, _remove, self.path, os.getpid())

    def __setitem__(self, key: str, frames: Frames) -> None:
        self._store(key, frames, ordered=True)

    def put(self, key: str, frames: Frames, device: Device, *, ordered: bool) -> Fence:
        """Store an object, whose buffers may be on the device. Synchronous."""
        if any(map(on_device, frames.buffers)):
            self._store(key, frames, ordered=ordered)
        else:
            self[key] = frames
        return no_fence

    def _store(self, key: str, frames: Frames, *, ordered: bool) -> None:
        layout = _Layout(frames)
        size = layout.size
        if layout.device and self._device_files is None:
            raise TypeError(
                f"{self.path}: device buffers cannot be written to files, because 'device_files' is None"
            )
        with self._lock:
            if self.capacity is not None and self.used + size > self.capacity:
                raise self._no_room(size, f"{self.used} of {self.capacity} bytes are used")
            self.used += size
            path = os.path.join(self.path, str(next(self._names)))
        try:
            spans = self._write(path, layout, ordered)
        except BaseException as error:
            self._give_back(size)
            with suppress(OSError):  # keep the first error, which has the cause
                os.unlink(path)
            if isinstance(error, OSError):
                raise self._no_room(size, error.strerror or str(error)) from error
            raise
        with self._lock:
            self._files[key] = _File(path, size, layout.in_order(spans), layout.from_device)

    def _write(self, path: str, layout: _Layout, ordered: bool) -> list[Span]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC

        def action(fd: int) -> list[Span]:
            spans = write(fd, layout.host)
            if self._device_files is not None:
                spans += write_from_device(self._device_files, fd, path, layout.device, ordered=ordered)
            return spans

        if self._has_room(layout.size):
            try:
                return self._on_file(path, flags, action)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
        self.settle()  # files of deleted keys may not be unlinked yet
        if not self._has_room(layout.size):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._on_file(path, flags, action)

    def _has_room(self, size: int) -> bool:
        """Return whether the file system has room for a file.

        Without asking first, each object would be written until the disk is full, and then removed.
        """
        return size <= self._free()

    def _free(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def _no_room(self, size: int, why: str) -> NoRoom:
        what = "free some space, lower 'gpurt.memory.disk', or set another 'local_directory'"
        return NoRoom(Tier.DISK, size, f"{self.path}: {why}: {what}")

    def __getitem__(self, key: str) -> Frames:
        file = self._files[key]
        header, *buffers = self._read(file, file.spans)
        return Frames(header.tobytes(), tuple([buffer] for buffer in buffers))

    def to_device(self, key: str) -> Frames:
        """Read an object, with buffers that the device wrote in new memory of the device."""
        file = self._files[key]
        numbers = range(len(file.spans))
        there = [number for number in numbers if number in file.from_device]
        here = [number for number in numbers if number not in file.from_device]
        found: dict[int, Any] = dict(zip(here, self._read(file, [file.spans[n] for n in here]), strict=True))
        found |= zip(there, self._read_to_device(file, [file.spans[n] for n in there]), strict=True)
        return Frames(found[0].tobytes(), tuple([found[number]] for number in numbers[1:]))

    def part(
        self, key: str, which: int, into: np.ndarray | None = None, *, to_device: bool = False
    ) -> Scattered:
        """Read one buffer of an object, ``into`` memory of :meth:`part_room` bytes, or to the device."""
        file = self._files[key]
        spans = [file.spans[1 + which]]
        return self._read_to_device(file, spans) if to_device else self._read(file, spans, into)

    def part_room(self, key: str, which: int) -> int:
        """Return the bytes of memory needed to read one buffer."""
        return extent([self._files[key].spans[1 + which]])[1]

    def part_size(self, key: str, which: int) -> int:
        """Return the bytes of one buffer of an object."""
        return self._files[key].spans[1 + which].nbytes

    def _read(self, file: _File, spans: list[Span], into: np.ndarray | None = None) -> list[np.ndarray]:
        return self._reading(file, lambda fd: read(fd, file.path, spans, into))

    def _read_to_device(self, file: _File, spans: list[Span]) -> list[Buffer]:
        files = self._device_files
        if files is None or not spans:
            return self._read(file, spans)
        return self._reading(file, lambda fd: read_to_device(files, fd, file.path, spans))

    def _reading(self, file: _File, action: Callable[[int], _T]) -> _T:
        try:
            return self._on_file(file.path, os.O_RDONLY, action)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EIO) and not isinstance(error, CorruptFile):
                raise corrupt(file.path, error.strerror) from error
            raise

    def stored(self, key: str) -> int:
        """Return the bytes in the file of an object; 0 once the tier is closed."""
        with self._lock:
            return 0 if self._closed else self._files[key].size

    def __delitem__(self, key: str) -> None:
        with self._lock:
            if self._closed:  # its file is removed with the directory
                return
            file = self._files.pop(key)
            self._unlinking.submit(self._unlink, file)
        self._give_back(file.size)

    def limit(self) -> int:
        """Return the bytes that the tier can hold: those in use, and those free in the file system."""
        most = self.used + self._free()
        return most if self.capacity is None else min(most, self.capacity)

    def settle(self) -> None:
        """Wait until the files of deleted keys are unlinked."""
        with self._lock:
            unlinked = None if self._closed else self._unlinking.submit(int)  # runs after all others
        if unlinked is not None:
            unlinked.result()

    def close(self) -> None:
        """Remove all files, and the directory.

        Other threads may still spill or delete keys, which has no effect from here on::

            Thread 1 (closes)                         Thread 2 (deletes a key)
                                                      the tier is open: submits the file for unlinking
            sets _closed
            waits for the submitted files
            removes the other files, and the directory
                                                      deletes another key: a no-op
        """
        with self._lock:
            self._closed = True
            files, self._files = self._files, {}
        self._unlinking.shutdown()
        for file in files.values():
            self._give_back(file.size)
        self._remove()

    def _unlink(self, file: _File) -> None:
        try:
            os.unlink(file.path)
        except FileNotFoundError:
            pass  # removed concurrently
        except OSError as error:
            logger.warning("cannot remove a spilled file that is no longer needed: %s", error)

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
    # A forked process must not remove the files of its parent. Files that cannot be removed when the
    # interpreter exits are left to Dask, which cleans up its local directories.
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)
