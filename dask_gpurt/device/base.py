"""Define the interface between the runtime and a kind of device.

A :class:`Device` creates a :class:`Pool`, memory that peers on the same host may map, and maps the pools of
peers. Methods block, and must not be called on the event loop, unless they say otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dask_gpurt.device.pool import Buffer, Mapping, Pool, PoolLimits, Ticket

#: Alignment of memory and file offsets in bytes, as required by direct I/O.
PAGE = 4096

#: Blocks, when called, until an asynchronous operation is complete.
Fence = Callable[[], None]


def no_fence() -> None:
    """Return immediately: the fence of an operation that is already complete."""


def wait_for_all(fences: Iterable[Fence]) -> None:
    """Wait for each fence, also after an error of another one, which is raised at the end."""
    with ExitStack() as waiting:
        for fence in fences:
            waiting.callback(fence)


def host_id() -> str:
    """Return an id shared by all processes of one running kernel."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


class DeviceFiles(Protocol):
    """Move device buffers to files and back, without pageable host memory. All methods block."""

    def write(self, fd: int, path: str, parts: Sequence[tuple[Buffer, int]], *, ordered: bool) -> list[int]:
        """Write buffers to a file of the final length.

        Parameters
        ----------
        fd, path
            The file, open for writing, possibly with direct I/O.
        parts
            Pairs of a buffer and its offset, a multiple of PAGE. The rest of its last page may be
            overwritten.
        ordered
            Whether pending work on the device may still write the buffers.

        Returns
        -------
        list of int
            The crc32 of each buffer.
        """

    def read(self, fd: int, path: str, spans: Sequence[tuple[int, int]]) -> list[tuple[Buffer, int]]:
        """Read spans of a file into new buffers; return each with its crc32.

        Parameters
        ----------
        fd, path
            The file, open for reading.
        spans
            Pairs of an offset and a number of bytes.

        Raises
        ------
        EOFError
            If the file is too short.
        MemoryError
            If the device has no memory for the buffers.
        """


class Guard(Protocol):
    """Call back when user code cannot allocate."""

    def renew(self) -> None:
        """Guard the allocator that user code has now, in case it has been replaced. On the event loop."""

    def remove(self) -> None:
        """Stop, and give user code the allocator that it would have without the guard. On the event loop."""


class Device(Protocol):
    """Provide memory of a device, and copies between it and the host: what every device has.

    What a device may lack are protocols of their own, which its class implements or not: :class:`Streams`,
    :class:`Files`, :class:`Pinning`, :class:`DirectComms`, :class:`Allocator`. ``isinstance`` tells.
    """

    #: The name of its kind, "host" for the host.
    kind: str
    #: The path by which a peer on the same host reads a pool of this device.
    shared_path: str
    #: Whether mapped shards are read in place; otherwise they are copied first.
    reads_in_place: bool
    #: Whether its memory is the host's. Prefer methods for specific consequences of that, if there are any.
    on_host: bool
    #: Whether it is a GPU that shares the host's memory, so that host copies of its data save no memory.
    integrated: bool
    #: The most bytes of host memory in its buffers for copies and files.
    buffers: int

    def describe(self) -> dict[str, Any]:
        """Return the name, memory and other facts for ``dask gpurt doctor``."""

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of the memory that pools are allocated from."""

    def own_memory(self) -> int | None:
        """Return the bytes of its memory.

        None if it is host memory, which the worker's memory limit applies to.
        """

    def holds(self, value: Any) -> bool:
        """Return whether a live object is in its memory."""

    def pool_limits(self) -> PoolLimits:
        """Return the limits of the size of a pool."""

    def create_pool(self, nbytes: int) -> Pool:
        """Create a pool.

        Raises
        ------
        NoMemoryForPool
            If the device does not have that much memory at the moment.
        """

    def is_same(self, ticket: Ticket) -> bool:
        """Return whether the pool of a peer that was mapped is in the memory of this very device."""

    def map(self, ticket: Ticket) -> Mapping:
        """Map the pool of a peer.

        Raises
        ------
        MappingError
            If this process cannot read it, with the reason.
        """

    def drop_pages(self) -> None:
        """Drop all pages of peers' pools from the resident set of this process; they remain readable."""

    def land(self, sources: Sequence[Buffer]) -> list[Buffer]:
        """Copy mapped memory into new memory of this process. Synchronous.

        Raises
        ------
        MemoryError
            If the device has no memory for it.
        """

    def to_host(self, source: Buffer) -> bytearray | memoryview:
        """Copy a buffer to host memory. Synchronous."""

    def from_host(self, sources: Sequence[np.ndarray]) -> list[Buffer]:
        """Make buffers of the device from bytes in host memory. Synchronous; the host does not copy.

        Raises
        ------
        MemoryError
            If the device has no memory for them.
        """

    def scatter(self, sources: Sequence[Buffer], into: Sequence[list[Any]], *, ordered: bool = True) -> Fence:
        """Start to copy device buffers into pieces of host memory or of a pool.

        Buffers and pieces have to stay valid until the fence.

        Parameters
        ----------
        ordered
            Whether pending work on the device may still write the buffers.
        """

    def gather(self, pieces: list[Any]) -> tuple[Buffer, Fence]:
        """Start to copy pieces of host memory into one new buffer; they have to stay valid until the fence.

        Raises
        ------
        MemoryError
            If the device has no memory for the buffer.
        """

    def gather_all(self, scattered: Sequence[list[Any]]) -> tuple[list[Buffer], Fence]:
        """Gather several buffers as :meth:`gather` does, in a single allocation if possible."""

    def close(self) -> None: ...


