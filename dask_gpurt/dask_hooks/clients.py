"""Notice that a client has connected to its scheduler again."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

from distributed import Client

from dask_gpurt.dask_hooks.comparison import differences
from dask_gpurt.dask_hooks.seams import RECONNECTING

#: Keeps the tasks alive that this module starts.
_tasks: set[asyncio.Task[None]] = set()


def after_reconnecting(client: Client, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Have a function called each time that a client has lost its scheduler and connected again.

    The scheduler may be another one, and Dask does not subscribe to topics again.
    """
    if differences(RECONNECTING.seams):
        return
    original, of = type(client)._reconnect, weakref.ref(client)

    async def reconnect() -> None:
        if (client := of()) is not None:
            await original(client)
            if client.status == "running":  # it is closed if no scheduler came back
                task = asyncio.create_task(begin())
                _tasks.add(task)
                task.add_done_callback(_tasks.discard)

    vars(client)["_reconnect"] = reconnect  # of this client only
