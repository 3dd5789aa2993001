"""Count the runs, or the losses, of a shuffle since a run of it was completed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable

from dask.typing import Key

#: Stands among the workers that were lost for outputs that were moved without a loss.
MOVED = "moved"


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
        self._runs[shuffle] += 1
        self._wait_for(shuffle, outputs)

    def _wait_for(self, shuffle: str, outputs: Iterable[Key]) -> None:
        """Have a run count as completed once these outputs are there."""
        self._forget_outputs(shuffle)
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


class LossesInARow(RunsInARow):
    """Count the losses of runs that are mended, each once.

    The loss of a worker is told of again and again: by the scheduler, by workers that can not reach it, by
    those that could not read its shards, and by the barrier, which finds what is missing since. So a loss
    is a new one when a worker is lost that was not lost before. Something else that is missing is laid to the
    last worker that was lost, once; it is a new loss when it is missing again, or when no worker was lost.
    """

    def __init__(self) -> None:
        super().__init__()
        #: The workers that each shuffle has lost, and what was missing since the last of them.
        self._lost: defaultdict[str, set[str]] = defaultdict(set)
        self._laid: defaultdict[str, set[Hashable]] = defaultdict(set)

    def is_new(self, shuffle: str, workers: Collection[str], missing: Iterable[Hashable]) -> bool:
        """Return whether a loss has not been counted yet.

        Parameters
        ----------
        workers
            Those that are lost.
        missing
            What else is to be had once more: outputs and inputs.
        """
        if not self._lost[shuffle].issuperset(workers):
            return True
        return not self._lost[shuffle] or not self._laid[shuffle].isdisjoint(missing)

    def loses(
        self, shuffle: str, outputs: Iterable[Key], workers: Collection[str], missing: Collection[Hashable]
    ) -> None:
        """Count a loss, if it is a new one; see :meth:`begins` and :meth:`is_new`."""
        if self.is_new(shuffle, workers, missing):
            self.begins(shuffle, outputs)
            self._laid[shuffle].clear()
        else:
            self._wait_for(shuffle, outputs)
        self._lost[shuffle].update(workers)
        self._laid[shuffle].update(missing)

    def moves(self, shuffle: str) -> None:
        """Note that outputs get other owners with nothing lost: what is missing then is laid to that."""
        self._lost[shuffle].add(MOVED)
        self._laid[shuffle].clear()

    def takes_part(self, worker: str, shuffles: Iterable[str] | None = None) -> None:
        """Note that a worker takes part again, or another one at its address: it may be lost once more.

        Parameters
        ----------
        shuffles
            Those that it takes part in, any for None.
        """
        for shuffle in self._lost if shuffles is None else shuffles:
            self._lost[shuffle].discard(worker)

    def forget(self, shuffle: str) -> None:
        super().forget(shuffle)
        self._lost.pop(shuffle, None)
        self._laid.pop(shuffle, None)
