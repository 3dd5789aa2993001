"""Provide the memory of frames that a library reads on a stream of its own, beside the user's stream.

While a read runs, libcudf frees what it no longer needs in the order of the stream that still uses it. Once
the read has ended and its stream was waited for, only the user's stream uses what is left. In rmm, a buffer
would be freed in the order of the stream that has allocated it::

    A reads a frame on a stream of its own, and uses it in a kernel on the user's stream
    A drops the frame while the kernel runs, so that its memory is free for A's own stream
    B reads into the same memory, which the kernel of A still uses

So this memory resource frees each allocation in the order of the stream that uses it last.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import rmm
from rmm.pylibrmm.stream import DEFAULT_STREAM, Stream


class _Read:
    """One read; ``has_ended`` once its stream has been waited for."""

    has_ended = False


class _Thread(threading.local):
    """Hold the read that the current thread runs."""

    read: _Read | None = None


class ReadMemory:
    """Allocate from the current resource of the device, and free in the order of the stream used last.

    Thread-safe. Use :data:`READ_MEMORY`: an instance is never destroyed. rmm calls its methods through
    pointers that own nothing, and if it was part of cyclic garbage together with a frame, the collector could
    destroy it before the frame.

    Attributes
    ----------
    resource
        The memory resource, for libraries.
    """

    def __init__(self) -> None:
        self._users = DEFAULT_STREAM
        self._thread = _Thread()
        #: For each allocation the resource below, and the read that has made it.
        self._allocations: dict[int, tuple[Any, _Read | None]] = {}
        self._calls = self._allocate, self._free
        self.resource: Any = rmm.mr.CallbackMemoryResource(*self._calls)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    @contextmanager
    def reading(self, wait: Callable[[], None]) -> Iterator[Any]:
        """Serve the allocations of a read of this thread in the body, then ``wait`` for its stream."""
        read = self._thread.read = _Read()
        try:
            yield self.resource
        finally:
            self._thread.read = None
            wait()
            read.has_ended = True

    # Called by rmm, in any thread. Single operations on the dict need no lock.

    def _allocate(self, nbytes: int, stream: Stream) -> int:
        below = rmm.mr.get_current_device_resource()
        pointer = int(below.allocate(nbytes, stream))
        if pointer:  # without bytes there may be none
            self._allocations[pointer] = below, self._thread.read
        return pointer

    def _free(self, pointer: int, nbytes: int, stream: Stream) -> None:
        if (found := self._allocations.pop(pointer, None)) is None:  # it has no bytes
            return
        below, read = found
        if read is None:  # allocated by a thread of the library: nothing tells whether its read has ended
            stream.synchronize()
        below.deallocate(pointer, nbytes, self._users if read is None or read.has_ended else stream)


#: Serves all reads of this process.
READ_MEMORY = ReadMemory()
