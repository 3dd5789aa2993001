"""Send messages between scheduler and workers without the batching interval of Dask's batched streams.

Two messages are on the critical path between a task and its dependent: the end of the task to the scheduler,
and the dependent to a worker. Dask sends a batch every 2 ms to the scheduler and every 5 ms to each worker,
so a shorter task is followed by a gap of 5 ms. Messages that arrive while a batch is being written still
share the next batch, so a busy scheduler batches as before.

Sending needs the GIL, which the next task needs at the same moment. So a worker with ready tasks batches the
ends of tasks as Dask does, until its last task runs.

Decisions and their figures: ``docs/decisions/overlap.md``.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from dask_gpurt.dask_hooks.types import Stream

#: The batching interval, in seconds.
MESSAGE_INTERVAL_S = 0.0


class PromptStreams:
    """Switch off the batching interval of streams. On the event loop."""

    def __init__(self) -> None:
        #: The original interval of each stream, weakly, since streams end with their workers.
        self._before: WeakKeyDictionary[Stream, float] = WeakKeyDictionary()

    def add(self, stream: Stream) -> None:
        """Have a stream send messages immediately."""
        if stream not in self._before:
            self._before[stream] = stream.interval
            stream.interval = MESSAGE_INTERVAL_S

    def gather(self, stream: Stream, gathers: bool) -> None:
        """Have a stream batch messages with Dask's interval, or send them immediately again."""
        ours = (MESSAGE_INTERVAL_S, before := self._before[stream])
        if stream.interval in ours:
            stream.interval = before if gathers else MESSAGE_INTERVAL_S

    def restore(self) -> None:
        """Restore the intervals of all streams, except those that other code has changed since."""
        while self._before:
            stream, interval = self._before.popitem()
            if stream.interval == MESSAGE_INTERVAL_S:
                stream.interval = interval
