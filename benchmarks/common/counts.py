"""Count the messages and the rounds of the event loop in a process that has a whole cluster in it.

The counts are kept here, and not where they are read: what a benchmark sends to workers is pickled with
copies of its own globals.
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
    """Return how many messages have been written to connections over tcp."""
    return _counts["messages"]


def turns() -> int:
    """Return how many rounds event loops have made."""
    return _counts["turns"]


@contextmanager
def counting() -> Iterator[None]:
    """Count messages and rounds from here to the end of the block."""
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
