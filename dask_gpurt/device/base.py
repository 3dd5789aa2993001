"""Define the seam between the runtime and a kind of device.

A :class:`Device` hands out one :class:`Pool`, memory that peers on the same host may map,
and maps the pools of others. All methods block; none is called on the event loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dask_gpurt.topology.links import Link

#: Memory that a table backend reads from and writes to: a ``numpy`` byte array on the host,
#: an object with ``ptr`` and ``size`` on a GPU.
Buffer = Any
#: All that a peer needs to map a pool; only values that msgpack carries.
Ticket = dict[str, Any]
#: Bytes that buffers in files are aligned to: what direct I/O asks of memory and of places in a file.
PAGE = 4096


#: No pool takes more than this of the free memory of a GPU by itself, since others take from it too.
AUTO_POOL_OF_FREE = 0.4
#: No pool promises more than this of /dev/shm by itself. It is a promise only: what is free as a worker
#: starts says nothing of later, and where the pools of a host promise more than there is, producers wait.
AUTO_POOL_OF_SHM = 0.4

#: Set in the environment of workers that share a device: how many they are.
COLOCATED = "GPURT_COLOCATED"

#: Libraries whose objects lie in the memory of a GPU.
_GPU_LIBRARIES = frozenset({"cudf", "cupy", "rmm", "pylibcudf"})
#: The collections that are looked into for frames and arrays, as Dask's serialisation does, and the most
#: objects in them.
_COLLECTIONS, MAX_CONTENTS = frozenset({dict, list, tuple}), 1000

#: Waits, when called, until something that was begun is complete.
Fence = Callable[[], None]


def passed() -> None:
    """Return at once: the fence of what is complete already."""


def workers_of_device() -> int:
    """Return how many workers share the memory of this worker's device, itself included."""
    return int(os.environ.get(COLOCATED, 1))


def lives_on_device(value: Any) -> bool:
    """Return whether an object is of a library whose objects lie on a GPU, or a collection that holds one."""
    return is_of(type(value), _GPU_LIBRARIES) or any(map(lives_on_device, contents(value)))


def contents(value: Any) -> Sequence[Any]:
    """Return the objects in a dict, list or tuple and in those that it holds; none of any other object.

    Nor of a collection with more than ``MAX_CONTENTS``: those are numbers or words, and the event loop asks.
    """
    found: list[Any] = []
    pending = [value] if type(value) in _COLLECTIONS else []
    seen = 0
    while pending:
        collection = pending.pop()
        seen += len(collection)
        if seen > MAX_CONTENTS:
            return ()
        for each in collection.values() if type(collection) is dict else collection:
            (pending if type(each) in _COLLECTIONS else found).append(each)
    return found


def is_of(type_: type, libraries: frozenset[str]) -> bool:
    """Return whether a type, or one that it inherits from, is of one of some libraries."""
    # A type may say anything of its module, as that it has none.
    return any(str(kind.__module__).partition(".")[0] in libraries for kind in type_.__mro__)


class PoolFull(Exception):
    """A pool has no free block of the size asked for.

    Parameters
    ----------
    nbytes
        The size that was asked for.
    """

    def __init__(self, nbytes: int):
        super().__init__(f"no free block of {nbytes} bytes")
        self.nbytes = nbytes


class NoBacking(PoolFull):
    """A pool has a free block, but the system has no memory for it now.

    Other pools of this host may hold what is missing, so it may come back.
    """


class MappingError(Exception):
    """A peer's pool cannot be mapped; the message says why."""


class SmsError(OSError):
    """Compute cannot be confined to some of the SMs; the message says why."""


class PriorityError(OSError):
    """The priority of communication cannot be changed; the message says why."""


@dataclass(frozen=True)
class Block:
    """Describe a piece of a pool: ``nbytes`` bytes from ``offset``, seen through ``buffer``."""

    offset: int
    nbytes: int
    buffer: Buffer


@dataclass(frozen=True)
class PoolLimits:
    """Limit the size of a device's pool, in bytes.

    Attributes
    ----------
    whole
        What a share is a share of.
    automatic
        The size of a pool where the user gives none.
    most
        The largest pool that a user may ask for.
    free, total
        The memory that pools are cut from.
    where
        A name for that memory.
    """

    whole: int
    automatic: float
    most: int
    free: int
    total: int
    where: str


class Mapping(Protocol):
    """Read a pool, own or of a peer, in this process."""

    def view(self, offset: int, nbytes: int) -> Buffer:
        """Return a view of a part of the pool; it keeps the mapping alive."""
        ...

    def drop_pages(self, offset: int, nbytes: int) -> None:
        """Stop counting a part of a peer's pool, which was read, as memory of this process.

        The bytes stay, and views of them remain readable; pages that are read again count again.
        """
        ...

    def close(self) -> None: ...


