"""Why a task went where it went: a bounded history of decisions. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from dask.typing import Key

from dask_gpurt.placement.cost import Candidate, rank

#: Keys whose last decision is remembered: some tens of MB at most.
MOST_KEYS = 20_000


class History:
    """The last decision about each key; of too many keys, who was decided about longest ago goes.

    Parameters
    ----------
    most
        The most keys that are remembered.
    """

    def __init__(self, most: int = MOST_KEYS):
        self._most = most
        self._decisions: OrderedDict[Key, tuple[str, Sequence[Candidate]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._decisions)

    def add(self, key: Key, worker: str, candidates: Sequence[Candidate]) -> None:
        """Remember a decision."""
        self._decisions[key] = worker, candidates
        self._decisions.move_to_end(key)
        if len(self._decisions) > self._most:
            self._decisions.popitem(last=False)

    def explain(self, key: Key) -> list[dict[str, Any]]:
        """A row for each candidate of the last decision about a key, the best first.

        None if it is not known, or no more.
        """
        worker, candidates = self._decisions.get(key, ("", ()))
        return [
            {
                "worker": candidate.worker,
                "chosen": candidate.worker == worker,
                "seconds": candidate.terms.seconds,
                "missing": candidate.missing,
                **candidate.terms._asdict(),
            }
            for candidate in sorted(candidates, key=rank)
        ]
