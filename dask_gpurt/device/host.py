"""The host as a device: a pool is a nameless file in shared memory.

The file has no name from the start, so nothing has to be cleaned up: the kernel frees it
with the last process that holds or maps it, also after ``kill -9``. Peers of the same host
reach it through ``/proc/<pid>/fd/<fd>``.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psutil

from dask_gpurt.device.arena import Arena
from dask_gpurt.device.codecs import Codec, host_codecs
from dask_gpurt.device.protocol import (
    Block,
    Buffer,
    Fence,
    Mapping,
    MappingError,
    Pool,
    PoolFull,
    PriorityError,
    SmContexts,
    SmsError,
    Ticket,
    passed,
)
from dask_gpurt.topology.system import host_id

SHM = "/dev/shm"
#: The first bytes of a pool hold a random token, by which a peer knows the right file.
_HEADER = mmap.PAGESIZE
_TOKEN = 16


class HostMapping:
    """Shared memory of this or another process, mapped into this one.

    Parameters
    ----------
    fd
        An open file of ``nbytes`` bytes behind a header page; it may be closed afterwards.
    nbytes
        Bytes in the pool.
    """

    def __init__(self, fd: int, nbytes: int, *, writable: bool = False):
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, _HEADER + nbytes, flags=mmap.MAP_SHARED, prot=prot)

    def token(self) -> bytes:
        return self._map[:_TOKEN]

    def view(self, offset: int, nbytes: int) -> Buffer:
        return np.frombuffer(self._map, np.uint8, nbytes, _HEADER + offset)

    def close(self) -> None:
        # Views that are still around keep the mapping; it goes with the last of them.
        with contextlib.suppress(BufferError):
            self._map.close()


class HostPool(HostMapping):
    """A nameless file in shared memory, cut into blocks.

    Parameters
    ----------
    nbytes
        Capacity. Memory is taken from the system as blocks need it, up to this.
    """

    def __init__(self, nbytes: int):
        self._arena = Arena(nbytes)
        self._lock = threading.Lock()
        # Apart from the first lock, because taking memory is slow and freeing a block is not.
        self._growing = threading.Lock()
        self._backed = 0
        self._fd = _nameless_file()
        os.ftruncate(self._fd, _HEADER + self._arena.capacity)
        os.posix_fallocate(self._fd, 0, _HEADER)
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

    def allocate(self, nbytes: int) -> Block:
        with self._lock:
            offset = self._arena.allocate(nbytes)
        if offset is None:
            raise PoolFull(nbytes)
        block = Block(offset, nbytes, self.view(offset, nbytes))
        try:
            self._back(offset + nbytes)
        except OSError as error:
            self.free(block)
            if self.used:
                raise PoolFull(nbytes) from error  # room comes back as peers read
            raise MemoryError(
                f"{SHM} has no room for {nbytes} bytes ({error.strerror}): free some, enlarge it "
                "(docker: --shm-size), or set gpurt.exchange.pool to less"
            ) from error
        return block

    def _back(self, end: int) -> None:
        # A page that the system can not provide would be a SIGBUS on first touch.
        with self._growing:
            if end > self._backed:
                os.posix_fallocate(self._fd, _HEADER + self._backed, end - self._backed)
                self._backed = end

    def free(self, block: Block) -> None:
        with self._lock:
            self._arena.free(block.offset)

    def trim(self) -> None:
        with self._growing, self._lock:
            if not self._arena.used and self._backed:
                self._map.madvise(mmap.MADV_REMOVE, _HEADER, self._backed)
                self._backed = 0

    def close(self) -> None:
        super().close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _nameless_file() -> int:
    try:
        return os.open(SHM, os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)
    except OSError:  # no such mount, or one without nameless files
        return os.memfd_create("dask-gpurt")


class HostDevice:
    """Processor and main memory.

    Parameters
    ----------
    memory_limit
        Bytes of memory that the worker may use.
    """

    kind = "host"
    shared_path = "shared-memory"
    reads_in_place = True
    on_host = True
    pool_share = 0.25
    prioritised = False

    def __init__(self, memory_limit: int):
        self.memory_limit = memory_limit

    def describe(self) -> dict[str, Any]:
        free, total = self.memory()
        return {
            "kind": self.kind,
            "cpus": os.cpu_count(),
            "memory": self.memory_limit,
            "shm": total,
            "shm_free": free,
        }

    def sm_contexts(self, instead: Callable[[int, int], None]) -> SmContexts:
        raise SmsError("a processor has no SMs")

    def try_priorities(self) -> None:
        raise PriorityError("copies of a processor have no priority")

    def memory(self) -> tuple[int, int]:
        try:
            shm = os.statvfs(SHM)
        except OSError:
            memory = psutil.virtual_memory()
            return int(memory.available), int(memory.total)
        return shm.f_bavail * shm.f_frsize, shm.f_blocks * shm.f_frsize

    def create_pool(self, nbytes: int) -> Pool:
        return HostPool(nbytes)

    def map(self, ticket: Ticket) -> Mapping:
        if ticket["host"] != host_id():
            raise MappingError("on another host")
        try:
            # In another process namespace it may be anything: opening a pipe would wait for its writer.
            fd = os.open(f"/proc/{ticket['pid']}/fd/{ticket['fd']}", os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise MappingError(
                f"shared memory of process {ticket['pid']} is out of reach: {error.strerror}"
            ) from error
        try:
            if os.fstat(fd).st_size < ticket["nbytes"]:
                raise MappingError("the peer lives in another process namespace")
            mapping = HostMapping(fd, ticket["nbytes"])
        except (OSError, ValueError) as error:
            raise MappingError(f"shared memory can not be mapped: {error}") from error
        finally:
            os.close(fd)
        if mapping.token() != ticket["token"]:
            mapping.close()
            raise MappingError("the peer lives in another process namespace")
        return mapping

    def carried_by(self, protocol: str) -> bool:
        return False  # comms send bytes, which `to_host` and `from_host` make of it for nothing

    def for_comm(self, source: Buffer) -> Any:
        return source

    def host_codecs(self) -> dict[str, Codec]:
        return host_codecs(self.to_host)

    def own_codecs(self) -> dict[str, Codec]:
        return {}

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
        return passed

    def gather(self, pieces: list[Any]) -> tuple[Buffer, Fence]:
        return np.concatenate(pieces) if pieces else np.empty(0, np.uint8), passed

    def gather_all(self, scattered: Sequence[list[Any]]) -> tuple[list[Buffer], Fence]:
        return [self.gather(pieces)[0] for pieces in scattered], passed

    def files(self, refused: Callable[[str], None]) -> None:
        return None  # what writes host memory is at hand wherever there are files

    def guard(self, short: Callable[[int], bool]) -> Callable[[], None]:
        return passed  # Linux promises memory that it does not have, and malloc asks nobody

    def peak(self) -> int:
        return 0

    def allocated(self) -> int:
        return 0

    def close(self) -> None:
        pass