class Pool(Mapping, Protocol):
    """Cut memory of a fixed capacity into blocks, and let peers map it."""

    @property
    def capacity(self) -> int:
        """Return the bytes that fit."""
        ...

    @property
    def used(self) -> int:
        """Return the bytes in blocks."""
        ...

    @property
    def backed(self) -> int:
        """Return the bytes of the system's memory that it takes now, whether blocks are there or not."""
        ...

    @property
    def cuts(self) -> int:
        """Return the blocks that were cut so far."""
        ...

    @property
    def short(self) -> int:
        """Return the size of the block last asked for, if the system had no memory for it; else 0."""
        ...

    def ticket(self) -> Ticket:
        """Return what a peer needs to map this pool."""
        ...

    def allocate(self, nbytes: int) -> Block:
        """Cut a block.

        Raises
        ------
        PoolFull
            When no free piece is large enough.
        NoBacking
            When the system has no memory for it now.
        MemoryError
            When the system never has.
        """
        ...

    def free(self, block: Block) -> None: ...

    def trim(self) -> None:
        """Give memory that no block uses back to the system, where that is possible."""
        ...


class SmContexts(Protocol):
    """Give threads contexts of a device that have some of its SMs."""

    #: SMs of the device, and the number in whose multiples they can be taken from compute.
    total: int
    unit: int

    def entered(self, sms: int) -> AbstractContextManager[None]:
        """Confine the launches of this thread to this many SMs meanwhile.

        Raises
        ------
        SmsError
            When that is not possible.
        """
        ...

    def try_out(self, sms: int) -> None:
        """Check that kernels can be confined to this many SMs.

        Raises
        ------
        SmsError
            When it does not.
        """
        ...


class DeviceFiles(Protocol):
    """Move buffers of a device to files and back, not by way of ordinary host memory. All methods block."""

    def write(self, fd: int, path: str, parts: Sequence[tuple[Buffer, int]], *, ordered: bool) -> list[int]:
        """Write buffers, each from a multiple of PAGE on, into a file that is as long as it will be.

        Parameters
        ----------
        fd, path
            The file, open for writing, past the page cache maybe.
        parts
            Each buffer, and its offset. The bytes behind it in its last page may change.
        ordered
            Whether work that was given to the device so far may still write the buffers.

        Returns
        -------
        list of int
            The crc32 of each buffer.
        """
        ...

    def read(self, fd: int, path: str, spans: Sequence[tuple[int, int]]) -> list[tuple[Buffer, int]]:
        """Return new buffers with what a file holds, each with its crc32.

        Parameters
        ----------
        fd, path
            The file, open for reading.
        spans
            From where on, and how many bytes.

        Raises
        ------
        EOFError
            When the file is too short.
        MemoryError
            When the device has no room.
        """
        ...


class CodecError(Exception):
    """A device could not compress or restore bytes; the message says why."""


class Codec(Protocol):
    """Compress what is in the memory of a device. Thread-safe; its methods block."""

    #: As peers know it.
    name: str
    #: Whether what it gives is in host memory.
    on_host: bool
    #: Bytes per second of a link at which it gains nothing.
    fast: float

    def whole(self, sections: Sequence[Buffer]) -> Any:
        """Return buffers of the device as one, for :meth:`compress`.

        Raises
        ------
        CodecError
            When there is no room for it; so do the other methods.
        """
        ...

    def part(self, whole: Any) -> Any:
        """Return the part of it that stands for all when the codec is tried out."""
        ...

    def compress(self, whole: Any) -> Any:
        """Return the bytes that :meth:`decompress` restores, with their size as ``nbytes``."""
        ...

    def decompress(self, packed: Any, sizes: Sequence[int]) -> list[Buffer]:
        """Return the sections that were compressed as one, given the bytes of each.

        Raises
        ------
        ValueError
            When something else comes out.
        """
        ...


