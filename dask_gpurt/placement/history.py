"""Keep a bounded history of decisions: why a task went to its worker. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from dask.typing import Key

from dask_gpurt.placement.cost import Candidate, Terms, rank

#: Keys whose last decision is kept: some tens of MB at most.
MAX_KEYS = 20_000
#: Figures of a candidate in a record.
_FIGURES = len(Candidate._fields) - 1 + len(Terms._fields)


class History:
    """Keep the last decision about each key, and drop the oldest decision beyond a number of keys.

    Parameters
    ----------
    max_keys
        The most keys that are kept.
    """

    def __init__(self, max_keys: int = MAX_KEYS):
        self._max_keys = max_keys
        # Each record is one flat tuple of numbers and strings, which the garbage collector does not traverse.
        self._decisions: OrderedDict[Key, tuple[Any, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._decisions)

    def add(self, key: Key, worker: str, candidates: Sequence[Candidate]) -> None:
        """Keep a decision.

        Parameters
        ----------
        worker
            The worker that was chosen.
        candidates
            All that were compared.
        """
        record: list[Any] = [worker]
        for name, terms, load, held, missing in candidates:
            record += name, load, held, missing, *terms
        self._decisions.pop(key, None)
        self._decisions[key] = tuple(record)
        if len(self._decisions) > self._max_keys:
            self._decisions.popitem(last=False)

    def latest(self, offset: int, limit: int) -> list[dict[str, Any]]:
        """Return a row for each of some decisions, the latest first: key, worker and what it was to cost.

        Parameters
        ----------
        offset, limit
            How many later ones are left out, and how many rows there are at most.
        """
        return [
            _summary(key, *record)
            for key, record in islice(reversed(self._decisions.items()), offset, offset + limit)
        ]

    def explain(self, key: Key) -> list[dict[str, Any]]:
        """Return a row for each candidate of the last decision about a key, the best first.

        No rows if the key is not known, or no longer.
        """
        worker, *figures = self._decisions.get(key, ("",))
        return [
            {
                "worker": candidate.worker,
                "chosen": candidate.worker == worker,
                "seconds": candidate.terms.seconds,
                "missing": candidate.missing,
                **candidate.terms._asdict(),
            }
            for candidate in sorted(_candidates(figures), key=rank)
        ]


def _summary(key: Key, worker: str, *figures: Any) -> dict[str, Any]:
    """Return a decision without the candidates that were not chosen."""
    candidates = list(_candidates(figures))
    chosen = next(candidate for candidate in candidates if candidate.worker == worker)
    return {
        "key": str(key),
        "worker": worker,
        "seconds": chosen.terms.seconds,
        "missing": chosen.missing,
        "candidates": len(candidates),
    }


def _candidates(figures: Sequence[Any]) -> Iterator[Candidate]:
    """Yield the candidates of a record."""
    for start in range(0, len(figures), _FIGURES):
        name, load, held, missing, *terms = figures[start : start + _FIGURES]
        yield Candidate(name, Terms(*terms), load, held, missing)
