"""Which workers of a neighbourhood have the least to do, without looking at all of them. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Generic, TypeVar

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
