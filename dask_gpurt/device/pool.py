"""Define memory pools that peers on the same host may map. Methods block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

#: Memory that a table backend reads from and writes to: a ``numpy`` byte array on the host,
#: an object with ``ptr`` and ``size`` on a GPU.
Buffer = Any
#: Description by which a peer maps a pool; has only values that msgpack can serialise.
Ticket = dict[str, Any]
#: The most of a GPU's free memory that a pool of automatic size takes, since others use that memory too.
AUTO_POOL_OF_FREE = 0.4
#: The most of /dev/shm, as a share of its total size, for the capacity of a pool of automatic size. Memory is
#: allocated only on demand: the pools of a host may overcommit, and then producers wait.
AUTO_POOL_OF_SHM = 0.4


class NoMemoryForPool(Exception):
    """A device has no memory for a new pool."""

    def __init__(self, nbytes: int):
        super().__init__(nbytes)
        self.nbytes = nbytes

    def __str__(self) -> str:
        return f"the device has no memory for a pool of {self.nbytes} bytes"


class PoolFull(Exception):
    """A pool has no free block of the requested size."""

    def __init__(self, nbytes: int):
        super().__init__(nbytes)
        self.nbytes = nbytes

    def __str__(self) -> str:
        return f"no free block of {self.nbytes} bytes"


class NoBacking(PoolFull):
    """A pool has a free block, but the system currently has no memory for it.

    Other pools of this host may hold that memory, so a retry may succeed.
    """


class SharedMemoryFull(MemoryError):
    """The host's shared memory has no room, whatever this worker spills; the message says what to do."""


class MappingError(Exception):
    """A peer's pool cannot be mapped; the message has the reason."""


@dataclass(frozen=True)
class Block:
    """Describe an allocation in a pool: ``nbytes`` bytes at ``offset``, and their ``buffer``."""

    offset: int
    nbytes: int
    buffer: Buffer


@dataclass(frozen=True)
class PoolLimits:
    """Limit the size of a device's pool, in bytes.

    Attributes
    ----------
    whole
        The base of sizes that are given as a share.
    automatic
        The size of a pool if the user sets none.
    most
        The largest size that a user may set.
    free, total
        Free and total bytes of the memory that pools are allocated from.
    where
        The name of that memory, for messages.
    """

    whole: int
    automatic: float
    most: int
    free: int
    total: int
    where: str


class Mapping(Protocol):
    """Access a pool, of this worker or a peer, in this process."""

    def view(self, offset: int, nbytes: int) -> Buffer:
        """Return a view of a part of the pool; it keeps the mapping alive."""
        ...

    def drop_pages(self, offset: int, nbytes: int) -> None:
        """Drop a part of a peer's pool from the resident set of this process.

        Views remain valid; reading them maps the pages again.
        """
        ...

    def close(self) -> None: ...


class Pool(Mapping, Protocol):
    """Allocate blocks from memory of a fixed capacity, which peers can map."""

    @property
    def shrinks(self) -> bool:
        """Return whether :meth:`trim` can return memory to the system."""
        ...

    @property
    def capacity(self) -> int:
        """Return the capacity in bytes."""
        ...

    @property
    def used(self) -> int:
        """Return the bytes in blocks."""
        ...

    @property
    def backed(self) -> int:
        """Return the bytes of system memory currently behind it, used by blocks or not."""
        ...

    @property
    def cuts(self) -> int:
        """Return the cumulative number of allocations."""
        ...

    @property
    def short(self) -> int:
        """Return the size of the last requested block if the system had no memory for it, else 0."""
        ...

    def ticket(self) -> Ticket:
        """Return the description by which a peer maps this pool."""
        ...

    def allocate(self, nbytes: int) -> Block:
        """Allocate a block.

        Raises
        ------
        PoolFull
            If no free range is large enough.
        NoBacking
            If the system currently has no memory for it.
        MemoryError
            If it exceeds the system's total memory.
        """
        ...

    def free(self, block: Block) -> None: ...

    def trim(self) -> None:
        """Return memory that no block uses to the system, if the pool shrinks."""
        ...
