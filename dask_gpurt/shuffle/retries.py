"""Count the consecutive failed runs, or losses, of a shuffle."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable

from dask.typing import Key

#: Pseudo-worker among the lost ones: outputs were moved without a loss.
MOVED = "moved"


class RunsInARow:
    """Count the runs of each shuffle since its last completed run.

    A run is completed once all outputs that it started with are in memory or no longer wanted. So a
    collection that is persisted for weeks, and loses an output now and then, is always recomputed, whereas a
    shuffle whose runs all fail is given up.
    """

    def __init__(self) -> None:
        self._runs: Counter[str] = Counter()
        self._missing: dict[str, set[Key]] = {}
        self._of: defaultdict[Key, set[str]] = defaultdict(set)  # an output of a join is of two shuffles

    def __getitem__(self, shuffle: str) -> int:
        return self._runs[shuffle]

    def begins(self, shuffle: str, outputs: Iterable[Key]) -> None:
        """Count a run.

        Parameters
        ----------
        shuffle
            The id of the shuffle.
        outputs
            The keys of the outputs that are not in memory.
        """
        self._runs[shuffle] += 1
        self._wait_for(shuffle, outputs)

    def _wait_for(self, shuffle: str, outputs: Iterable[Key]) -> None:
        """Count the run as completed once these outputs are in memory."""
        self._forget_outputs(shuffle)
        self._missing[shuffle] = set(outputs)
        for key in self._missing[shuffle]:
            self._of[key].add(shuffle)

    def done(self, key: Key) -> None:
        """Note that a key is in memory or no longer wanted."""
        if key not in self._of:
            return
        for shuffle in self._of.pop(key):
            missing = self._missing[shuffle]
            missing.discard(key)
            if not missing:
                self.forget(shuffle)

    def forget(self, shuffle: str) -> None:
        """Reset the count of a shuffle."""
        self._forget_outputs(shuffle)
        self._runs.pop(shuffle, None)

    def _forget_outputs(self, shuffle: str) -> None:
        for key in self._missing.pop(shuffle, ()):
            self._of[key].discard(shuffle)
            if not self._of[key]:
                del self._of[key]


class LossesInARow(RunsInARow):
    """Count the losses that runs recover from, each once.

    The loss of one worker is reported several times: by the scheduler, by workers that cannot reach it or
    read its shards, and by the barrier, which finds inputs missing. So a loss is new if it names a worker
    that was not lost before. Missing inputs or outputs are attributed to the last lost worker, once; they are
    a new loss if they are missing again, or if no worker was lost.
    """

    def __init__(self) -> None:
        super().__init__()
        #: By shuffle, the lost workers, and what has been attributed to the last of them.
        self._lost: defaultdict[str, set[str]] = defaultdict(set)
        self._laid: defaultdict[str, set[Hashable]] = defaultdict(set)

    def is_new(self, shuffle: str, workers: Collection[str], missing: Iterable[Hashable]) -> bool:
        """Return whether a loss has not been counted.

        Parameters
        ----------
        workers
            The lost workers.
        missing
            Outputs and inputs that are missing.
        """
        if not self._lost[shuffle].issuperset(workers):
            return True
        return not self._lost[shuffle] or not self._laid[shuffle].isdisjoint(missing)

    def loses(
        self, shuffle: str, outputs: Iterable[Key], workers: Collection[str], missing: Collection[Hashable]
    ) -> None:
        """Count a loss if it is new; see :meth:`begins` and :meth:`is_new`."""
        if self.is_new(shuffle, workers, missing):
            self.begins(shuffle, outputs)
            self._laid[shuffle].clear()
        else:
            self._wait_for(shuffle, outputs)
        self._lost[shuffle].update(workers)
        self._laid[shuffle].update(missing)

    def moves(self, shuffle: str) -> None:
        """Note that outputs move without a loss: shards missing afterwards are attributed to the move."""
        self._lost[shuffle].add(MOVED)
        self._laid[shuffle].clear()

    def takes_part(self, worker: str, shuffles: Iterable[str] | None = None) -> None:
        """Note that a worker, or a new one at its address, takes part again, so that losing it is a new loss.

        Parameters
        ----------
        shuffles
            The shuffles that it takes part in; None for all.
        """
        for shuffle in self._lost if shuffles is None else shuffles:
            self._lost[shuffle].discard(worker)

    def forget(self, shuffle: str) -> None:
        super().forget(shuffle)
        self._lost.pop(shuffle, None)
        self._laid.pop(shuffle, None)
