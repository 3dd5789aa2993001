"""Which workers of a neighbourhood have the least to do, without looking at all of them. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, count, islice
from typing import Any, Generic, TypeVar

Worker = TypeVar("Worker", bound=Hashable)

#: A device, an NVLink domain, a host, or everything.
Neighbourhood = tuple[str, ...]
#: The workers of a neighbourhood by load, in dictionaries without values: sets in the order of arrival.
Buckets = dict[int, dict[Worker, None]]


@dataclass(slots=True)
class _Known(Generic[Worker]):
    """The load of a worker, what it belongs to, the buckets of that, and the load that it has in these."""

    load: int
    neighbourhoods: Sequence[Neighbourhood]
    buckets: list[Buckets[Worker]]
    shown: int


class Loads(Generic[Worker]):
    """Workers by load, in each neighbourhood that they belong to.

    A change only notes the load: the buckets are brought up to date when somebody looks. So it costs the same
    however many workers there are, and next to nothing where nobody looks. Among workers with the same load,
    who has had it longest comes first: so equal workers take turns.
    """

    def __init__(self) -> None:
        self._buckets: dict[Neighbourhood, Buckets[Worker]] = {}
        self._known: dict[Worker, _Known[Worker]] = {}
        # Who has changed since somebody looked, in the order of their last changes.
        self._changed: dict[Worker, _Known[Worker]] = {}

    def __contains__(self, worker: Worker) -> bool:
        return worker in self._known

    def __len__(self) -> int:
        return len(self._known)

    def load(self, worker: Worker) -> int | None:
        """The load of a worker, None of one that is not here."""
        known = self._known.get(worker)
        return known.load if known else None

    def put(self, worker: Worker, load: int, neighbourhoods: Sequence[Neighbourhood]) -> None:
        """Say how much a worker has to do, and to what it belongs."""
        if self.neighbourhoods(worker) == neighbourhoods and self.load(worker) == load:
            return
        self.discard(worker)
        buckets = [self._buckets.setdefault(name, {}) for name in neighbourhoods]
        self._known[worker] = _Known(load, neighbourhoods, buckets, load)
        for each in buckets:
            each.setdefault(load, {})[worker] = None

    def neighbourhoods(self, worker: Worker) -> Sequence[Neighbourhood]:
        """What a worker belongs to; nothing for one that is not here."""
        known = self._known.get(worker)
        return known.neighbourhoods if known else ()

    def change(self, worker: Worker, load: int) -> bool:
        """Say how much a worker has to do; tell whether it is here."""
        known = self._known.get(worker)
        if known is None:
            return False
        if known.load != load:
            known.load = load
            self._changed.pop(worker, None)
            self._changed[worker] = known
        return True

    def discard(self, worker: Worker) -> None:
        """Forget a worker."""
        self._settle()
        known = self._known.pop(worker, None)
        if known is None:
            return
        for name, each in zip(known.neighbourhoods, known.buckets, strict=True):
            _take_out(each, known.shown, worker)
            if not each:
                del self._buckets[name]

    def _settle(self) -> None:
        """Bring the buckets up to date."""
        for worker, known in self._changed.items():
            for each in known.buckets:
                _take_out(each, known.shown, worker)
                each.setdefault(known.load, {})[worker] = None
            known.shown = known.load
        self._changed.clear()

    def lowest(self, neighbourhood: Neighbourhood) -> int | None:
        """The least load in a neighbourhood, None where nobody is."""
        self._settle()
        buckets = self._buckets.get(neighbourhood)
        return min(buckets) if buckets else None

    def least(self, neighbourhood: Neighbourhood, number: int) -> Iterator[Worker]:
        """So many workers of a neighbourhood, those with the least load first."""
        self._settle()
        buckets = self._buckets.get(neighbourhood)
        if not buckets:
            return iter(())
        first = buckets[min(buckets)]
        if len(first) >= number:
            return islice(first, number)
        return islice(chain.from_iterable(buckets[load] for load in sorted(buckets)), number)


def _take_out(buckets: Buckets[Worker], load: int, worker: Worker) -> None:
    """Out of the bucket of its load, which goes when it is empty."""
    bucket = buckets[load]
    del bucket[worker]
    if not bucket:
        del buckets[load]


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
