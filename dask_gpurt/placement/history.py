"""Why a task went where it went: a bounded history of decisions. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from dask.typing import Key

from dask_gpurt.placement.cost import Candidate, Terms, rank

#: Keys whose last decision is remembered: some tens of MB at most.
MOST_KEYS = 20_000
#: The figures of a candidate in a record.
FIGURES = len(Candidate._fields) - 1 + len(Terms._fields)


class History:
    """The last decision about each key; of too many keys, who was decided about longest ago goes.

    Parameters
    ----------
    most
        The most keys that are remembered.
    """

    def __init__(self, most: int = MOST_KEYS):
        self._most = most
        # A flat tuple of numbers and strings each: the garbage collector does not go through those.
        self._decisions: OrderedDict[Key, tuple[Any, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._decisions)

    def add(self, key: Key, worker: str, candidates: Sequence[Candidate]) -> None:
        """Remember a decision."""
        record: list[Any] = [worker]
        for name, terms, load, held, missing in candidates:
            record += name, load, held, missing, *terms
        self._decisions.pop(key, None)
        self._decisions[key] = tuple(record)
        if len(self._decisions) > self._most:
            self._decisions.popitem(last=False)

    def explain(self, key: Key) -> list[dict[str, Any]]:
        """A row for each candidate of the last decision about a key, the best first.

        None if it is not known, or no more.
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


def _candidates(figures: Sequence[Any]) -> Iterator[Candidate]:
    """The candidates of a record."""
    for start in range(0, len(figures), FIGURES):
        name, load, held, missing, *terms = figures[start : start + FIGURES]
        yield Candidate(name, Terms(*terms), load, held, missing)
