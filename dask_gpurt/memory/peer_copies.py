"""Copy objects on a device for the peers that fetch them.

Dask sends each array of an object by itself, from where it is. UCX then maps the allocation that it is part
of in the process of the peer. For a pool that has most of a GPU this takes half a second, in which the event
loops of both workers wait, and the peer keeps the pool mapped: if its worker is killed, the one that replaces
it cannot allocate a pool. So objects are copied into a small allocation that serves only this, and sent from
there, to other workers each as one buffer. What does not fit there is copied into the pool of the exchange.

Decisions and their figures: ``docs/decisions/memory.md``.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from dask.typing import Key
from distributed.protocol.serialize import Serialized, deserialize

from dask_gpurt.device import Block, Device, DirectComms, Pool, PoolFull
from dask_gpurt.device.copies import DeviceSpan, address
from dask_gpurt.device.libraries import SERIALIZERS, deserializers, is_device_buffer
from dask_gpurt.device.pool import ALIGNMENT, Buffer
from dask_gpurt.memory.serialize import Frames, NotMovable, on_device, to_frames
from dask_gpurt.observe import Fallback, Metrics

#: The most bytes of the memory for copies: ten messages of Dask's ``worker.transfer.message-bytes-limit``.
COPIES_BYTES = 512 << 20
#: The most of this memory as a part of what objects may take on the device.
COPIES_OF_LIMIT = 0.01
#: Seconds for which a copy is kept if its connection failed, since the peer may still be reading it. Shorter
#: than the wait for users of the exchange's pool when the runtime is switched off.
KEPT_AFTER_FAILURE_S = 3.0


@dataclass(frozen=True)
class Loan:
    """Hold a block of a pool until it is given back."""

    block: Block
    pool: Pool
    give_back: Callable[[], None]


#: The copies of objects, by key: the block of each, and the message that refers to it.
Copies = dict[Key, tuple[Loan, Serialized]]


class OneBuffer:
    """Stand for an object whose device buffers are sent as one, in headers of Dask's serializer for devices.

    There are no instances. A peer that unpickles this type imports this module, and so can read the object.
    """


class PeerCopies:
    """Copy objects on a device into blocks of one allocation, which is made for the first of them.

    ``limit``: the bytes that objects may take on the device.
    ``lend``: lends a block of another pool, for objects that do not fit. Blocks; raises PoolFull if it has no
    room.
    """

    def __init__(self, device: Device, limit: int, lend: Callable[[int], Loan], metrics: Metrics):
        self._device = device
        self._lend = lend
        self._metrics = metrics
        #: The bytes of that allocation; 0 once it could not be made.
        self.nbytes = min(COPIES_BYTES, int(limit * COPIES_OF_LIMIT))
        self._pool: Pool | None = None
        self._lock = threading.Lock()
        self._closed = False
        # Not a thread of the tiers: these may be spilling for seconds.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="gpurt-peer-copies")

    async def messages(self, objects: Mapping[Key, Any], sending: ExitStack) -> dict[Key, Serialized]:
        """Return Dask messages of objects, which are valid until ``sending`` is closed on the event loop.

        Objects that do not fit, or cannot be taken apart, are left out.
        """
        if self._closed or not objects:
            return {}
        copying = self._executor.submit(self._copies, objects)
        sending.push(partial(self._sent, copying))  # before waiting, which may be cancelled
        copied = await asyncio.wrap_future(copying)
        return {key: message for key, (_, message) in copied.items()}

    def _copies(self, objects: Mapping[Key, Any]) -> Copies:
        found: Copies = {}
        with ExitStack() as failing:
            for key, value in objects.items():
                try:
                    frames = to_frames(value)
                except NotMovable:
                    continue  # Dask sends the object in its own way, or fails with its own message
                if any(map(on_device, frames.buffers)) and (copy := self._copy(frames)) is not None:
                    found[key] = copy
                    failing.callback(copy[0].give_back)
            failing.pop_all()
        return found

    def _copy(self, frames: Frames) -> tuple[Loan, Serialized] | None:
        there = [buffer[0] for buffer in frames.buffers if on_device(buffer)]
        sizes = [buffer.nbytes for buffer in there]
        starts = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
        if not starts[-1] or (loan := self._room(starts[-1])) is None:
            return None
        with ExitStack() as failing:
            failing.callback(loan.give_back)
            spans = list(zip(starts, sizes, strict=False))
            into = [[loan.pool.view(loan.block.offset + start, size)] for start, size in spans]
            self._device.scatter(there, into)()
            message = self._message(frames, loan.block, spans)
            failing.pop_all()
        self._metrics.add("memory.peer-copies.bytes", loan.block.nbytes)
        return loan, message

    def _message(self, frames: Frames, block: Block, spans: Sequence[tuple[int, int]]) -> Serialized:
        on_host = [buffer[0].data for buffer in frames.buffers if not on_device(buffer)]
        assert isinstance(self._device, DirectComms)  # otherwise Dask does not send from the device's memory
        buffers = [self._device.for_comm(block.buffer), *on_host]
        header = {
            "sub-header": {"object": frames.header, "spans": spans},
            "type-serialized": pickle.dumps(OneBuffer),
            "serializer": SERIALIZERS[0],
            "compression": (False,) * len(buffers),  # neither compressed nor divided
        }
        return Serialized(header, buffers)

    # ---- room ------------------------------------------------------------------------

    def _room(self, nbytes: int) -> Loan | None:
        """Return a block for a copy; None if there is no room."""
        for lend in (self._lend_own, self._lend):
            try:
                return lend(nbytes)
            except PoolFull:
                continue
        self._metrics.add("memory.peer-copies.full")
        return None

    def _lend_own(self, nbytes: int) -> Loan:
        with self._lock:
            if self._closed or nbytes > self.nbytes:
                raise PoolFull(nbytes)
            if self._pool is None:
                try:
                    self._pool = self._device.create_pool(self.nbytes)
                except Exception as error:  # the device's own: it has no memory left
                    self._metrics.fallback(Fallback.MEMORY_NO_PEER_COPIES, repr(error))
                    self.nbytes = 0
                    raise PoolFull(nbytes) from error
            block = self._pool.allocate(nbytes)
            return Loan(block, self._pool, partial(self._free, block))

    def _free(self, block: Block) -> None:
        with self._lock:
            assert self._pool is not None
            self._pool.free(block)
            self._end_if_unused()

    def _sent(self, copying: Future[Copies], failure: type[BaseException] | None = None, *_: object) -> None:
        """Free copies once they are sent, and some time after a failure. On the event loop.

        UCX ends a send once the peer has read the memory. If the connection fails, the peer may still read::

            This worker                                Peer
                                                       starts to copy a block
            the connection fails, the send ends
            sends another object from that memory
                                                       ends the copy, with bytes of the other object
        """
        if failure is None:
            _give_back(copying)
        else:
            asyncio.get_running_loop().call_later(KEPT_AFTER_FAILURE_S, copying.add_done_callback, _give_back)

    def close(self) -> None:
        """Copy no more objects, and free the memory once nothing is sent from it. On the event loop."""
        with self._lock:
            self._closed = True
            self._end_if_unused()

    def _end_if_unused(self) -> None:
        if not self._closed or (self._pool is not None and self._pool.used):
            return
        if self._pool is not None:
            self._executor.submit(self._pool.close)  # may wait for the device, so not on the event loop
            self._pool = None
        self._executor.shutdown(wait=False)


def _give_back(copying: Future[Copies]) -> None:
    if not copying.cancelled() and copying.exception() is None:
        for loan, _ in copying.result().values():
            loan.give_back()


def _read(header: Mapping[str, Any], frames: Sequence[Any]) -> Any:
    """Deserialise an object whose device buffers are parts of the first frame."""
    whole, *others = frames
    _, body, flags = pickle.loads(header["object"])
    on_host, spans = iter(others), iter(header["spans"])
    return deserialize(body, [_part(whole, *next(spans)) if there else next(on_host) for there in flags])


deserializers.register(OneBuffer)(_read)


def _part(whole: Any, start: int, size: int) -> Buffer:
    if not is_device_buffer(whole):
        return memoryview(whole)[start : start + size]
    return DeviceSpan(address(whole) + start, size, whole)
