"""Share /dev/shm among the pools of all workers of a host.

A pool has a capacity, and allocates memory only as blocks need it. The pools of a host may have more capacity
together than the host has memory, since workers may join later. So a block may fit into its pool while the
system has no memory for it. Its producer then waits as if the pool were full. This cannot deadlock:

1. A waiting producer holds no unpublished block. The allocated memory of the pools of a host belongs to free
   blocks, to published blocks, and to blocks that other producers are packing, which publish them or wait
   next.
2. While a producer waits, there is a round twice a second: all workers of the host return the memory of free
   blocks, and ask the owners of all their published blocks to copy them. Owners need no pool for that, since
   the copies can go to disk. So published blocks become free, and the next round returns their memory. A
   worker that is stopped does not delay the others: each has a limited time to reply.
3. A waiting producer without published blocks needs no signal, since it retries each round.
4. Memory that other producers take in the meantime goes into blocks that are published in turn, and their
   number is bounded by the number of inputs. A run that fails, and a worker that dies, return all of theirs.

So as long as a worker of the host holds memory, the memory is returned, or its run fails and ends the wait.
Once no worker holds any, /dev/shm is filled by other programs, for which producers wait a limited time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from distributed.comm.addressing import get_address_host

from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.dask_hooks.worker import is_closing
from dask_gpurt.device.host import SHM, no_room
from dask_gpurt.device.pool import PoolFull, SharedMemoryFull
from dask_gpurt.observe import Fallback, Metrics

#: Seconds for which a producer waits while /dev/shm is full without any worker of this cluster using it.
FOREIGN_PATIENCE_S = 20.0
#: Seconds after which the result of the last round is stale.
ROUND_FORGOTTEN_S = 5.0
#: Blocks above this many bytes are halved before their task fails, since the halves may find room.
SMALLEST_BLOCK = 2**16


class HostFull(PoolFull):
    """The host has no memory for a block that its pool has room for, and waiting is futile.

    ``nbytes``: the requested size.
    ``advice``: the message.
    """

    def __init__(self, nbytes: int, advice: str):
        super().__init__(nbytes)
        self.args = (nbytes, advice)  # as unpickling calls it
        self.advice = advice

    def __str__(self) -> str:
        return self.advice


class HostRoom:
    """Ask the workers of a host to make room for a producer of this one.

    ``give_back``: returns the memory of free blocks of this worker's pool, and the bytes still in use.
    Blocks.
    ``drain``: asks the owners of this worker's published blocks to copy them; must not block.
    """

    def __init__(
        self,
        worker: WorkerServer,
        give_back: Callable[[], int],
        drain: Callable[[], None],
        metrics: Metrics,
        offload: Callable[..., Awaitable[Any]],
    ):
        self._worker = worker
        self._give_back = give_back
        self._drain = drain
        self._metrics = metrics
        self._offload = offload
        self._asking = False
        self._closed = False
        #: Time since which rounds have found no worker that uses memory, and time of the last round.
        self._foreign_since: float | None = None
        self._last_round = time.monotonic()

    def __repr__(self) -> str:
        since = self._foreign_since
        full = (
            "" if since is None else f", full of other programs' files for {time.monotonic() - since:.1f} s"
        )
        return f"<HostRoom, {'a round' if self._asking else 'no round'} for room in progress{full}>"

    def ask(self, nbytes: int) -> None:
        """Start a round for a block of this many bytes. From any thread; does not block.

        Raises HostFull if waiting is futile, but smaller blocks might fit.
        Raises SharedMemoryFull if waiting is futile and the block is small.
        """
        now = time.monotonic()
        if now - self._last_round > ROUND_FORGOTTEN_S:
            self._foreign_since = None
        # Start a round even if waiting is futile, so that this finding stays fresh. Otherwise every further
        # task, and every retry, would wait as long as the first.
        self._worker.loop.add_callback(self._round)
        if self._foreign_since is not None and now - self._foreign_since > FOREIGN_PATIENCE_S:
            if nbytes > SMALLEST_BLOCK:
                raise HostFull(nbytes, no_room(nbytes))
            raise SharedMemoryFull(no_room(nbytes))

    async def _round(self) -> None:
        if self._asking or self._closed:
            return
        self._asking = True
        self._metrics.fallback(Fallback.EXCHANGE_SHM_FULL, f"{SHM} is full")
        try:
            # If the scheduler is unreachable, the next round asks it, or this worker closes.
            with contextlib.suppress(OSError):
                host = get_address_host(self._worker.address)
                # A scheduler on which the runtime has been switched off replies None.
                self._note(await self._worker.scheduler.gpurt_host_room(host=host) or {})
        finally:
            self._asking = False

    def _note(self, held: Mapping[str, int | None]) -> None:
        """Record the bytes that the workers of this host still use, None for those that have not told."""
        now = time.monotonic()
        if self._worker.address not in held or any(nbytes != 0 for nbytes in held.values()):
            self._foreign_since = None
        elif self._foreign_since is None:
            self._foreign_since = now
        self._last_round = now

    def close(self) -> None:
        """Start no further rounds. From any thread."""
        self._closed = True

    async def make_room(self) -> int:
        """Handle a round of a worker of this host; return the bytes that this worker still uses."""
        if is_closing(self._worker):
            return 0
        self._drain()
        held: int = await self._offload(self._give_back)
        return held
