"""Whether memory changes hands only when all that was begun on it is through.

Copies go on after the call that has begun them. Whoever gives their memory back, shows it to a peer or begins
something else on it has to wait for their fence first, or come behind them on the same stream. With
``gpurt.overlap.check`` that is looked at each time. What counts is what has been waited for: a device that
happened to be quick enough excuses nothing.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from dask_gpurt.device.base import Device, Fence, Pool, passed
from dask_gpurt.device.copies import address

#: The first byte, and the one behind the last.
Span = tuple[int, int]
#: The stream that user code computes on, in whose order all threads are.
COMPUTE = "compute"


@dataclass(frozen=True)
class _Begun:
    """Something that goes on: what it reads and writes, and the stream in whose order it is."""

    what: str
    stream: Hashable
    reads: list[Span]
    writes: list[Span]

    def disturbs(self, other: _Begun) -> bool:
        """Whether it makes a difference which of two comes first."""
        return (
            overlap(self.writes, other.writes)
            or overlap(self.writes, other.reads)
            or overlap(self.reads, other.writes)
        )


class Handovers:
    """What was begun and has not been waited for. Thread-safe.

    Parameters
    ----------
    tell
        Called with a sentence where memory changes hands too early.
    count
        Called for each time that was looked at.
    """

    def __init__(self, tell: Callable[[str], None], count: Callable[[], None] = passed):
        self._tell = tell
        self._count = count
        self._begun: dict[int, _Begun] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def begins(
        self,
        what: str,
        *,
        reads: Iterable[Any] = (),
        writes: Iterable[Any] = (),
        stream: Hashable | None = None,
    ) -> Fence:
        """Something is begun; returns what to call once it has been waited for, again does nothing.

        Parameters
        ----------
        what
            A name for people.
        reads, writes
            Buffers, or arrays.
        stream
            The one in whose order it is: this thread's own for communication, if not given.
        """
        begun = _Begun(what, stream or threading.get_ident(), spans(reads), spans(writes))
        with self._lock:
            number = next(self._numbers)
            others = [other for other in self._begun.values() if other.stream != begun.stream]
            self._begun[number] = begun
        self._look_at(begun, others, f"{what} begins")
        return partial(self._over, number, begun.stream)

    def changes_hands(self, what: str, buffers: Iterable[Any], *, readable: bool = False) -> None:
        """Memory is somebody else's from now on.

        Parameters
        ----------
        what
            A name for people.
        readable
            Whether it goes on being read: then only those disturb who write it.
        """
        mine = spans(buffers)
        next_owner = _Begun(what, None, mine if readable else [], [] if readable else mine)
        with self._lock:
            others = list(self._begun.values())
        self._look_at(next_owner, others, what)

    def _look_at(self, mine: _Begun, others: Iterable[_Begun], how: str) -> None:
        self._count()
        for other in others:
            if mine.disturbs(other):
                self._tell(f"{how} before {other.what} has been waited for, which has the same memory")

    def _over(self, number: int, stream: Hashable) -> None:
        """All that is in the order of a stream, up to here, is through."""
        with self._lock:
            for each in [n for n, begun in self._begun.items() if n <= number and begun.stream == stream]:
                del self._begun[each]

    # ---- what is looked at -------------------------------------------------------------

    def watch(self, device: Device) -> None:
        """Look at the copies that a device makes, and at the blocks of its pools."""
        create_pool = device.create_pool

        def watched_pool(nbytes: int) -> Pool:
            pool = create_pool(nbytes)
            self.watch_giving_back(pool, lambda block: [block.buffer])
            return pool

        watched = {
            "create_pool": watched_pool,
            "scatter": self._scattering(device.scatter),
            "gather": self._gathering(device.gather),
            "gather_all": self._gathering(device.gather_all),
            "land": self._landing(device.land),
        }
        for name, method in watched.items():
            setattr(device, name, method)

    def watch_giving_back(self, pool: Any, buffers: Callable[[Any], Iterable[Any]]) -> None:
        """Look at what a pool gets back by ``free``; ``buffers`` says what memory that is."""
        free = pool.free

        def watched(given: Any) -> None:
            self.changes_hands("memory is given back", buffers(given))
            free(given)

        pool.free = watched

    def _scattering(self, scatter: Callable[..., Fence]) -> Callable[..., Fence]:
        @wraps(scatter)
        def watched(sources: Sequence[Any], into: Sequence[list[Any]], **options: Any) -> Fence:
            pieces = itertools.chain.from_iterable(into)
            over = self.begins("a copy to host memory", reads=sources, writes=pieces)
            return until(over, partial(scatter, sources, into, **options))

        return watched

    def _gathering(self, gather: Callable[..., tuple[Any, Fence]]) -> Callable[..., tuple[Any, Fence]]:
        @wraps(gather)
        def watched(pieces: Sequence[Any]) -> tuple[Any, Fence]:
            sources = itertools.chain.from_iterable(
                piece if isinstance(piece, list) else [piece] for piece in pieces
            )
            over = self.begins("a copy from host memory", reads=sources)
            made: list[Any] = []

            def begin() -> Fence:
                buffer, fence = gather(pieces)
                made.append(buffer)
                return fence

            fence = until(over, begin)
            return made[0], fence

        return watched

    def _landing(self, land: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        @wraps(land)
        def watched(sources: Sequence[Any]) -> list[Any]:
            over = self.begins("a pull", reads=sources)
            try:
                return land(sources)  # which waits by itself
            finally:
                over()

        return watched


def until(over: Fence, begin: Callable[[], Fence | None]) -> Fence:
    """Begin something that is over behind its fence, or at once where that is passed already or it fails."""
    try:
        fence = begin()
    except BaseException:
        over()
        raise
    if fence is None or fence is passed:
        over()
        return passed

    def wait() -> None:
        fence()
        over()

    return wait


def spans(buffers: Iterable[Any]) -> list[Span]:
    """Where buffers lie, in order; those without a byte nowhere."""
    return sorted((at := address(each), at + each.nbytes) for each in buffers if each.nbytes)


def overlap(some: Sequence[Span], others: Sequence[Span]) -> bool:
    """Whether spans in order and others in order have a byte in common."""
    mine, theirs = iter(some), iter(others)
    one, other = next(mine, None), next(theirs, None)
    while one and other:
        if one[0] < other[1] and other[0] < one[1]:
            return True
        if one[1] <= other[1]:
            one = next(mine, None)
        else:
            other = next(theirs, None)
    return False
