"""Send messages between scheduler and workers at once; Dask gathers them for milliseconds.

Between a task and the next one that depends on it there are two messages: the end of the first to the
scheduler, and the second task back. Dask sends at most one message in 2 ms to the scheduler and one in 5 ms
to each worker, so a task that takes less is followed by a gap of 5 ms. Messages that come while one is being
written still go together with the next: a busy scheduler gathers as before.

Sending a message takes Python's lock, which the next task needs at the same moment. So a worker that has
ready tasks gathers the ends of tasks as Dask does, until the last of them computes.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from dask_gpurt.dask_hooks.types import Stream

#: Seconds from one message on a stream to the next.
MESSAGE_INTERVAL_S = 0.0


class PromptStreams:
    """Send messages of streams without a pause between two of them. On the event loop."""

    def __init__(self) -> None:
        #: The interval that each stream had; streams of workers that have left go by themselves.
        self._before: WeakKeyDictionary[Stream, float] = WeakKeyDictionary()

    def add(self, stream: Stream) -> None:
        """Make a stream send at once from now on."""
        if stream not in self._before:
            self._before[stream] = stream.interval
            stream.interval = MESSAGE_INTERVAL_S

    def gather(self, stream: Stream, gathers: bool) -> None:
        """Make a stream gather messages for as long as Dask does, or send at once again."""
        ours = (MESSAGE_INTERVAL_S, before := self._before[stream])
        if stream.interval in ours:
            stream.interval = before if gathers else MESSAGE_INTERVAL_S

    def restore(self) -> None:
        """Restore the intervals of all streams, except those that others have changed since."""
        while self._before:
            stream, interval = self._before.popitem()
            if stream.interval == MESSAGE_INTERVAL_S:
                stream.interval = interval
