"""Sections that the next unpack task will read, brought up while this one computes.

The link to the lower tiers is idle while a task computes, and the task that reads next waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, contextmanager, suppress

from dask_gpurt.exchange import Exchange
from dask_gpurt.exchange.inbox import LOOK_AGAIN, Parcel
from dask_gpurt.exchange.landing import Found
from dask_gpurt.memory.tiers import NoRoom

#: What was found, and what lets it go.
_Read = tuple[Found, ExitStack]


class ReadAhead:
    """What is read ahead of the outputs of one run. Thread-safe."""

    def __init__(self, exchange: Exchange):
        self._exchange = exchange
        self._lock = threading.Lock()
        self._reads: dict[int, Future[_Read]] = {}
        self._closed = False

    def begin(self, output: int, sections: Sequence[tuple[Parcel, int]]) -> None:
        """Begin to read sections of an output, those that have landed and lie below the live tiers."""
        lower = self._exchange.landing.lower({parcel.key for parcel, _ in sections})
        wanted = [(parcel.key, which) for parcel, which in sections if parcel.key in lower]
        with self._lock:
            if wanted and output not in self._reads and not self._closed:
                with suppress(RuntimeError):  # the exchange closes at this moment
                    self._reads[output] = self._exchange.executor.submit(self._read, wanted)

    def _read(self, wanted: Sequence[tuple[str, int]]) -> _Read:
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
        with self._lock:
            read = self._reads.pop(output, None)
        with ExitStack() as stack:
            found, mine = self._result(read, check) if read is not None else ({}, stack)
            with mine:
                yield found

    def _result(self, read: Future[_Read], check: Callable[[], None]) -> _Read:
        while True:
            try:
                return read.result(LOOK_AGAIN)
            except TimeoutError:
                try:
                    check()
                except BaseException:
                    read.add_done_callback(_let_go)
                    raise
            except (NoRoom, KeyError, CancelledError):
                return {}, ExitStack()  # there was no room, or it has gone meanwhile
            except Exception as error:
                # Whoever reads it in his turn fails of the same, in the place where that is told.
                self._exchange.metrics.fallback("sections are not read ahead", str(error))
                return {}, ExitStack()

    def close(self) -> None:
        """Let go of everything that nobody has taken."""
        with self._lock:
            self._closed = True
            reads = list(self._reads.values())
            self._reads.clear()
        for read in reads:
            read.add_done_callback(_let_go)


def _let_go(read: Future[_Read]) -> None:
    if not read.cancelled() and read.exception() is None:
        _, stack = read.result()
        stack.close()
