"""Hold mapped pools of peers, and close them once nothing is read from them any more."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dask_gpurt.device import Mapping
from dask_gpurt.device.base import Buffer


class HeldMapping:
    """Keep a peer's pool mapped for as long as a shard in it is held. Thread-safe.

    A peer that leaves retires its mapping while a pull may still be under way:

    - the event loop retires it, and something is held: it is closed as the last shard is let go;
    - the last shard is let go, and the mapping is not retired: it stays for the next one;
    - a shard is offered after that, by a message that was late: it cannot be held, and is refused.

    Parameters
    ----------
    mapping
        The mapped pool.
    close_soon
        Has it closed on a thread where that may block.
    """

    def __init__(self, mapping: Mapping, close_soon: Callable[[Callable[[], None]], None]):
        self._mapping = mapping
        self._close_soon = close_soon
        self._lock = threading.Lock()
        self._held = 0
        self._retired = False

    def view(self, offset: int, nbytes: int) -> Buffer:
        """View a part of the pool, while it is held."""
        return self._mapping.view(offset, nbytes)

    def drop_pages(self, offset: int, nbytes: int) -> None:
        """Stop counting a part that was read as memory of this process."""
        self._mapping.drop_pages(offset, nbytes)

    def hold(self) -> bool:
        """Keep it mapped until :meth:`let_go`; False when it is retired."""
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
        """Close the mapping once nothing holds it; a second call does nothing."""
        with self._lock:
            again, self._retired = self._retired, True
            unused = not again and not self._held
        if unused:
            self._close_soon(self._mapping.close)

    def close(self) -> None:
        """See :meth:`retire`."""
        self.retire()
