"""Which workers of a neighbourhood have the least to do, without looking at all of them. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import chain, islice
from typing import Generic, TypeVar

Worker = TypeVar("Worker", bound=Hashable)

#: A device, an NVLink domain, a host, or everything.
Neighbourhood = tuple[str, ...]
#: The workers of a neighbourhood by load, in dictionaries without values: sets in the order of arrival.
Buckets = dict[int, dict[Worker, None]]


class Loads(Generic[Worker]):
    """Workers by load, in each neighbourhood that they belong to.

    A change costs the same however many workers there are: it moves the worker to another bucket. Among
    workers with the same load, who has had it longest comes first: so equal workers take turns.
    """

    def __init__(self) -> None:
        self._buckets: dict[Neighbourhood, Buckets[Worker]] = {}
        # The load of a worker, what it belongs to, and the buckets of that.
        self._known: dict[Worker, tuple[int, Sequence[Neighbourhood], list[Buckets[Worker]]]] = {}

    def __contains__(self, worker: Worker) -> bool:
        return worker in self._known

    def __len__(self) -> int:
        return len(self._known)

    def load(self, worker: Worker) -> int | None:
        """The load of a worker, None of one that is not here."""
        known = self._known.get(worker)
        return known[0] if known else None

    def put(self, worker: Worker, load: int, neighbourhoods: Sequence[Neighbourhood]) -> None:
        """Say how much a worker has to do, and to what it belongs."""
        if self.neighbourhoods(worker) == neighbourhoods and self.load(worker) == load:
            return
        self.discard(worker)
        buckets = [self._buckets.setdefault(name, {}) for name in neighbourhoods]
        self._known[worker] = load, neighbourhoods, buckets
        for each in buckets:
            each.setdefault(load, {})[worker] = None

    def neighbourhoods(self, worker: Worker) -> Sequence[Neighbourhood]:
        """What a worker belongs to; nothing for one that is not here."""
        known = self._known.get(worker)
        return known[1] if known else ()

    def change(self, worker: Worker, load: int) -> bool:
        """Say how much a worker has to do; tell whether it is here."""
        known = self._known.get(worker)
        if known is None:
            return False
        before, neighbourhoods, buckets = known
        if before == load:
            return True
        self._known[worker] = load, neighbourhoods, buckets
        for each in buckets:
            bucket = each[before]
            if len(bucket) > 1:
                del bucket[worker]
            else:
                del each[before]
            if load in each:
                each[load][worker] = None
            else:
                each[load] = {worker: None}
        return True

    def discard(self, worker: Worker) -> None:
        """Forget a worker."""
        load, neighbourhoods, buckets = self._known.pop(worker, (0, (), []))
        for name, each in zip(neighbourhoods, buckets, strict=True):
            del each[load][worker]
            if not each[load]:
                del each[load]
            if not each:
                del self._buckets[name]

    def lowest(self, neighbourhood: Neighbourhood) -> int | None:
        """The least load in a neighbourhood, None where nobody is."""
        buckets = self._buckets.get(neighbourhood)
        return min(buckets) if buckets else None

    def least(self, neighbourhood: Neighbourhood, number: int) -> Iterator[Worker]:
        """So many workers of a neighbourhood, those with the least load first."""
        buckets = self._buckets.get(neighbourhood)
        if not buckets:
            return iter(())
        first = buckets[min(buckets)]
        if len(first) >= number:
            return islice(first, number)
        return islice(chain.from_iterable(buckets[load] for load in sorted(buckets)), number)