class Device(Protocol):
    """Compute on a device, with memory, streams and copies of its own."""

    #: "host" or "cuda"
    kind: str
    #: The path by which a peer of the same host reads a pool of this device.
    shared_path: str
    #: Whether a mapped shard is read where it lies; otherwise it is copied over first.
    reads_in_place: bool
    #: Whether its memory is the host's. Ask for what follows from it where there is a method for that.
    on_host: bool
    #: Whether it is a GPU whose memory is the host's: what is copied from one to the other lies there twice.
    integrated: bool
    #: The links that its bytes take on their way into memory that the host reads; none where they are there.
    host_links: tuple[Link, ...]
    #: The package to install where it has no codec.
    codecs_missing: str
    #: The share of its memory that a pool takes by default: enough for producers to run ahead.
    pool_share: float
    #: Whether its own streams come before those of user code, where they share the device. What is
    #: launched after a change has the new priority, and the order that it would have had.
    prioritised: bool

    def describe(self) -> dict[str, Any]:
        """Name, memory and whatever else helps a person who reads ``doctor``."""
        ...

    def sm_contexts(self, instead: Callable[[int, int], None]) -> SmContexts:
        """Return contexts that have some of its SMs.

        Parameters
        ----------
        instead
            Has this thread get a context, the second, where code makes another current, the first; as
            numbers, and 0 and 0 end it.

        Raises
        ------
        SmsError
            When there are none.
        """
        ...

    def try_priorities(self) -> None:
        """Change the priority of a stream.

        Raises
        ------
        PriorityError
            When that is not possible.
        """
        ...

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the memory that a pool is cut from."""
        ...

    def own_memory(self) -> int | None:
        """Return the bytes of its memory, this worker's part where workers share it.

        None where that is the host's, as limited for the worker.
        """
        ...

    def holds(self, value: Any) -> bool:
        """Return whether an object that is live lies in its memory."""
        ...

    def pool_limits(self) -> PoolLimits:
        """Return how large a pool may be."""
        ...

    def create_pool(self, nbytes: int) -> Pool: ...

    def map(self, ticket: Ticket) -> Mapping:
        """Map the pool of a peer.

        Raises
        ------
        MappingError
            With the reason, when this process cannot read it.
        """
        ...

    def drop_pages(self) -> None:
        """Stop counting pages of the pools of peers as memory of this process; they remain readable."""
        ...

    def carried_by(self, protocol: str) -> bool:
        """Return whether Dask's comms of ``protocol`` ("tcp", "ucx", …) take buffers of this device."""
        ...

    def for_comm(self, source: Buffer) -> Any:
        """Return ``source`` as such a comm takes it, without a copy."""
        ...

    def from_comm(self, sources: Sequence[Any]) -> list[Buffer]:
        """Return buffers of what such a comm has brought, without a copy."""
        ...

    def host_codecs(self) -> dict[str, Codec]:
        """Return the codecs for its buffers in host memory, by the name that peers know them by."""
        ...

    def own_codecs(self) -> dict[str, Codec]:
        """Return the codecs for its buffers where they are, if that is not in host memory."""
        ...

    def land(self, sources: Sequence[Buffer]) -> list[Buffer]:
        """Copy mapped memory into memory of this process, complete on return.

        Raises
        ------
        MemoryError
            When the device has no room.
        """
        ...

    def to_host(self, source: Buffer) -> bytearray | memoryview:
        """Copy ``source`` into host memory, complete on return."""
        ...

    def from_host(self, sources: Sequence[np.ndarray]) -> list[Buffer]:
        """Make bytes in host memory readable for the table backend, complete on return.

        Raises
        ------
        MemoryError
            When the device has no room.
        """
        ...

    def scatter(self, sources: Sequence[Buffer], into: Sequence[list[Any]], *, ordered: bool = True) -> Fence:
        """Begin to copy buffers of this device into pieces of host memory; both stay until the fence.

        Parameters
        ----------
        ordered
            Whether work that was given to the device so far may still write the buffers.
        """
        ...

    def gather(self, pieces: list[Any]) -> tuple[Buffer, Fence]:
        """Return one buffer of this device out of pieces of host memory, which stay until the fence.

        The copies of a thread are made in order.

        Raises
        ------
        MemoryError
            When the device has no room.
        """
        ...

    def files(self, refused: Callable[[str], None]) -> DeviceFiles | None:
        """Return how its buffers get into files; None where they lie in host memory.

        Parameters
        ----------
        refused
            Told why, when the faster of two ways cannot be taken from now on.
        """
        ...

    def gather_all(self, scattered: Sequence[list[Any]]) -> tuple[list[Buffer], Fence]:
        """Gather as :meth:`gather` does, for buffers that come and go together."""
        ...

    def pinning(self) -> Callable[[np.ndarray], Callable[[], None]] | None:
        """Return what registers host memory, and returns the undo; None where that makes no copy faster."""
        ...

    def guard(self, short: Callable[[int], bool]) -> Callable[[], None]:
        """Make the allocator of user code ask for room before it fails; return the undo.

        Parameters
        ----------
        short
            Called with the bytes that were not to be had, on the thread that asked for them;
            whether it pays to try once more.
        """
        ...

    def peak(self) -> int:
        """Return the most bytes that user code held at once since the last call, beyond those of then.

        0 where the allocator does not tell.
        """
        ...

    def allocated(self) -> int:
        """Return the bytes that user code was given since :meth:`guard` and still holds; 0 without a count.

        Neither this nor :meth:`peak` asks the device, so the event loop may call them.
        """
        ...

    def close(self) -> None: ...
