"""Measure how pools in shared memory are accounted, and fake a system with little of it."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dask_gpurt.device import Block, host
from dask_gpurt.device.host import HostMapping, HostPool

PAGE = mmap.PAGESIZE
#: Bit of an entry of /proc/self/pagemap: the page is mapped.
_PRESENT = np.uint64(1 << 63)


def resident(mapping: HostMapping) -> int:
    """Return the bytes of a mapped pool that count towards the RSS of this process."""
    address = mapping.view(0, mapping.nbytes).ctypes.data
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(address // PAGE * 8)
        entries = np.frombuffer(file.read(-(-mapping.nbytes // PAGE) * 8), np.uint64)
    return int(np.count_nonzero(entries & _PRESENT)) * PAGE


def held(pool: HostPool) -> int:
    """Return the bytes that the system has allocated to a pool, excluding its header."""
    return os.fstat(pool._fd).st_blocks * 512 - PAGE


def filled(pool: HostPool, nbytes: int, value: int = 1) -> Block:
    block = pool.allocate(nbytes)
    block.buffer[:] = value
    return block


class Shm:
    """Fake a /dev/shm of a size that a test sets, for the pools that it created."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int):
        self.total, self.pools = total, list[HostPool]()
        self._fallocate = os.posix_fallocate
        monkeypatch.setattr(host.os, "posix_fallocate", self.fallocate)
        monkeypatch.setattr(host, "shm_memory", lambda: (self.total - self.used, max(self.total, 2**40)))

    @property
    def used(self) -> int:
        return sum(pool.backed for pool in self.pools)

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        if nbytes > PAGE and self.used + nbytes > self.total:
            raise OSError(28, "No space left on device")
        self._fallocate(fd, offset, nbytes)


@contextlib.contextmanager
def alone_in_shm() -> Iterator[None]:
    """Keep concurrent tests from creating and listing files in /dev/shm."""
    with open(Path(tempfile.gettempdir(), "dask-gpurt-tests-shm.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
