"""Keep a bounded history of decisions: why a task went to its worker. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from dask.typing import Key

from dask_gpurt.placement.cost import Candidate, Terms, rank

#: Keys whose last decision is kept: some tens of MB at most.
MAX_KEYS = 20_000
#: The reason that is given, by the term in which the chosen worker differs most from the next best.
_REASONS = {
    "waiting": "shorter wait",
    "moving": "less to move",
    "running": "runs faster",
    "room": "less to spill",
}
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

    def latest(self, most: int) -> list[dict[str, Any]]:
        """Return the last decisions, the latest first, each with the reason for the worker that was chosen.

        Returns
        -------
        list of dict
            The key as a string, the ``worker``, the ``seconds`` until the task was expected to have run there
            and their terms, how many ``candidates`` were compared, and ``why``.
        """
        return [self._summary(key) for key in islice(reversed(self._decisions), most)]

    def _summary(self, key: Key) -> dict[str, Any]:
        rows = self.explain(key)
        chosen = next(row for row in rows if row["chosen"])
        others = [row for row in rows if not row["chosen"]]
        terms = {name: chosen[name] for name in ("worker", "seconds", *Terms._fields, "missing")}
        return {"key": str(key), **terms, "candidates": len(rows), "why": reason(chosen, others)}

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


def reason(chosen: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """Say in a few words why a worker was chosen, by the term that tells it from the next best.

    Parameters
    ----------
    chosen, others
        Rows of :meth:`History.explain`, the best first.
    """
    if not others:
        return "the only one looked at"
    other = others[0]
    if chosen["fits"] and not other["fits"]:
        return "fits there, and on no other"
    saved = {name: other[name] - chosen[name] for name in _REASONS}
    term = max(saved, key=saved.__getitem__)
    if saved[term] <= 0:
        return "as good as the next, and less on it"
    return f"{_REASONS[term]} than on the next, {saved[term]:.3g} s"


def _candidates(figures: Sequence[Any]) -> Iterator[Candidate]:
    """Yield the candidates of a record."""
    for start in range(0, len(figures), _FIGURES):
        name, load, held, missing, *terms = figures[start : start + _FIGURES]
        yield Candidate(name, Terms(*terms), load, held, missing)
