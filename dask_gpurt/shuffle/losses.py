"""Collect the losses of runs until they are repaired together, and count those in a row. Pure.

One failure is reported by several workers, each for what it misses, and a repair disturbs tasks that are
running. So reports about the same outputs are merged into one :class:`Loss`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from dask.typing import Key

#: The id of a shuffle.
S = TypeVar("S", bound=str)
#: Pseudo-worker among the lost ones: outputs were moved without a loss.
MOVED = "moved"


# ---- losses to repair ----------------------------------------------------------------------------------


@dataclass(eq=False)
class Loss:
    """Collect reported losses until they are repaired together.

    ``reason``, ``since``: the first report, and its time in seconds.
    ``outputs``: outputs to be received again.
    ``gone``, ``unreachable``: workers that have left, and workers that cannot be reached or are silent.
    ``missing``: reported outputs and transfer tasks.
    ``culprits``: the workers to blame: gone, unreachable or closing.
    """

    reason: str
    since: float
    outputs: set[int] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    unreachable: set[str] = field(default_factory=set)
    missing: set[int | Key] = field(default_factory=set)
    culprits: set[str] = field(default_factory=set)

    @property
    def is_loss(self) -> bool:
        """Return whether something was lost; otherwise a worker retires, and its outputs move."""
        return bool(self.gone or self.unreachable or self.missing)

    def merge(self, other: Loss) -> None:
        """Add what a later loss has collected; the reason and the time stay."""
        self.outputs |= other.outputs
        self.gone |= other.gone
        self.unreachable |= other.unreachable
        self.missing |= other.missing
        self.culprits |= other.culprits


class PendingLosses(Generic[S]):
    """Hold losses that have not been repaired yet. Shuffles that share outputs share one loss."""

    def __init__(self) -> None:
        self._of: dict[S, Loss] = {}

    def __contains__(self, shuffle: object) -> bool:
        return shuffle in self._of

    def __len__(self) -> int:
        return len(self._of)

    def add(self, shuffles: Collection[S], outputs: Iterable[int], reason: str, now: float) -> Loss:
        """Record a loss of shuffles that share outputs, merged with their pending losses.

        Shuffles may have lost something before they began to share outputs, each on its own.
        """
        known = {self._of[shuffle] for shuffle in shuffles if shuffle in self._of}
        loss = min(known, key=lambda one: one.since, default=None) or Loss(reason, now)
        loss.outputs.update(outputs)
        for other in known:
            if other is not loss:
                loss.merge(other)
                self._of |= dict.fromkeys(self.shuffles(other), loss)
        self._of |= dict.fromkeys(shuffles, loss)
        return loss

    def shuffles(self, loss: Loss) -> list[S]:
        """Return the shuffles of a loss."""
        return [shuffle for shuffle, of in self._of.items() if of is loss]

    def forget(self, shuffles: Iterable[S]) -> None:
        """Forget the losses of shuffles that are repaired, or restart."""
        for shuffle in shuffles:
            self._of.pop(shuffle, None)

    def clear(self) -> None:
        """Forget all losses."""
        self._of.clear()


class Contribution(NamedTuple):
    """Describe what a worker has transferred in a run.

    ``run_id``, ``epoch``: the run, and the epoch of its owners.
    ``transfers``: the transfer tasks that the worker has run.
    """

    run_id: int
    epoch: int
    transfers: list[Key]


def common_owners(outputs: Iterable[int], owners: Sequence[Mapping[int, str]]) -> dict[int, str]:
    """Return the owners of outputs; none unless all shuffles that share the outputs agree.

    ``owners``: the owner of each output, for each shuffle.
    """
    found = {output: owners[0][output] for output in outputs}
    agree = all(of.get(output) == owner for of in owners for output, owner in found.items())
    return found if agree else {}


# ---- losses in a row -----------------------------------------------------------------------------------


class ConsecutiveRuns:
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

        ``outputs``: the keys of the outputs that are not in memory.
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


class ConsecutiveLosses(ConsecutiveRuns):
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

        ``missing``: outputs and inputs that are missing.
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

        ``shuffles``: the shuffles that it takes part in; None for all.
        """
        for shuffle in self._lost if shuffles is None else shuffles:
            self._lost[shuffle].discard(worker)

    def forget(self, shuffle: str) -> None:
        super().forget(shuffle)
        self._lost.pop(shuffle, None)
        self._laid.pop(shuffle, None)
