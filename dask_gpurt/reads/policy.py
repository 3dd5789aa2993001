"""Decide which tasks of a worker leave their slot to another one while they read. Pure."""

from __future__ import annotations

from dask.typing import Key


class ReadsAside:
    """Keep which tasks have left their slot, so that another one has begun in it. Not thread-safe.

    A task counts from when it leaves its slot until it ends, and not only while it reads: until then its
    frame takes memory. So a worker has at most as many tasks begun as it has threads, and ``limit`` more. In
    the long run one task reads while another one, whose read is done, computes::

        A reads, and leaves its slot; B begins, and reads: the limit is reached, so that B keeps its slot
        A computes, and ends; B is the oldest that has read, and leaves its slot, whether it reads or computes
        C begins, and reads, while B computes

    Parameters
    ----------
    limit
        The most tasks that are begun beyond the slots of the worker. Where it is made smaller, those that are
        aside stay so.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._aside: set[Key] = set()
        #: Those that have a slot, and have begun to read, oldest first.
        self._keeping: dict[Key, None] = {}

    def __contains__(self, key: Key) -> bool:
        """Return whether a task has left its slot, and has not ended."""
        return key in self._aside

    def begin_read(self, key: Key) -> Key | None:
        """Note that a task begins to read; return the task that is to leave its slot, if any."""
        if key not in self._aside:
            self._keeping[key] = None
        return self.next()

    def end(self, key: Key) -> Key | None:
        """Note that a task has ended, or has no slot; return the task that is to leave its own, if any."""
        self._aside.discard(key)
        self._keeping.pop(key, None)
        return self.next()

    def next(self) -> Key | None:
        """Return a task that is to leave its slot now, if any; it counts as aside."""
        if not self._keeping or len(self._aside) >= self.limit:
            return None
        key = next(iter(self._keeping))
        del self._keeping[key]
        self._aside.add(key)
        return key