# ---- what a device may lack ----------------------------------------------------------


class Beside(Protocol):
    """Order a stream of a thread with the user's stream, beside which it runs.

    Attributes
    ----------
    stream
        The stream, for libraries.
    """

    stream: Any

    def join(self, columns: Iterable[Any]) -> None:
        """Have the user's stream wait for all work of this one, and own columns that were made on this one.

        Until then their memory may be used on this stream only: freed, it would be written again while the
        user's stream still reads it.

        Raises
        ------
        TypeError
            If the memory of a column is not that of the library's allocator.
        """


@runtime_checkable
class Streams(Protocol):
    """Have communication and reads on streams of their own, beside that of user code."""

    #: Whether the runtime's streams have priority over those of user code. A change applies to later
    #: launches, and does not affect their order.
    prioritised: bool

    def beside(self) -> Beside:
        """Return the stream of this thread for a library, ordered after the user's work submitted so far.

        An error of the device is raised as it is.
        """


@runtime_checkable
class Files(Protocol):
    """Move buffers to files without pageable host memory, as a device does whose memory is not the host's."""

    def files(self, refused: Callable[[str], None]) -> DeviceFiles:
        """Return what moves its buffers to files.

        Parameters
        ----------
        refused
            Called with the reason once the faster of two implementations cannot be used.
        """


@runtime_checkable
class Pinning(Protocol):
    """Copy faster from and to host memory that is pinned."""

    def register(self, memory: np.ndarray) -> Callable[[], None]:
        """Pin host memory, so that copies run at the speed of the bus; return the undo."""


@runtime_checkable
class DirectComms(Protocol):
    """Have Dask's comms send buffers directly, not through host memory."""

    #: Dask's family of serializers whose frames are buffers of the device.
    serializer: str

    def carried_by(self, protocol: str) -> bool:
        """Return whether Dask's comms of ``protocol`` ("tcp", "ucx", …) send its buffers directly."""

    def for_comm(self, source: Buffer) -> Any:
        """Wrap a buffer for such a comm, without a copy."""

    def from_comm(self, sources: Sequence[Any]) -> list[Buffer]:
        """Wrap buffers received through such a comm, without a copy."""


@runtime_checkable
class Allocator(Protocol):
    """Watch the allocations of user code on the device."""

    def guard(self, short: Callable[[int], bool]) -> Guard:
        """Install a callback for failed allocations of user code.

        Parameters
        ----------
        short
            Called with the requested bytes, in the allocating thread; returns whether to retry.
        """

    def peak(self) -> int:
        """Return the peak bytes of user code since the last call, relative to those held at that time.

        0 if the allocator does not count. Does not block.
        """

    def allocated(self) -> int:
        """Return the bytes that user code has allocated since :meth:`guard` and still holds.

        0 if the allocator does not count. Does not block.
        """


def files_of(device: Device, refused: Callable[[str], None]) -> DeviceFiles | None:
    """Return what moves a device's buffers to files; None if the host can. See :meth:`Files.files`."""
    return device.files(refused) if isinstance(device, Files) else None


def direct_comms(device: Device, protocol: str) -> DirectComms | None:
    """Return a device as one whose buffers comms of a protocol ("tcp", "ucx", …) send directly, or None."""
    return device if isinstance(device, DirectComms) and device.carried_by(protocol) else None
