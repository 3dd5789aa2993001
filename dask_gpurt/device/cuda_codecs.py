"""Compress on a GPU with nvCOMP, which is fast enough for links on which CPU codecs do not pay off."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import cupy
import numpy as np
import nvidia
import rmm
from nvidia import nvcomp
from nvidia.nvcomp.external_memory import ExternalMemory
from rmm.pylibrmm.stream import Stream

from dask_gpurt.device.base import Codec, CodecError
from dask_gpurt.device.codecs import check
from dask_gpurt.device.copies import Copy
from dask_gpurt.device.cuda_memory import CudaStreams, DeviceSpan, copy_async, cut
from dask_gpurt.device.pool import Buffer

# Importing nvcomp removes `nvidia.libnvcomp`, which libcudf needs if it is imported later: restore it.
if "nvidia.libnvcomp" in sys.modules:
    vars(nvidia).setdefault("libnvcomp", sys.modules["nvidia.libnvcomp"])

#: nvCOMP's algorithms by the names of our codecs: a fast one, and one with a better ratio.
ALGORITHMS = {"nvcomp-lz4": "LZ4", "nvcomp-zstd": "Zstd"}
#: Bandwidth of a link from which on they do not pay off.
MAX_LINK_BYTES_PER_S = 20e9
#: Streams that nvCOMP works on, by address. Its allocations are freed on one of them.
_STREAMS: dict[int, Stream] = {}
_USED: WeakSet[CudaCodec] = WeakSet()


class CudaCodec:
    """Compress with an algorithm of nvCOMP, on the communication stream of the calling thread.

    Parameters
    ----------
    name
        A key of ``ALGORITHMS``.
    """

    on_host = False
    fast = MAX_LINK_BYTES_PER_S

    def __init__(self, name: str, device: CudaStreams):
        self.name = name
        # A proxy, because if both became garbage together, the codec could be destroyed after the streams on
        # which it frees memory.
        self._device = weakref.proxy(device)
        #: nvCOMP's codecs, which are not thread-safe, by the address of a thread's stream.
        self._codecs: dict[int, Any] = {}
        _USED.add(self)

    def whole(self, sections: Sequence[Buffer]) -> Buffer:
        if len(sections) == 1:
            return sections[0]
        with self._working() as stream:
            buffers, whole = self._room_for([section.size for section in sections])
            copies = zip(buffers, sections, strict=True)
            copy_async([Copy(into.ptr, section.ptr, section.size) for into, section in copies], stream.ptr)
            return whole

    def part(self, whole: Buffer) -> Buffer:
        return whole  # takes only milliseconds

    def compress(self, whole: Buffer) -> Buffer:
        with self._working() as stream:
            packed = self._codec(stream).encode(self._array(whole, stream))
            stream.synchronize()
            return DeviceSpan(packed.__cuda_array_interface__["data"][0], packed.buffer_size, packed)

    def decompress(self, packed: Any, sizes: Sequence[int]) -> list[Buffer]:
        with self._working() as stream:
            if not hasattr(packed, "__cuda_array_interface__"):
                [packed] = self._device.from_host([np.frombuffer(packed, np.uint8)])
            buffers, whole = self._room_for(sizes)
            # Pass the output as an nvCOMP array, since other types crash nvCOMP.
            into = self._array(whole, stream)
            restored = self._codec(stream).decode(self._array(packed, stream), out=into)
            stream.synchronize()
            check(self.name, restored.buffer_size, whole.nbytes)
            return buffers

    def _room_for(self, sizes: Sequence[int]) -> tuple[list[Buffer], Buffer]:
        """Allocate buffers of these sizes; return them, and a span over all of them."""
        buffers = cut(sizes, self._device.stream()[0])
        first, last = buffers[0], buffers[-1]
        return list(buffers), DeviceSpan(first.ptr, last.ptr + last.size - first.ptr, first.owner)

    def _array(self, buffer: Buffer, stream: Any) -> Any:
        return nvcomp.as_array(buffer, cuda_stream=stream.ptr)

    def _codec(self, stream: Any) -> Any:
        if stream.ptr not in self._codecs:
            self._codecs[stream.ptr] = nvcomp.Codec(
                algorithm=ALGORITHMS[self.name], device_id=self._device.index, cuda_stream=stream.ptr
            )
        return self._codecs[stream.ptr]

    def close(self) -> None:
        """Free the memory of nvCOMP's codecs."""
        self._codecs.clear()

    @contextmanager
    def _working(self) -> Iterator[Any]:
        """Use this thread's communication stream, and convert errors to CodecError."""
        cupy.cuda.Device(self._device.index).use()
        ours, stream = self._device.stream()
        _STREAMS.setdefault(stream.ptr, ours)
        try:
            yield stream
        except (MemoryError, RuntimeError) as error:
            raise CodecError(f"{self.name}: {error}") from error


def codecs(device: CudaStreams) -> dict[str, Codec]:
    """Return the codecs of a GPU, by name, and make nvCOMP allocate from the user's rmm resource."""
    nvcomp.set_device_allocator(_allocate)
    return {name: CudaCodec(name, device) for name in ALGORITHMS}


@atexit.register
def _close() -> None:
    """Release all memory of nvCOMP, which would otherwise use its allocator after Python has exited."""
    for codec in list(_USED):
        codec.close()
    nvcomp.set_device_allocator(None)


def _allocate(nbytes: int, stream: Any) -> Any:
    ours = _STREAMS.get(stream.ptr) or Stream(cupy.cuda.ExternalStream(stream.ptr))
    return ExternalMemory(rmm.DeviceBuffer(size=nbytes, stream=ours), stream)
