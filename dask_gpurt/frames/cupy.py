"""Pack the chunks of arrays in GPU memory.

Boxes are written on the communication stream, ordered after the user's work. New chunks are assembled on the
user's stream, since that is where their memory is used and freed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np

from dask_gpurt.device import Device
from dask_gpurt.device.copies import address
from dask_gpurt.device.cuda import CudaDevice
from dask_gpurt.device.pool import Buffer
from dask_gpurt.frames.boxes import Index
from dask_gpurt.frames.chunks import ChunkTable


class CupyChunks(ChunkTable):
    """Pack cupy arrays in the memory of one GPU."""

    name = "cupy"
    device: CudaDevice

    def __init__(self, device: Device):
        assert isinstance(device, CudaDevice)
        super().__init__(device)

    def is_plain(self, chunk: Any) -> bool:
        """Return whether a chunk is a plain cupy array."""
        return type(chunk) is cupy.ndarray and chunk.dtype.itemsize > 0

    def write(self, buffer: Buffer, starts: Sequence[int], boxes: Sequence[cupy.ndarray]) -> None:
        _, raw = self.device.after_compute()
        with raw:
            for start, box in zip(starts, boxes, strict=False):
                if box.size:
                    self.view(buffer, start, box.shape, box.dtype)[...] = box

    def settle(self) -> None:
        _, raw = self.device.stream()
        raw.synchronize()

    def view(self, buffer: Buffer, start: int, shape: Index, dtype: np.dtype[Any]) -> cupy.ndarray:
        memory = cupy.cuda.UnownedMemory(address(buffer), buffer.size, buffer, self.device.index)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, start))

    def empty(self, shape: Index, dtype: np.dtype[Any]) -> cupy.ndarray:
        return cupy.empty(shape, dtype)

    def fence(self) -> Callable[[], None]:
        wait: Callable[[], None] = self.device.compute_event().synchronize
        return wait
