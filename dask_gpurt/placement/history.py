"""Keep a bounded history of placement decisions. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from dask.typing import Key

from dask_gpurt.placement.cost import TERMS, Candidate, rank

#: How many keys have their last decision kept: some tens of MB at most.
MAX_KEYS = 20_000
#: The number of fields of a candidate in a record.
_FIGURES = len(Candidate._fields)


class History:
    """Keep the last decision about each key, and evict the oldest decisions."""

    def __init__(self, max_keys: int = MAX_KEYS):
        self._max_keys = max_keys
        # Records are flat tuples of numbers and strings, which the garbage collector untracks.
        self._decisions: OrderedDict[Key, tuple[Any, ...]] = OrderedDict()

    def add(self, key: Key, worker: str, candidates: Sequence[Candidate]) -> None:
        """Record a decision."""
        self._decisions.pop(key, None)
        self._decisions[key] = (worker, *chain.from_iterable(candidates))
        if len(self._decisions) > self._max_keys:
            self._decisions.popitem(last=False)

    def explain(self, key: Key) -> list[dict[str, Any]]:
        """Return a row for each candidate of the last decision about a key, best first.

        Empty if the key is unknown or its decision was evicted.
        """
        worker, *figures = self._decisions.get(key, ("",))
        return [
            {
                "worker": candidate.worker,
                "chosen": candidate.worker == worker,
                "seconds": candidate.seconds,
                **{name: getattr(candidate, name) for name in (*TERMS, "fits", "missing")},
            }
            for candidate in sorted(_candidates(figures), key=rank)
        ]


def _candidates(figures: Sequence[Any]) -> Iterator[Candidate]:
    """Yield the candidates of a record."""
    for start in range(0, len(figures), _FIGURES):
        yield Candidate(*figures[start : start + _FIGURES])
