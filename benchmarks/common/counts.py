"""Count messages and iterations of the event loop in a process that runs a whole cluster.

The counts live in a module of their own: functions of a benchmark's ``__main__`` are pickled with copies of
their globals when they are sent to workers.
"""

from __future__ import annotations

from asyncio.selector_events import BaseSelectorEventLoop
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distributed.comm.tcp import TCP

_counts = Counter[str]()


def messages() -> int:
    """Return the number of messages written to TCP connections."""
    return _counts["messages"]


def turns() -> int:
    """Return the number of iterations of event loops."""
    return _counts["turns"]


@contextmanager
def counting() -> Iterator[None]:
    """Count messages and iterations until the end of the block."""
    loop: Any = BaseSelectorEventLoop
    write: Any = TCP.write
    turn = loop._run_once

    async def counted_write(self: Any, *args: Any, **kwargs: Any) -> Any:
        _counts["messages"] += 1
        return await write(self, *args, **kwargs)

    def counted_turn(self: Any) -> None:
        _counts["turns"] += 1
        turn(self)

    TCP.write, loop._run_once = counted_write, counted_turn  # type: ignore[method-assign]
    try:
        yield
    finally:
        TCP.write, loop._run_once = write, turn  # type: ignore[method-assign]
