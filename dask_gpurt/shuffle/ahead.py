"""Sections that the next unpack task will read, brought up while this one computes.

The link to the lower tiers is idle while a task computes, and the task that reads next waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import ExitStack, contextmanager, suppress

from dask_gpurt.exchange import Exchange
from dask_gpurt.exchange.inbox import LOOK_AGAIN, Parcel
from dask_gpurt.exchange.landing import Found
from dask_gpurt.memory.tiers import NoRoom

#: What was found, and what lets it go.
_Read = tuple[Found, ExitStack]


class ReadAhead:
    """What is read ahead of an output of one run, of one at a time. Thread-safe."""

    def __init__(self, exchange: Exchange):
        self._exchange = exchange
        self._lock = threading.Lock()
        self._output: int | None = None
        self._reading: Future[_Read] | None = None
        self._closed = False

    def begin(self, output: int, sections: Callable[[], Sequence[tuple[Parcel, int]]]) -> None:
        """Begin to read an output in the place of the one before. Does not block.

        Parameters
        ----------
        sections
            Its sections, of which those that have landed below the live tiers are read. Called on a thread.
        """
        with self._lock:
            if self._closed or output == self._output:
                return
            before, self._output, self._reading = self._reading, output, None
            with suppress(RuntimeError):  # the exchange closes at this moment
                self._reading = self._exchange.executor.submit(self._read, sections, before)

    def _read(
        self, sections: Callable[[], Sequence[tuple[Parcel, int]]], before: Future[_Read] | None
    ) -> _Read:
        if before is not None:
            before.add_done_callback(_let_go)
        read = sections()
        lower = self._exchange.landing.lower({parcel.key for parcel, _ in read})
        wanted = [(parcel.key, which) for parcel, which in read if parcel.key in lower]
        with ExitStack() as stack:
            found = stack.enter_context(self._exchange.landing.reading_ahead(wanted))
            self._exchange.metrics.add("shuffle.sections.ahead", len(found))
            return found, stack.pop_all()
        raise AssertionError("unreachable")

    @contextmanager
    def taken(self, output: int, check: Callable[[], None]) -> Iterator[Found]:
        """What was read of an output, for as long as the body runs. Blocks while it is on its way.

        Nothing where it was not begun, or did not come to an end: whoever takes it reads the rest himself.
        """
        read = None
        with self._lock:
            if output == self._output:
                read, self._reading = self._reading, None
        found, held = self._result(read, check) if read is not None else ({}, ExitStack())
        with held:
            yield found

    def _result(self, read: Future[_Read], check: Callable[[], None]) -> _Read:
        while not wait([read], LOOK_AGAIN).done:
            try:
                check()
            except BaseException:
                read.add_done_callback(_let_go)
                raise
        try:
            return read.result()
        except (NoRoom, KeyError, CancelledError):
            pass  # there was no room, or it has gone meanwhile
        except Exception as error:
            # Whoever reads it in his turn fails of the same, in the place where that is told.
            self._exchange.metrics.fallback("sections are not read ahead", str(error))
        return {}, ExitStack()

    def close(self) -> None:
        """Let go of what nobody has taken."""
        with self._lock:
            self._closed = True
            read, self._reading = self._reading, None
        if read is not None:
            read.add_done_callback(_let_go)


def _let_go(read: Future[_Read]) -> None:
    if not read.cancelled() and read.exception() is None:
        _, stack = read.result()
        stack.close()
