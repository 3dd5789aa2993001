"""Split work that runs out of memory: halve its input, and do the halves one after the other. Pure.

Spark RAPIDS calls it split-and-retry. Work that runs out of memory is tried

1. as it is, once more, after everything has been spilled that nothing uses,
2. in halves, and in halves of those that do not fit: each at once, since nothing is left to spill,
3. no more after ``MAX_HALVINGS``: then it is not the size of the input for which memory is short.

Halves are done in their order, so that results put one behind the other are in the order of the whole's.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

#: The times that an input is halved before its work is given up: down to a 64th.
MAX_HALVINGS = 6


def split_and_retry(
    work: Callable[[T], R],
    whole: T,
    *,
    halve: Callable[[T], Sequence[T]],
    make_room: Callable[[], object],
    on_split: Callable[[MemoryError], object],
    short: type[MemoryError] = MemoryError,
    too_large: tuple[type[Exception], ...] = (),
) -> Iterator[R]:
    """Yield the result of some work; where memory is too short for it, the results of parts of its input.

    The next part is begun when its result is asked for, so that there need not be two at a time.

    Parameters
    ----------
    work
        Done with a part, from its beginning each time.
    halve
        Returns the parts of a part, in order; fewer than two where it cannot be split.
    make_room
        Spills what nothing uses, wherever memory was short.
    on_split
        Called with the error for which a part is split.
    short
        The error by which the work says that memory is short and it has changed nothing; any other ends it.
    too_large
        Errors for which a part is split, at once and as often as it takes: room would not help.

    Raises
    ------
    MemoryError
        As ``work`` has, for a part that is not split any more.
    """
    waiting = [(whole, 0)]
    while waiting:
        part, halvings = waiting.pop()
        done, error = _attempt(work, part, (short, *too_large))
        if isinstance(error, short):
            make_room()
            if not halvings:
                done, error = _attempt(work, part, (short, *too_large))
        if error is None:
            yield from done
            done.clear()  # the next part may need its memory
            continue
        if isinstance(error, short):
            halvings += 1
        halves = halve(part) if halvings <= MAX_HALVINGS else ()
        if len(halves) < 2:
            raise error
        if isinstance(error, short):
            on_split(error)
        waiting += [(half, halvings) for half in reversed(halves)]


def _attempt(
    work: Callable[[T], R], part: T, expected: tuple[type[Exception], ...]
) -> tuple[list[R], Exception | None]:
    """Return the result of some work, or else the error, without what the work had in memory."""
    try:
        return [work(part)], None
    except expected as error:
        _release_frames(error)
        return [], error


def _release_frames(error: BaseException) -> None:
    """Let go of the variables of all calls that an error has ended: they may be what memory is short for."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        if (each := left.pop()) is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            left += [each.__cause__, each.__context__]
