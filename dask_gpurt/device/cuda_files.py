"""Move GPU memory to files and back, with kvikio or through pinned memory.

kvikio bypasses host memory if GPUDirect Storage is set up, and otherwise copies through pinned memory in its
own threads. It is not installed everywhere and does not support every file system, so the fallback is a
simpler copy through pinned bounce buffers (:mod:`dask_gpurt.device.staging`).

Decisions and their figures: ``docs/decisions/memory.md``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import cupy
import numpy as np
import rmm
from cupy.cuda import runtime

from dask_gpurt.device.base import PAGE, Fence, no_fence
from dask_gpurt.device.checksum import KERNEL, PART, THREADS
from dask_gpurt.device.copies import DeviceSpan, address
from dask_gpurt.device.cuda_memory import CudaStreams, behind, bounce_buffers
from dask_gpurt.device.pool import Buffer
from dask_gpurt.device.staging import BOUNCE_BUFFER_BYTES, Chunk, read_pages, whole_pages

#: Threads of kvikio, the same as libcudf's default; kvikio's own default is one.
KVIKIO_THREADS = 4

#: A buffer and its offset in a file.
At = tuple[Buffer, int]


class CudaFiles:
    """Write buffers of a GPU to files. Thread-safe; see :class:`~dask_gpurt.device.base.DeviceFiles`.

    ``refused``: called with the reason once kvikio cannot be used.
    """

    def __init__(self, device: CudaStreams, refused: Callable[[str], None], *, with_kvikio: bool = True):
        self._device = device
        self._refused = refused
        self._bounce = Bounce(device)
        self._with_kvikio = with_kvikio

    def write(self, fd: int, path: str, parts: Sequence[At], *, ordered: bool) -> list[int]:
        found = self.checksums([buffer for buffer, _ in parts], ordered=ordered)
        # Computing the checksums has waited for all pending work, so the moves need not.
        self._move(path, "r+", "pwrite", parts, partial(self._bounce.write, fd))
        return found

    def read(self, fd: int, path: str, spans: Sequence[tuple[int, int]]) -> list[tuple[Buffer, int]]:
        if max(offset + nbytes for offset, nbytes in spans) > os.fstat(fd).st_size:
            raise EOFError
        buffers = self._device.empty([nbytes for _, nbytes in spans])
        parts = [(buffer, offset) for buffer, (offset, _) in zip(buffers, spans, strict=True)]
        self._move(path, "r", "pread", parts, partial(self._bounce.read, fd))
        return list(zip(buffers, self.checksums(buffers, ordered=False), strict=True))

    def _move(
        self, path: str, flags: str, what: str, parts: Sequence[At], otherwise: Callable[[Sequence[At]], None]
    ) -> None:
        if not self._with_kvikio:
            otherwise(parts)
            return
        try:
            with _kvikio().CuFile(path, flags) as file:
                _all_at_once(getattr(file, what), parts)
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            otherwise(parts)  # if this fails too, kvikio is not the cause
            self._with_kvikio = False
            self._refused(str(error))

    def checksums(self, buffers: Sequence[Buffer], *, ordered: bool) -> list[int]:
        """Return zlib's crc32 of each buffer. Blocks."""
        stream, raw = self._device.after_compute() if ordered else self._device.stream()
        found = rmm.DeviceBuffer(size=4 * len(buffers), stream=stream)
        runtime.memsetAsync(found.ptr, 0, found.size, raw.ptr)
        with raw:
            for number, buffer in enumerate(buffers):
                given = address(buffer), buffer.nbytes, found.ptr + 4 * number
                if blocks := -(-buffer.nbytes // (PART * THREADS)):
                    _crc32()((blocks,), (THREADS,), tuple(map(np.uint64, given)))
        on_host = np.empty(len(buffers), np.uint32)
        runtime.memcpyAsync(on_host.ctypes.data, found.ptr, found.size, runtime.memcpyDefault, raw.ptr)
        raw.synchronize()
        return [int(crc) for crc in on_host]


def _all_at_once(begin: Callable[..., Any], parts: Sequence[At]) -> None:
    """Move all buffers concurrently. No move is in flight on return, even after an error."""
    done: list[int] = []

    def wait(move: Any) -> None:
        done.append(move.get())

    with ExitStack() as waiting:
        for buffer, at in parts:
            if buffer.nbytes:
                waiting.callback(wait, begin(view(buffer), file_offset=at))
    if sum(done) != sum(buffer.nbytes for buffer, _ in parts):
        raise OSError(f"kvikio moved {sum(done)} bytes, which is not the size of all buffers")


def view(buffer: Buffer) -> DeviceSpan:
    """Wrap a buffer of any library for kvikio."""
    return DeviceSpan(address(buffer), buffer.nbytes, buffer)


@cache
def _crc32() -> Any:
    return cupy.RawKernel(KERNEL, "crc32")


@cache
def _kvikio() -> Any:
    """Return the kvikio module, with defaults for a disk unless the environment sets them."""
    import kvikio
    import kvikio.defaults

    # kvikio may have been set up before the runtime has set the variable (see dask_gpurt.reads.threads).
    given = os.environ.get("KVIKIO_NTHREADS") or os.environ.get("KVIKIO_NUM_THREADS")
    threads = int(given) if given else KVIKIO_THREADS
    if kvikio.defaults.get("num_threads") < threads:
        kvikio.defaults.set("num_threads", threads)
    if "KVIKIO_AUTO_DIRECT_IO_READ" not in os.environ:
        kvikio.defaults.set("auto_direct_io_read", True)  # data are read once, so the page cache is useless
    return kvikio


class Bounce:
    """Move files through two pinned bounce buffers for each thread."""

    def __init__(self, device: CudaStreams):
        self._device = device
        self._buffers = bounce_buffers(device, BOUNCE_BUFFER_BYTES)

    def write(self, fd: int, parts: Sequence[At]) -> None:
        """Write buffers, padded to whole pages."""
        self._buffers.write(
            fd, (Chunk(nbytes, at, partial(self._copy, source)) for source, nbytes, at in _chunks(parts))
        )

    def _copy(self, source: int, memory: np.ndarray) -> Fence:
        return self._device.scatter([DeviceSpan(source, memory.nbytes, None)], [[memory]], ordered=False)

    def read(self, fd: int, parts: Sequence[At]) -> None:
        """Fill buffers, from any offset in a file."""
        _, raw = self._device.stream()
        fences: list[Fence] = [no_fence, no_fence]
        try:
            for number, (target, nbytes, at) in enumerate(_chunks(parts)):
                memory, skipped = self._buffers.of_thread()[number % 2], at % PAGE
                fences[number % 2]()  # wait for the copy from its previous content
                read_pages(fd, memory[: whole_pages(skipped + nbytes)], at - skipped, skipped + nbytes)
                source = memory.ctypes.data + skipped
                runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, raw.ptr)
                fences[number % 2] = behind(raw)
        finally:
            raw.synchronize()


def _chunks(parts: Sequence[At]) -> Iterator[tuple[int, int, int]]:
    """Yield pieces that fit into a bounce buffer: device address, bytes and file offset."""
    for buffer, at in parts:
        where, left = address(buffer) if buffer.nbytes else 0, buffer.nbytes
        while left:
            nbytes = min(left, BOUNCE_BUFFER_BYTES - at % PAGE)
            yield where, nbytes, at
            where, at, left = where + nbytes, at + nbytes, left - nbytes
