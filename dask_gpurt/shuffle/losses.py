"""Collect the losses of runs until they are repaired together. Pure.

One failure is reported by several workers, each for what it misses, and a repair disturbs tasks that are
running. So reports about the same outputs are merged into one :class:`Loss`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from dask.typing import Key

#: The id of a shuffle.
S = TypeVar("S", bound=str)


@dataclass(eq=False)
class Loss:
    """Collect reported losses until they are repaired together.

    Attributes
    ----------
    reason, since
        The first report, and its time in seconds.
    outputs
        Outputs to be received again.
    gone, unreachable
        Workers that have left, and workers that cannot be reached or are silent.
    missing
        Reported outputs and transfer tasks.
    culprits
        The workers to blame: gone, unreachable or closing.
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

    Attributes
    ----------
    run_id, epoch
        The run, and the epoch of its owners.
    transfers
        The transfer tasks that the worker has run.
    """

    run_id: int
    epoch: int
    transfers: list[Key]


def common_owners(outputs: Iterable[int], owners: Sequence[Mapping[int, str]]) -> dict[int, str]:
    """Return the owners of outputs; none unless all shuffles that share the outputs agree.

    Parameters
    ----------
    owners
        The owner of each output, for each shuffle.
    """
    found = {output: owners[0][output] for output in outputs}
    agree = all(of.get(output) == owner for of in owners for output, owner in found.items())
    return found if agree else {}
