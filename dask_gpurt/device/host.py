"""Use the host as a device: a pool is an unnamed file in shared memory.

The file never has a name, so nothing has to be cleaned up: the kernel frees it with the last process that
has it open or mapped, even after ``kill -9``. Peers on the same host open it through ``/proc/<pid>/fd/<fd>``.
Each pool takes a descriptor, and so do connections and files of spilled data: a process that has few left
warns before connections fail, which looks as if the peers did not answer.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import secrets
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil
from dask.utils import format_bytes

from dask_gpurt.device.base import Fence, host_id, no_fence
from dask_gpurt.device.pool import (
    AUTO_POOL_OF_SHM,
    Arena,
    Block,
    Buffer,
    Mapping,
    MappingError,
    NoBacking,
    Pool,
    PoolFull,
    PoolLimits,
    Ranges,
    SharedMemoryFull,
    Ticket,
)
from dask_gpurt.device.staging import BOUNCE_BUFFER_BYTES, FILE_BUFFERS

SHM = "/dev/shm"
#: A pool starts with a header page that has a random token, by which a peer recognises the right file.
_HEADER = mmap.PAGESIZE
_TOKEN = 16
#: Bytes that the kernel maps around a page fault (fault_around_bytes).
_FAULT_AROUND = 2**16
#: Bytes that are dropped from the page table, or returned to the system, in one call. The calls hold the GIL,
#: and the second also blocks allocation and freeing of blocks. 20 to 200 ns a page of 4 KiB were seen.
_DROP_STEP, _TRIM_STEP = 2**25, 2**20
#: Error numbers if the system has no memory for a page of a file.
_NO_MEMORY = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)


class HostMapping:
    """Map shared memory of this or another process.

    ``fd``: an open file of ``nbytes`` bytes behind a header page; it may be closed afterwards.
    ``nbytes``: bytes in the pool.
    """

    def __init__(self, fd: int, nbytes: int, *, writable: bool = False):
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, _HEADER + nbytes, flags=mmap.MAP_SHARED, prot=prot)
        self.nbytes = nbytes

    def token(self) -> bytes:
        return self._map[:_TOKEN]

    def view(self, offset: int, nbytes: int) -> Buffer:
        return np.frombuffer(self._map, np.uint8, nbytes, _HEADER + offset)

    def drop_pages(self, offset: int, nbytes: int) -> None:
        # On shared memory this affects only the page table. Another thread may be reading an adjacent block
        # in the same page: it just faults the page in again.
        start = max(0, _down(_HEADER + offset - _FAULT_AROUND))
        end = min(_up(_HEADER + offset + nbytes + _FAULT_AROUND), _HEADER + self.nbytes)
        with contextlib.suppress(ValueError):  # closed concurrently: nothing is mapped
            for at in range(start, end, _DROP_STEP):
                self._map.madvise(mmap.MADV_DONTNEED, at, min(_DROP_STEP, end - at))

    def close(self) -> None:
        # Existing views keep the mapping alive; it is unmapped with the last of them.
        with contextlib.suppress(BufferError):
            self._map.close()


class HostPool(HostMapping):
    """Allocate blocks from an unnamed file in shared memory.

    ``nbytes``: the capacity. System memory is allocated only as blocks need it.
    """

    shrinks = True

    def __init__(self, nbytes: int):
        self._arena = Arena(_down(nbytes))
        self._lock = threading.Lock()
        # A separate lock, so that freeing a block never waits for the slow allocation of system memory.
        self._growing = threading.Lock()
        #: The parts of the arena with system memory behind them, in whole pages.
        self._backed = Ranges()
        #: The cumulative number of allocations.
        self.cuts = 0
        #: The size of the last requested block if the system had no memory for it, else 0.
        self.short = 0
        self._fd = _file_with_header(self._arena.capacity)
        super().__init__(self._fd, self._arena.capacity, writable=True)
        self._map[:_TOKEN] = secrets.token_bytes(_TOKEN)

    @property
    def capacity(self) -> int:
        return self._arena.capacity

    @property
    def used(self) -> int:
        return self._arena.used

    def ticket(self) -> Ticket:
        return {
            "host": host_id(),
            "pid": os.getpid(),
            "fd": self._fd,
            "nbytes": self.capacity,
            "token": self.token(),
        }

    @property
    def backed(self) -> int:
        return self._backed.total

    def allocate(self, nbytes: int) -> Block:
        with self._lock:
            offset = self._arena.allocate(nbytes)
            self.cuts += offset is not None
        if offset is None:
            self.short = 0
            raise PoolFull(nbytes)
        block = Block(offset, nbytes, self.view(offset, nbytes))
        try:
            backed = self._back(block)
            if not backed:
                self.trim()  # free parts of this pool may hold the missing memory
                backed = self._back(block)
        except BaseException:
            self.free(block)
            raise
        self.short = 0 if backed else nbytes
        if backed:
            return block
        self.free(block)
        if nbytes > shm_memory()[1]:
            raise SharedMemoryFull(no_room(nbytes))
        raise NoBacking(nbytes)

    def _back(self, block: Block) -> bool:
        """Allocate system memory behind a block; return False if there is none now."""
        # Without this, first touch of a page that the system cannot provide would raise SIGBUS.
        start, end = _down(block.offset), _up(block.offset + block.nbytes)
        with self._growing:
            for first, last in self._backed.gaps(start, end):
                try:
                    os.posix_fallocate(self._fd, _HEADER + first, last - first)
                except OSError as error:
                    if error.errno not in _NO_MEMORY:
                        raise
                    return False
                self._backed.add(first, last)
        return True

    def free(self, block: Block) -> None:
        with self._lock:
            self._arena.free(block.offset)

    def drop_pages(self, offset: int, nbytes: int) -> None:
        pass  # this process's own memory, which counts until `trim`

    def trim(self) -> None:
        with self._lock:
            free = list(self._arena.free_ranges())
        for start, stop in free:
            with self._growing:
                backed = self._backed.within(_up(start), _down(stop))
            for first, last in backed:
                for at in range(first, last, _TRIM_STEP):
                    self._trim_one(at, min(at + _TRIM_STEP, last))

    def _trim_one(self, start: int, stop: int) -> None:
        # Another thread may have allocated a block in this range since it was listed as free. So check again
        # under `_lock`, which excludes allocations. A later block in the range finds no memory behind it, and
        # allocates it under `_growing`.
        with self._growing, self._lock:
            if self._fd >= 0 and self._arena.is_free(start, stop):
                self._map.madvise(mmap.MADV_REMOVE, _HEADER + start, stop - start)
                self._backed.remove(start, stop)

    def close(self) -> None:
        super().close()
        # Under the lock of those who allocate memory behind a block, since closing releases the GIL:
        #   Thread 1: closes file 7                Thread 2: another file is opened, and becomes 7
        #                                          Thread 3: extends file 7
        with self._growing:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)


def no_room(nbytes: int) -> str:
    """Return the message for a block that cannot be allocated, with advice."""
    free, total = shm_memory()
    return (
        f"{SHM} has no room for {nbytes} bytes ({format_bytes(free)} of {format_bytes(total)} are free, and "
        "no worker of this cluster could give back any): free some, enlarge it (docker: --shm-size), or set "
        "gpurt.exchange.pool to less"
    )


def shm_memory() -> tuple[int, int]:
    """Return the free and the total bytes of the memory that pools are allocated from."""
    try:
        shm = os.statvfs(SHM)
    except OSError:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)
    return shm.f_bavail * shm.f_frsize, shm.f_blocks * shm.f_frsize


def _file_with_header(nbytes: int) -> int:
    """Create an unnamed file for this many bytes, with memory behind its header."""
    with contextlib.suppress(OSError):  # no such mount, no support for O_TMPFILE, or full
        fd = os.open(SHM, os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)
        try:
            return _with_header(fd, nbytes)
        except OSError:
            os.close(fd)
    return _with_header(os.memfd_create("dask-gpurt"), nbytes)


def _with_header(fd: int, nbytes: int) -> int:
    os.ftruncate(fd, _HEADER + nbytes)
    os.posix_fallocate(fd, 0, _HEADER)
    return fd


def _down(offset: int) -> int:
    return offset // mmap.PAGESIZE * mmap.PAGESIZE


def _up(offset: int) -> int:
    return -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE


class HostDevice:
    """Use the CPU and host memory.

    ``memory_limit``: the worker's memory limit in bytes.
    """

    kind = "host"
    shared_path = "shared-memory"
    reads_in_place = True
    on_host = True
    integrated = False
    pool_share = 0.25
    buffers = FILE_BUFFERS * BOUNCE_BUFFER_BYTES

    def __init__(self, memory_limit: int):
        self.memory_limit = memory_limit
        self._mapped: weakref.WeakSet[HostMapping] = weakref.WeakSet()
        self._mapping = threading.Lock()

    def describe(self) -> dict[str, Any]:
        free, total = self.memory()
        return {
            "kind": self.kind,
            "cpus": os.cpu_count(),
            "memory": self.memory_limit,
            "shm": total,
            "shm_free": free,
        }

    def memory(self) -> tuple[int, int]:
        return shm_memory()

    def own_memory(self) -> None:
        return None

    def holds(self, value: Any) -> bool:
        return True

    def pool_limits(self) -> PoolLimits:
        free, total = self.memory()
        automatic = min(self.pool_share * self.memory_limit, AUTO_POOL_OF_SHM * total)
        return PoolLimits(self.memory_limit, automatic, total, free, total, SHM)

    def create_pool(self, nbytes: int) -> Pool:
        return HostPool(nbytes)

    def is_same(self, ticket: Ticket) -> bool:
        return True

    def map(self, ticket: Ticket) -> Mapping:
        if ticket["host"] != host_id():
            raise MappingError("on another host")
        try:
            # O_NONBLOCK, since in another PID namespace the file may be a pipe, and opening it would block.
            fd = os.open(f"/proc/{ticket['pid']}/fd/{ticket['fd']}", os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise MappingError(
                f"shared memory of process {ticket['pid']} is out of reach: {error.strerror}{advice(error)}"
            ) from error
        try:
            if os.fstat(fd).st_size < ticket["nbytes"]:
                raise MappingError("the peer lives in another process namespace")
            mapping = HostMapping(fd, ticket["nbytes"])
        except (OSError, ValueError) as error:
            raise MappingError(f"shared memory cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        if mapping.token() != ticket["token"]:
            mapping.close()
            raise MappingError("the peer lives in another process namespace")
        with self._mapping:
            self._mapped.add(mapping)
        return mapping

    def drop_pages(self) -> None:
        with self._mapping:
            mapped = list(self._mapped)
        for mapping in mapped:
            mapping.drop_pages(0, mapping.nbytes)

    def land(self, sources: Sequence[Buffer]) -> list[Buffer]:
        return [np.array(source) for source in sources]

    def to_host(self, source: Buffer) -> memoryview:
        return memoryview(source)

    def from_host(self, sources: Sequence[np.ndarray]) -> list[Buffer]:
        return list(sources)

    def scatter(self, sources: Sequence[Buffer], into: Sequence[list[Any]], *, ordered: bool = True) -> Fence:
        for source, pieces in zip(sources, into, strict=True):
            at = 0
            for piece in pieces:
                np.copyto(piece, source[at : at + piece.nbytes])
                at += piece.nbytes
        return no_fence

    def gather(self, pieces: list[Any]) -> tuple[Buffer, Fence]:
        return np.concatenate(pieces) if pieces else np.empty(0, np.uint8), no_fence

    def gather_all(self, scattered: Sequence[list[Any]]) -> tuple[list[Buffer], Fence]:
        return [self.gather(pieces)[0] for pieces in scattered], no_fence

    def close(self) -> None:
        pass


#: Fewer free descriptors than these are reported: a connection, a pool and a file for a few peers.
FEW_LEFT = 32
_USED = "/proc/self/fd"
#: Errors of a process and of a system without descriptors.
_NONE_LEFT = (errno.EMFILE, errno.ENFILE)
_RIGHT = "raise the limit (ulimit -n) before workers start, or close files in tasks"


def few_left() -> str | None:
    """Return what is wrong and what would be right if few descriptors are left, else None. Blocks."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir(_USED))
    except OSError as error:
        if error.errno not in _NONE_LEFT:
            return None  # this system does not list them
        used = limit
    if limit == resource.RLIM_INFINITY or limit - used >= FEW_LEFT:
        return None
    return (
        f"{used} of {limit} file descriptors of this worker are in use, and connections to its peers, their "
        f"shared memory and spilled data need some: {_RIGHT}"
    )


def advice(error: OSError) -> str:
    """Return an addition to the message of an error, if it is for lack of descriptors."""
    return f"; {_RIGHT}" if error.errno in _NONE_LEFT else ""
