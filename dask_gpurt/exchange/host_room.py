"""Share /dev/shm among the pools of all workers of a host.

A pool promises its capacity and takes memory as blocks need it. The pools of a host may promise more together
than the host has, and workers join later. So a block may fit into its pool while the system has no memory for
it. Its producer then waits as it does when its own pool is full. This cannot deadlock:

1. A producer that waits holds no unpublished block. The memory that the pools of a host have taken belongs to
   free blocks, to published ones, and to blocks that are being packed by producers that do not wait: these
   publish them, or wait, next.
2. Each round, twice a second for as long as a producer waits, all workers of the host return the memory of
   free blocks, and ask the owners of all their published blocks to copy them. Owners need no pool for that:
   their copies can go to disk. So published blocks become free, and their memory is returned by the next
   round.
3. A producer that waits with nothing published needs no signal: it tries again each round.
4. Memory that other producers take meanwhile goes into blocks that are published in turn, and there
   are only as many of these as there are inputs. A run that fails, and a worker that dies, give back all that
   they had.

So as long as a worker of the host holds memory, it is returned or its run fails, which ends the waiting too.
Once no worker holds any, other programs fill /dev/shm: that is waited for only for a limited time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

from distributed.comm.addressing import get_address_host

from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.dask_hooks.worker import is_closing
from dask_gpurt.device.base import PoolFull
from dask_gpurt.device.host import SHM, no_room
from dask_gpurt.observe import Fallback, Metrics

#: Seconds for which a producer waits for memory of /dev/shm that no worker of this cluster holds.
FOREIGN_PATIENCE_S = 20.0
#: Seconds without a round after which what the last one found says nothing about now.
ROUND_FORGOTTEN_S = 5.0
#: Bytes of a block from which on it is cut in halves, which may find room, before its task fails.
SMALLEST_BLOCK = 2**16


class HostRoom:
    """Ask the workers of a host to make room for a producer of this one.

    Parameters
    ----------
    worker
        The Dask worker.
    give_back
        Gives back what is behind free blocks of this worker's pool; returns the bytes it still holds. Blocks.
    drain
        Asks the owners of what this worker has published to copy it; must not block.
    offload
        Runs what blocks on a thread.
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
        #: When a round first found that no worker holds anything, and when the last round was.
        self._foreign_since: float | None = None
        self._last_round = time.monotonic()

    def ask(self, nbytes: int) -> None:
        """Begin a round, for a block of this many bytes. From any thread; does not block.

        Raises
        ------
        PoolFull
            When waiting is in vain, but smaller blocks might fit.
        MemoryError
            When it is in vain for small ones too.
        """
        now = time.monotonic()
        if now - self._last_round > ROUND_FORGOTTEN_S:
            self._foreign_since = None
        # Also where waiting is in vain, so that those who come next know it. Else each of many tasks,
        # whenever it is tried again, would wait as long as the first.
        self._worker.loop.add_callback(self._round)
        if self._foreign_since is not None and now - self._foreign_since > FOREIGN_PATIENCE_S:
            if nbytes > SMALLEST_BLOCK:
                raise PoolFull(nbytes)
            raise MemoryError(no_room(nbytes))

    async def _round(self) -> None:
        if self._asking:
            return
        self._asking = True
        self._metrics.fallback(Fallback.EXCHANGE_SHM_FULL, f"{SHM} is full")
        try:
            # A scheduler that is out of reach is asked by the next round, or this worker ends.
            with contextlib.suppress(OSError):
                self._note(await self._held())
        finally:
            self._asking = False

    async def _held(self) -> dict[str, Any]:
        """Return the bytes that each worker of this host holds after it has given back what it could."""
        replies: dict[str, Any] = await self._worker.scheduler.broadcast(
            msg={"op": "gpurt_make_room"},
            hosts=[get_address_host(self._worker.address)],
            on_error="return_pickle",
        )
        return replies

    def _note(self, held: dict[str, Any]) -> None:
        """Note the result of a round."""
        # A worker on which the runtime is off replies None; one that could not be asked, which may hold
        # something, has an error here.
        now = time.monotonic()
        if self._worker.address not in held or any(held.values()):
            self._foreign_since = None
        elif self._foreign_since is None:
            self._foreign_since = now
        self._last_round = now

    async def make_room(self) -> int:
        """Handle a worker of this host that waits for room; returns the bytes that this one still holds."""
        if is_closing(self._worker):
            return 0
        self._drain()
        held: int = await self._offload(self._give_back)
        return held
