"""Count those who use the memory of the pools, so that it is freed only after them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dask_gpurt.exchange.shard import ExchangeClosed


class PoolUsers:
    """Admit users of the pools until they are closed. Thread-safe.

    Closing frees the memory of a GPU's pool, which users may be reading or writing::

        Thread 1, a task: packs into a block      Thread 2: the runtime is switched off, and the pool is freed
        its next kernel writes into memory that
        is not allocated: CUDA fails all further
        calls of this process

    Parameters
    ----------
    worker
        The address of this worker, for messages.
    """

    def __init__(self, worker: str):
        self._worker = worker
        self._closed = False
        self._count = 0
        self._left = threading.Condition()

    @contextmanager
    def using(self) -> Iterator[None]:
        """Keep the pools during the body.

        Raises
        ------
        ExchangeClosed
            If they are being closed.
        """
        with self._left:
            if self._closed:
                raise ExchangeClosed(f"the exchange of {self._worker} is closed")
            self._count += 1
        try:
            yield
        finally:
            with self._left:
                self._count -= 1
                self._left.notify_all()

    def close(self) -> None:
        """Admit no further users."""
        with self._left:
            self._closed = True

    def wait(self, timeout_s: float) -> bool:
        """Wait until there are no users; return False after this time. Blocks."""
        with self._left:
            return self._left.wait_for(lambda: not self._count, timeout_s)
