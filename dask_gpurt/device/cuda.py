"""Use a GPU as a device: a pool is one cudaMalloc that peers map through CUDA IPC.

The user's allocator may not be mappable (asynchronous and managed pools are not), so the pool has memory of
its own. Copies run on one stream per thread, with the highest priority unless `gpurt.overlap.mode` is `off`.
Copies from a mapped peer use the copy engines, not the SMs.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import cupy
import numpy as np
import psutil
import rmm
from cuda.bindings.runtime import (
    cudaDeviceAttr,
    cudaDeviceGetStreamPriorityRange,
    cudaError_t,
    cudaStreamAttrID,
    cudaStreamAttrValue,
    cudaStreamSetAttribute,
)
from cupy.cuda import runtime
from cupy.cuda.runtime import CUDARuntimeError
from rmm.pylibrmm.stream import DEFAULT_STREAM, Stream

from dask_gpurt.device.base import (
    Allocator,
    DeviceFiles,
    DirectComms,
    Fence,
    Files,
    Guard,
    Pinning,
    Streams,
    host_id,
    wait_for_all,
)
from dask_gpurt.device.copies import Copy, DeviceSpan, fillings, runs
from dask_gpurt.device.cuda_guard import ResourceGuard
from dask_gpurt.device.cuda_memory import (
    StreamBeside,
    behind,
    bounce_buffers,
    copy_async,
    copy_on_device,
    cut,
    is_pageable,
)
from dask_gpurt.device.libraries import lives_on_device
from dask_gpurt.device.pool import (
    AUTO_POOL_OF_FREE,
    Arena,
    Block,
    Buffer,
    Mapping,
    MappingError,
    NoMemoryForPool,
    Pool,
    PoolFull,
    PoolLimits,
    Ticket,
)
from dask_gpurt.device.staging import (
    BOUNCE_BUFFER_BYTES,
    FILE_BUFFERS,
    STAGED_FROM_BYTES,
    STAGING_CHUNK_BYTES,
    STAGING_THREADS,
    Staging,
)


class CudaMapping:
    """Map the pool of a peer on the same host through CUDA IPC."""

    def __init__(self, handle: bytes):
        self._base = runtime.ipcOpenMemHandle(handle)

    def view(self, offset: int, nbytes: int) -> Buffer:
        return DeviceSpan(self._base + offset, nbytes, self)

    def drop_pages(self, offset: int, nbytes: int) -> None:
        pass  # GPU memory is not part of the resident set

    def close(self) -> None:
        if self._base:
            runtime.ipcCloseMemHandle(self._base)
            self._base = 0


class CudaPool:
    """Allocate blocks from device memory of a fixed size.

    ``device``: the UUID of the device.
    Raises NoMemoryForPool if CUDA has none left.
    """

    #: Always 0, since all memory is allocated up front.
    short = 0
    #: It is one allocation, which peers have mapped.
    shrinks = False

    def __init__(self, nbytes: int, device: str):
        self._device = device
        self._arena = Arena(nbytes)
        self._lock = threading.Lock()
        try:
            self._base = runtime.malloc(self._arena.capacity)
        except CUDARuntimeError as error:
            if error.status != cudaError_t.cudaErrorMemoryAllocation:
                raise
            raise NoMemoryForPool(nbytes) from error
        self.cuts = 0

    @property
    def capacity(self) -> int:
        return self._arena.capacity

    @property
    def used(self) -> int:
        return self._arena.used

    @property
    def backed(self) -> int:
        return self.capacity

    def view(self, offset: int, nbytes: int) -> Buffer:
        return DeviceSpan(self._base + offset, nbytes, self)

    def ticket(self) -> Ticket:
        return {
            "host": host_id(),
            "pid": os.getpid(),
            "handle": bytes(runtime.ipcGetMemHandle(self._base)),
            "device": self._device,
            "nbytes": self.capacity,
        }

    def allocate(self, nbytes: int) -> Block:
        with self._lock:
            offset = self._arena.allocate(nbytes)
            self.cuts += offset is not None
        if offset is None:
            raise PoolFull(nbytes)
        return Block(offset, nbytes, self.view(offset, nbytes))

    def free(self, block: Block) -> None:
        with self._lock:
            self._arena.free(block.offset)

    def drop_pages(self, offset: int, nbytes: int) -> None:
        pass  # this process's own memory

    def trim(self) -> None:
        pass

    def close(self) -> None:
        if self._base:
            runtime.free(self._base)
            self._base = 0


class CudaDevice(Streams, Files, Pinning, DirectComms, Allocator):
    """Use the GPU that is CUDA's current device on construction."""

    kind = "cuda"
    serializer = "cuda"
    shared_path = "cuda-ipc"
    #: Kernels that read a peer's memory would occupy SMs while they wait for the link.
    reads_in_place = False
    on_host = False
    pool_share = 0.12
    buffers = 2 * (STAGING_THREADS * STAGING_CHUNK_BYTES + FILE_BUFFERS * BOUNCE_BUFFER_BYTES)
    prioritised = True

    def __init__(self) -> None:
        self.index = runtime.getDevice()
        properties = runtime.getDeviceProperties(self.index)
        self.integrated, self.uuid = bool(properties["integrated"]), properties["uuid"].hex()
        self._streams = threading.local()
        self._guard: ResourceGuard | None = None
        self._staging = Staging(self._start, bounce_buffers(self, STAGING_CHUNK_BYTES))
        #: Such a GPU, like that of GH200, copies pageable memory as fast as pinned memory.
        shares = cudaDeviceAttr.cudaDevAttrPageableMemoryAccessUsesHostPageTables
        self._reads_pageable = bool(runtime.deviceGetAttribute(int(shares), self.index))

    def stream(self) -> tuple[Stream, Any]:
        """Return this thread's communication stream, for rmm and libcudf, and for cupy."""
        mine, first = self._streams, self.prioritised
        if not hasattr(mine, "pair"):
            with cupy.cuda.Device(self.index):
                stream = cupy.cuda.Stream(non_blocking=True, priority=self._priority(first))
            mine.pair, mine.first = (Stream(stream), stream), first
        pair: tuple[Stream, Any] = mine.pair
        if mine.first != first:
            # Change this stream rather than create another one, to keep its work in order.
            with cupy.cuda.Device(self.index):
                prioritise(pair[1], self._priority(first))
            mine.first = first
        return pair

    def _priority(self, first: bool) -> int:
        _, least, greatest = cudaDeviceGetStreamPriorityRange()
        return int(greatest if first else least)

    def beside(self) -> StreamBeside:
        mine = self._streams
        if not hasattr(mine, "beside"):
            with cupy.cuda.Device(self.index):
                mine.beside = StreamBeside()
        beside: StreamBeside = mine.beside
        beside.fork()
        return beside

    def after_compute(self) -> tuple[Stream, Any]:
        """Return the communication stream, ordered after all work submitted to the user's stream."""
        pair = self.stream()
        pair[1].wait_event(self.compute_event())
        return pair

    def compute_event(self) -> Any:
        """Return an event after all work submitted to the user's stream."""
        event = cupy.cuda.Event(block=True, disable_timing=True)
        runtime.eventRecord(event.ptr, DEFAULT_STREAM.__cuda_stream__()[1])
        return event

    def describe(self) -> dict[str, Any]:
        runtime.setDevice(self.index)
        properties = runtime.getDeviceProperties(self.index)
        free, total = self.memory()
        return {
            "kind": self.kind,
            "name": properties["name"].decode(),
            "uuid": self.uuid,
            "compute_capability": f"{properties['major']}.{properties['minor']}",
            "memory": total,
            "memory_free": free,
            "allocator": _allocator(rmm.mr.get_per_device_resource(self.index)),
        }

    def memory(self) -> tuple[int, int]:
        with cupy.cuda.Device(self.index):
            free, total = runtime.memGetInfo()
        if self.integrated:  # CUDA does not count reclaimable page cache
            free = min(max(free, psutil.virtual_memory().available), total)
        return int(free), int(total)

    def own_memory(self) -> int:
        return self.memory()[1]

    def holds(self, value: Any) -> bool:
        return lives_on_device(value)

    def pool_limits(self) -> PoolLimits:
        free, total = self.memory()
        own = self.own_memory()
        automatic = min(self.pool_share * own, AUTO_POOL_OF_FREE * free)
        return PoolLimits(own, automatic, free, free, total, "the device")

    def create_pool(self, nbytes: int) -> Pool:
        runtime.setDevice(self.index)
        return CudaPool(nbytes, self.uuid)

    def is_same(self, ticket: Ticket) -> bool:
        return bool(ticket["device"] == self.uuid)

    def map(self, ticket: Ticket) -> Mapping:
        if ticket["host"] != host_id():
            raise MappingError("on another host")
        if ticket["pid"] == os.getpid():
            raise MappingError("CUDA IPC does not work within one process")
        runtime.setDevice(self.index)
        try:
            return CudaMapping(ticket["handle"])
        except CUDARuntimeError as error:
            raise MappingError(f"CUDA IPC: {error}") from error

    def drop_pages(self) -> None:
        pass  # GPU memory is not part of the resident set

    def carried_by(self, protocol: str) -> bool:
        return protocol == "ucx"

    def for_comm(self, source: Buffer) -> Any:
        runtime.setDevice(self.index)
        memory = cupy.cuda.UnownedMemory(source.ptr, source.size, source)
        return cupy.ndarray(source.size, cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))

    def from_comm(self, sources: Sequence[Any]) -> list[Buffer]:
        return [DeviceSpan(source.data.ptr, source.nbytes, source) for source in map(cupy.asarray, sources)]

    def land(self, sources: Sequence[Buffer]) -> list[Buffer]:
        return self._copied([(source.ptr, source.size) for source in sources])

    def _copied(self, sources: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Copy sources, given by address and size, to new buffers in one allocation."""
        stream, raw = self.stream()
        buffers = cut([size for _, size in sources], stream)
        copy_async(
            [Copy(buffer.ptr, ptr, size) for (ptr, size), buffer in zip(sources, buffers, strict=True)],
            raw.ptr,
        )
        raw.synchronize()
        return list(buffers)

    def to_host(self, source: Buffer) -> memoryview:
        _, raw = self.stream()
        host = np.empty(source.size, np.uint8)
        runtime.memcpyAsync(host.ctypes.data, source.ptr, source.size, runtime.memcpyDefault, raw.ptr)
        raw.synchronize()
        return host.data

    def from_host(self, sources: Sequence[np.ndarray]) -> list[Buffer]:
        return self._copied([(source.ctypes.data, source.nbytes) for source in sources])

    def scatter(self, sources: Sequence[Buffer], into: Sequence[list[Any]], *, ordered: bool = True) -> Fence:
        self.stream()  # sets the current device of this thread
        after = self.compute_event() if ordered else None
        return self._move(runs(sources, into), after, to_host=True, keep=(sources, into))

    def gather(self, pieces: list[Any]) -> tuple[Buffer, Fence]:
        # The user's stream will read and free the buffer, so allocate it in the order of that stream.
        buffer = rmm.DeviceBuffer(size=sum(piece.nbytes for piece in pieces), stream=DEFAULT_STREAM)
        return buffer, self._filled([buffer], [pieces])

    def gather_all(self, scattered: Sequence[list[Any]]) -> tuple[list[Buffer], Fence]:
        buffers = cut([sum(piece.nbytes for piece in pieces) for pieces in scattered], DEFAULT_STREAM)
        return list(buffers), self._filled(buffers, scattered)

    def _filled(self, buffers: Sequence[Any], scattered: Sequence[list[Any]]) -> Fence:
        self.stream()  # sets the current device of this thread
        copies = fillings(buffers, scattered)
        return self._move(copies, self.compute_event(), to_host=False, keep=(buffers, scattered))

    def _move(self, copies: Sequence[Copy], after: Any, *, to_host: bool, keep: object) -> Fence:
        """Start copies between the device and host memory, behind an event unless it is None."""

        def order() -> None:
            if after is not None:
                self.stream()[1].wait_event(after)

        staged, others = self._divide(copies, to_host)
        order()
        _, raw = self.stream()
        copy_async(others, raw.ptr)
        if not staged:
            return behind(raw)
        stage = self._staging.to_host if to_host else self._staging.to_device
        fences = behind(raw), stage(staged, order, keep)
        return lambda: wait_for_all(fences)

    def _divide(self, copies: Sequence[Copy], to_host: bool) -> tuple[list[Copy], list[Copy]]:
        """Return the large copies from or to pageable memory, and the other ones."""
        if self._reads_pageable:
            return [], list(copies)
        staged: list[Copy] = []
        others: list[Copy] = []
        for copy in copies:
            large = copy.nbytes >= STAGED_FROM_BYTES
            (staged if large and is_pageable(copy.to if to_host else copy.at) else others).append(copy)
        return staged, others

    def _start(self, copy: Copy) -> Fence:
        _, raw = self.stream()
        copy_async([copy], raw.ptr)
        return behind(raw)

    def copy_in_order(self, copies: Sequence[Copy]) -> None:
        """Copy within the device, after all work submitted to the user's stream and before any later work."""
        _, raw = self.after_compute()
        copy_on_device(copies, raw)
        done = cupy.cuda.Event(disable_timing=True)
        done.record(raw)
        runtime.streamWaitEvent(DEFAULT_STREAM.__cuda_stream__()[1], done.ptr)

    def empty(self, sizes: Iterable[int]) -> list[Buffer]:
        """Allocate buffers that any stream or library may write immediately. Blocks."""
        runtime.setDevice(self.index)
        # Allocated on the user's stream as in `gather`, so wait for it: the writer is not ordered after it.
        buffers = [rmm.DeviceBuffer(size=size, stream=DEFAULT_STREAM) for size in sizes]
        self.compute_event().synchronize()
        return buffers

    def files(self, refused: Callable[[str], None]) -> DeviceFiles:
        from dask_gpurt.device.cuda_files import CudaFiles

        return CudaFiles(self, refused)

    def register(self, memory: np.ndarray) -> Callable[[], None]:
        runtime.setDevice(self.index)
        runtime.hostRegister(memory.ctypes.data, memory.nbytes, 0)
        return lambda: runtime.hostUnregister(memory.ctypes.data)

    def guard(self, short: Callable[[int], bool]) -> Guard:
        _start_spilling_of_cudf()
        self._guard = ResourceGuard(self.index, short)
        return self._guard

    def peak(self) -> int:
        return self._guard.peak() if self._guard is not None else 0

    def allocated(self) -> int:
        return self._guard.allocated() if self._guard is not None else 0

    def close(self) -> None:
        self._staging.close()


def _start_spilling_of_cudf() -> None:
    """Start cudf's own spilling first, if it is enabled, since it refuses to start after our callback."""
    if "cudf" in sys.modules or "CUDF_SPILL" in os.environ:
        from cudf.core.buffer.spill_manager import get_global_manager

        get_global_manager()


def _allocator(resource: Any) -> str:
    """Return the names of a memory resource and its upstream resources."""
    names = [type(resource).__name__]
    while (resource := getattr(resource, "upstream_mr", None)) is not None:
        names.append(type(resource).__name__)
    return " over ".join(names)


def prioritise(stream: Any, priority: int) -> None:
    """Change the priority of later work on a stream.

    Raises OSError if the driver does not support it, as before CUDA 11.7.
    """
    value = cudaStreamAttrValue()
    value.priority = priority
    (error,) = cudaStreamSetAttribute(stream.ptr, cudaStreamAttrID.cudaLaunchAttributePriority, value)
    if error != cudaError_t.cudaSuccess:
        raise OSError(f"cannot change the priority of a stream to {priority}: {error.name}")
