"""Count how often a shuffle has run in vain, without a run in between that was completed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from dask.typing import Key


class RunsInARow:
    """Count the runs of shuffles since the last one of each that was completed.

    A run is completed when all outputs that it began with are in memory, or not wanted any more. So
    a collection that is kept for weeks, and loses an output now and then, is made again each time; one
    whose runs all fail is given up.
    """

    def __init__(self) -> None:
        self._runs: Counter[str] = Counter()
        self._missing: dict[str, set[Key]] = {}
        self._of: defaultdict[Key, set[str]] = defaultdict(set)  # an output of a join is one of two shuffles

    def __getitem__(self, shuffle: str) -> int:
        return self._runs[shuffle]

    def begins(self, shuffle: str, outputs: Iterable[Key]) -> None:
        """Count a run.

        Parameters
        ----------
        shuffle
            Its id.
        outputs
            The keys that are not in memory.
        """
        self._forget_outputs(shuffle)
        self._runs[shuffle] += 1
        self._missing[shuffle] = set(outputs)
        for key in self._missing[shuffle]:
            self._of[key].add(shuffle)

    def done(self, key: Key) -> None:
        """Note that a key is in memory, or not wanted any more."""
        if key not in self._of:
            return
        for shuffle in self._of.pop(key):
            missing = self._missing[shuffle]
            missing.discard(key)
            if not missing:
                self.forget(shuffle)

    def forget(self, shuffle: str) -> None:
        """Begin to count anew."""
        self._forget_outputs(shuffle)
        self._runs.pop(shuffle, None)

    def _forget_outputs(self, shuffle: str) -> None:
        for key in self._missing.pop(shuffle, ()):
            self._of[key].discard(shuffle)
            if not self._of[key]:
                del self._of[key]
