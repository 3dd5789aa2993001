"""Root tasks whose results are needed together: where they are, and which of the queued ones is next."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Any

from dask_gpurt.placement.loads import Neighbourhood

#: The most inputs of a task that count as a family, and the links of the chains of single inputs to it.
MOST_SIBLINGS, LONGEST_CHAIN = 16, 4


def siblings(ts: Any) -> Iterator[Any]:
    """The tasks whose results will be needed together with that of a task; none where very many are."""
    dependent = next(iter(ts.dependents), None)
    for _ in range(LONGEST_CHAIN):
        if dependent is None or len(dependent.dependencies) > 1:
            break
        dependent = next(iter(dependent.dependents), None)
    if dependent is not None and 1 < len(dependent.dependencies) <= MOST_SIBLINGS:
        for sibling in dependent.dependencies:
            if (origin := _origin(sibling)) is not ts:
                yield origin


def _origin(ts: Any) -> Any:
    """The head of the chain of single inputs that ends in a task, or what of it is known to be somewhere."""
    for _ in range(LONGEST_CHAIN):
        if len(ts.dependencies) != 1 or whereabouts(ts):
            break
        ts = next(iter(ts.dependencies))
    return ts


def whereabouts(ts: Any) -> Any | None:
    """A worker that has the result of a task, or will have it."""
    if ts.processing_on is not None:
        return ts.processing_on
    return next(iter(ts.who_has), None) if ts.who_has else None


class Families:
    """The queued root tasks, in the order in which they should start.

    Dask's own queue stays the truth: what is here and no longer queued there counts for nothing. Where a
    task starts, its queued siblings wait for the next slots of the same neighbourhood; other slots go to
    other families first.

    Parameters
    ----------
    state
        Dask's ``SchedulerState``.
    """

    def __init__(self, state: Any):
        self._state = state
        self._heads: list[tuple[Any, int, Any]] = []
        self._arrivals = count()
        self._claimed: set[Any] = set()
        self._claims: defaultdict[Neighbourhood, deque[Any]] = defaultdict(deque)

    def queued(self, ts: Any) -> None:
        """A task has come into Dask's queue."""
        heappush(self._heads, (ts.priority, next(self._arrivals), ts))

    def started(self, ts: Any, home: Neighbourhood) -> None:
        """A task runs in a neighbourhood: its siblings should, too."""
        if not self._state.queued:
            self.clear()
            return
        if ts in self._claimed:
            self._claimed.discard(ts)
            return
        family = [sibling for sibling in siblings(ts) if self._is_free(sibling)]
        if family:
            self._claimed.update(family)
            self._claims[home].extend(sorted(family, key=lambda sibling: sibling.priority))

    def next(self, home: Neighbourhood) -> Any:
        """The task for a slot in a neighbourhood; Dask's queue must not be empty."""
        claims = self._claims.get(home)
        while claims:
            ts = claims.popleft()
            if ts in self._claimed and self._is_queued(ts):
                return ts
        self._claims.pop(home, None)
        while self._heads:
            _, _, ts = heappop(self._heads)
            if self._is_free(ts):
                return ts
        return self._state.queued.peek()

    def _is_free(self, ts: Any) -> bool:
        return self._is_queued(ts) and ts not in self._claimed

    def _is_queued(self, ts: Any) -> bool:
        return ts.state == "queued" and self._state.tasks.get(ts.key) is ts

    def clear(self) -> None:
        """Forget all tasks."""
        self._heads.clear()
        self._claimed.clear()
        self._claims.clear()
