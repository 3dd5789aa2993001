"""Ask workers from the scheduler, each for itself and for a limited time, so that none delays the others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from dask_gpurt.dask_hooks.types import SchedulerServer
from dask_gpurt.protocol import MAKE_ROOM_HANDLER

#: Seconds for which a round for room waits for each worker; the next round follows twice a second.
ROOM_TIMEOUT_S = 2.0


async def ask(scheduler: SchedulerServer, worker: str, op: str, timeout_s: float, **message: Any) -> Any:
    """Call a handler of a worker; return its reply, or the error if it fails or takes too long."""
    try:
        async with asyncio.timeout(timeout_s):
            return await getattr(scheduler.rpc(worker), op)(**message)
    except TimeoutError:
        return TimeoutError(f"no answer within {timeout_s:g} s")
    except Exception as error:  # whatever the handler raises on the worker, too
        return error


async def ask_all(
    scheduler: SchedulerServer, workers: Iterable[str], op: str, timeout_s: float, **message: Any
) -> dict[str, Any]:
    """Call a handler of several workers, and return for each what :func:`ask` does."""
    workers = list(workers)
    replies = await asyncio.gather(*(ask(scheduler, each, op, timeout_s, **message) for each in workers))
    return dict(zip(workers, replies, strict=True))


async def make_room(scheduler: SchedulerServer, host: str) -> dict[str, int | None]:
    """Make the workers of a host return memory behind their pools.

    Returns the bytes that each worker still uses; None if it does not tell in time.
    """
    workers = [worker for worker, state in scheduler.workers.items() if state.host == host]
    replies = await ask_all(scheduler, workers, MAKE_ROOM_HANDLER, ROOM_TIMEOUT_S)
    # Without the runtime a worker has no such handler. Dask then replies None, and it has no pool.
    return {worker: None if isinstance(reply, Exception) else reply or 0 for worker, reply in replies.items()}
