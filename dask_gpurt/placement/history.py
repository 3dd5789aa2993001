"""Keep a bounded history of placement decisions. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from dask.typing import Key

from dask_gpurt.placement.cost import TERMS, Candidate, rank

#: How many keys have their last decision kept: some tens of MB at most.
MAX_KEYS = 20_000
#: The reason for a choice, by the term in which the chosen worker differs most from the next best.
_REASONS = {
    "waiting": "shorter wait",
    "moving": "less to move",
}
#: The number of fields of a candidate in a record.
_FIGURES = len(Candidate._fields)


class History:
    """Keep the last decision about each key, and evict the oldest decisions.

    Parameters
    ----------
    max_keys
        The maximum number of keys.
    """

    def __init__(self, max_keys: int = MAX_KEYS):
        self._max_keys = max_keys
        # Records are flat tuples of numbers and strings, which the garbage collector untracks.
        self._decisions: OrderedDict[Key, tuple[Any, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._decisions)

    def add(self, key: Key, worker: str, candidates: Sequence[Candidate]) -> None:
        """Record a decision.

        Parameters
        ----------
        worker
            The chosen worker.
        candidates
            All candidates that were compared.
        """
        self._decisions.pop(key, None)
        self._decisions[key] = (worker, *chain.from_iterable(candidates))
        if len(self._decisions) > self._max_keys:
            self._decisions.popitem(last=False)

    def latest(self, most: int) -> list[dict[str, Any]]:
        """Return the latest decisions with their reasons, newest first.

        Returns
        -------
        list of dict
            The key as a string, the ``worker``, the expected ``seconds`` until the task has run there and
            their terms, the number of ``candidates``, and ``why``.
        """
        return [self._summary(key) for key in islice(reversed(self._decisions), most)]

    def _summary(self, key: Key) -> dict[str, Any]:
        rows = self.explain(key)
        chosen = next(row for row in rows if row["chosen"])
        others = [row for row in rows if not row["chosen"]]
        terms = {name: chosen[name] for name in ("worker", "seconds", *TERMS, "fits", "missing")}
        return {"key": str(key), **terms, "candidates": len(rows), "why": reason(chosen, others)}

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


def reason(chosen: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """Explain why a worker was chosen, by the term in which it differs most from the next best.

    Parameters
    ----------
    chosen, others
        Rows of :meth:`History.explain`, best first.
    """
    if not others:
        return "the only candidate"
    other = others[0]
    if chosen["fits"] and not other["fits"]:
        return "the only candidate with enough memory"
    saved = {name: other[name] - chosen[name] for name in _REASONS}
    term = max(saved, key=saved.__getitem__)
    if saved[term] <= 0:
        return "as good as the next best, with less load"
    return f"{_REASONS[term]} than the next best, by {saved[term]:.3g} s"


def _candidates(figures: Sequence[Any]) -> Iterator[Candidate]:
    """Yield the candidates of a record."""
    for start in range(0, len(figures), _FIGURES):
        yield Candidate(*figures[start : start + _FIGURES])
