"""Keep pools of peers mapped while they are read, and close them afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dask_gpurt.device import Mapping
from dask_gpurt.device.pool import Buffer


class HeldMapping:
    """Keep a peer's pool mapped for as long as a shard in it is held. Thread-safe.

    When a peer leaves, its mapping is retired, possibly while a pull is in flight:

    - If shards hold the mapping when the event loop retires it, it is closed with the last ``let_go``.
    - If the mapping is not retired at the last ``let_go``, it stays open for the next shard.
    - If a late message offers a shard after the mapping was retired, ``hold`` fails and the shard is refused.

    Parameters
    ----------
    mapping
        The mapped pool.
    close_soon
        Closes the mapping in a thread, where that may block.
    """

    def __init__(self, mapping: Mapping, close_soon: Callable[[Callable[[], None]], None]):
        self._mapping = mapping
        self._close_soon = close_soon
        self._lock = threading.Lock()
        self._held = 0
        self._retired = False

    def view(self, offset: int, nbytes: int) -> Buffer:
        """Return a view of a part of the pool; valid while the mapping is held."""
        return self._mapping.view(offset, nbytes)

    def drop_pages(self, offset: int, nbytes: int) -> None:
        """Drop the pages of a part from the resident set of this process."""
        self._mapping.drop_pages(offset, nbytes)

    def hold(self) -> bool:
        """Keep the pool mapped until :meth:`let_go`; return False if the mapping is retired."""
        with self._lock:
            if self._retired:
                return False
            self._held += 1
            return True

    def let_go(self) -> None:
        """Undo one :meth:`hold`."""
        with self._lock:
            self._held -= 1
            last = self._retired and not self._held
        if last:
            self._close_soon(self._mapping.close)

    def retire(self) -> None:
        """Close the mapping once nothing holds it. Idempotent."""
        with self._lock:
            again, self._retired = self._retired, True
            unused = not again and not self._held
        if unused:
            self._close_soon(self._mapping.close)

    def close(self) -> None:
        """Retire the mapping; see :meth:`retire`."""
        self.retire()
