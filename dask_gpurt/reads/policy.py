"""Decide which tasks of a worker leave their slot, so that the next ones start and read ahead. Pure."""

from __future__ import annotations

from dask.typing import Key


class ReadsAside:
    """Track the tasks that have left their slot, in which other tasks have started. Not thread-safe.

    A task may leave its slot from when it reads, waits for its turn (:mod:`dask_gpurt.reads.turns`), or
    writes. It counts from when it leaves its slot until it ends, since its frame takes memory even after the
    read. So a worker has at most ``limit`` more tasks started than threads. In a steady state, one task reads
    while another one, whose read is done, computes::

        A reads, and leaves its slot. B starts, and reads; the limit is reached, so B keeps its slot
        A computes, and ends. B is now the oldest candidate, and leaves its slot, whether it reads or computes
        C starts, and reads, while B computes

    Parameters
    ----------
    limit
        The most tasks started beyond the slots of the worker. Lowering it does not affect tasks that have
        already left their slot.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._aside: set[Key] = set()
        #: Tasks with a slot that may leave it, oldest first.
        self._keeping: dict[Key, None] = {}

    def __contains__(self, key: Key) -> bool:
        """Return whether a task has left its slot and has not ended."""
        return key in self._aside

    @property
    def count(self) -> int:
        """Return the number of tasks that have left their slot and have not ended."""
        return len(self._aside)

    def add(self, key: Key) -> Key | None:
        """Note that a task may leave its slot; return the task that should leave its slot, if any."""
        if key not in self._aside:
            self._keeping[key] = None
        return self.next()

    def end(self, key: Key) -> Key | None:
        """Note that a task has ended or has no slot; return the task that should leave its slot, if any."""
        self._aside.discard(key)
        self._keeping.pop(key, None)
        return self.next()

    def next(self) -> Key | None:
        """Return the task that should leave its slot now, if any; from here on it counts as such."""
        if not self._keeping or len(self._aside) >= self.limit:
            return None
        key = next(iter(self._keeping))
        del self._keeping[key]
        self._aside.add(key)
        return key
