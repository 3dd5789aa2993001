"""Which workers of a neighbourhood have the least to do, without looking at all of them. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import chain, islice
from typing import Generic, TypeVar

Worker = TypeVar("Worker", bound=Hashable)

#: A device, an NVLink domain, a host, or everything.
Neighbourhood = tuple[str, ...]


class Loads(Generic[Worker]):
    """Workers by load, in each neighbourhood that they belong to.

    A change costs the same however many workers there are: it moves the worker to another bucket. Among
    workers with the same load, who has had it longest comes first: so equal workers take turns.
    """

    def __init__(self) -> None:
        self._known: dict[Worker, tuple[int, Sequence[Neighbourhood]]] = {}
        # Dictionaries without values: sets in the order of arrival.
        self._buckets: dict[Neighbourhood, dict[int, dict[Worker, None]]] = {}

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
        known = self._known.get(worker)
        if known == (load, neighbourhoods):
            return
        self.discard(worker)
        self._known[worker] = load, neighbourhoods
        for name in neighbourhoods:
            self._buckets.setdefault(name, {}).setdefault(load, {})[worker] = None

    def neighbourhoods(self, worker: Worker) -> Sequence[Neighbourhood]:
        """What a worker belongs to; nothing for one that is not here."""
        known = self._known.get(worker)
        return known[1] if known else ()

    def change(self, worker: Worker, load: int) -> bool:
        """Say how much a worker has to do; tell whether it is here."""
        known = self._known.get(worker)
        if known is None:
            return False
        before, neighbourhoods = known
        if before == load:
            return True
        self._known[worker] = load, neighbourhoods
        for name in neighbourhoods:
            buckets = self._buckets[name]
            bucket = buckets[before]
            if len(bucket) > 1:
                del bucket[worker]
            else:
                del buckets[before]
            if load in buckets:
                buckets[load][worker] = None
            else:
                buckets[load] = {worker: None}
        return True

    def discard(self, worker: Worker) -> None:
        """Forget a worker."""
        load, neighbourhoods = self._known.pop(worker, (0, ()))
        for name in neighbourhoods:
            buckets = self._buckets[name]
            del buckets[load][worker]
            if not buckets[load]:
                del buckets[load]
            if not buckets:
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
