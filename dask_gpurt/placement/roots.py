"""Which root task is next: those whose results are needed together come out on the same host."""

from __future__ import annotations

from collections import defaultdict, deque
from heapq import heappop, heappush
from itertools import count
from typing import Any

from dask_gpurt.placement.chooser import siblings
from dask_gpurt.placement.loads import Neighbourhood


class Roots:
    """The queued root tasks, in the order in which they should start.

    Dask's own queue stays the truth: what is here and no longer queued there counts for nothing. Where a task starts,
    its queued siblings wait for the next slots of the same neighbourhood; other slots go to other families first.

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
        self._claimed.discard(ts)
        family = [sibling for sibling in siblings(ts) if sibling not in self._claimed and self._is_queued(sibling)]
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
            if ts not in self._claimed and self._is_queued(ts):
                return ts
        return self._state.queued.peek()

    def _is_queued(self, ts: Any) -> bool:
        return ts.state == "queued" and self._state.tasks.get(ts.key) is ts

    def clear(self) -> None:
        """Forget all, when Dask does."""
        self._heads.clear()
        self._claimed.clear()
        self._claims.clear()
