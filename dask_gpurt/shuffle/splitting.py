"""Retry work that runs out of memory on halves of its input, one after the other. Pure.

Spark RAPIDS calls this split-and-retry. Work that runs out of memory is

1. retried once on the whole input, after everything evictable has been spilled,
2. retried on halves, and on halves of halves, without another retry of the same part, since nothing is left
   to spill,
3. given up after ``MAX_HALVINGS``, since the size of the input is not the problem then.

Halves are processed in order, so the concatenated results are in the order of the whole input.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

#: The most times that an input is halved: down to a 64th.
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
    """Yield the result of work on an input, or on its parts if memory is too short for the whole.

    Each part is started only when its result is requested, so that no two results need to exist at once.

    ``work``: called with a part; must be restartable after an error.
    ``halve``: returns the halves of a part, in order; fewer than two if it cannot be split.
    ``make_room``: spills everything evictable; called after each lack of memory.
    ``on_split``: called with the error when a part is split for lack of memory.
    ``short``: the error by which ``work`` reports lack of memory without side effects; any other is raised.
    ``too_large``: errors for which a part is split immediately and any number of times, because more room
    would not help.
    Raises MemoryError: the error of ``work`` for a part that cannot be split further.
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
    """Return the result of work, or the error without references to the work's memory."""
    try:
        return [work(part)], None
    except expected as error:
        _release_frames(error)
        return [], error


def _release_frames(error: BaseException) -> None:
    """Clear the local variables in an error's traceback, which may hold much of the memory."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        if (each := left.pop()) is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            left += [each.__cause__, each.__context__]
