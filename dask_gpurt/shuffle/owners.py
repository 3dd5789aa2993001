"""Assign outputs to the workers that put them together, also while a run goes on. Pure.

The outputs of a run are dealt out in *shares*. Producers cut one shard of each input for a share, and its
owner keeps account of the shards that it has received for it. A share is never given to another worker:
outputs that need another owner, or that have to be received once more, are moved to new shares. Messages that
are still on their way for old shares are refused by their numbers.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Share:
    """List outputs that one worker receives together.

    Attributes
    ----------
    id
        Unique within a run, and greater than those before.
    owner
        The address of the worker.
    outputs
        Ascending. They become fewer as outputs are moved to other shares.
    sealed
        Whether the barrier has found all there is to receive: nothing is sent for it any more.
    """

    id: int
    owner: str
    outputs: tuple[int, ...]
    sealed: bool = False


class Owners(dict[int, str]):
    """Map each output to the address of its owner, in the place of the plain dict of Dask's runs.

    The scheduler changes it; workers get copies, of which a greater epoch is newer.

    Attributes
    ----------
    epoch
        How often outputs have been moved, or have to be sealed again.
    shares
        Those that count, by id.
    left
        The shares that do not, since their owners have left: nothing reads what was published for them.
    """

    epoch: int
    shares: Mapping[int, Share]
    left: frozenset[int]
    _issued: int

    @classmethod
    def begin(cls, worker_for: Mapping[int, str], wanted: Collection[int] | None = None) -> Owners:
        """Deal outputs out as a run begins.

        Parameters
        ----------
        worker_for
            The owner of each output.
        wanted
            The outputs to be received, all for None. Others are moved to a share when they are needed.
        """
        self = cls(worker_for)
        self.epoch, self.shares, self.left, self._issued = 0, {}, frozenset(), 0
        self._deal(
            {output: owner for output, owner in worker_for.items() if wanted is None or output in wanted}
        )
        return self

    @classmethod
    def of(cls, worker_for: Mapping[int, str]) -> Owners:
        """Return the owners as they are now, or have a plain mapping be those that a run begins with."""
        return worker_for.snapshot() if isinstance(worker_for, Owners) else cls.begin(worker_for)

    def snapshot(self) -> Owners:
        """Return the owners as they are now. Within one process messages hand over the object itself."""
        copy = Owners(self)
        copy.epoch, copy.shares, copy.left, copy._issued = self.epoch, self.shares, self.left, self._issued
        return copy

    def move(
        self, to: Mapping[int, str], gone: Collection[str] = (), idle: Mapping[int, str] | None = None
    ) -> None:
        """Move outputs to new shares.

        Parameters
        ----------
        to
            Their new owners, which may be those that they have.
        gone
            Workers that have left.
        idle
            New owners of outputs that are not needed now, and so are in no share.
        """
        self.epoch += 1
        self.update(idle or {})
        self.left |= {id_ for id_, share in self.shares.items() if share.owner in gone}
        kept = (
            replace(share, outputs=tuple(output for output in share.outputs if output not in to))
            for share in self.shares.values()
            if share.owner not in gone
        )
        self.shares = {share.id: share for share in kept if share.outputs}
        self._deal(to)

    def _deal(self, to: Mapping[int, str]) -> None:
        self.update(to)
        by_owner: defaultdict[str, list[int]] = defaultdict(list)
        for output in sorted(to):
            by_owner[to[output]].append(output)
        new = [
            Share(id_, owner, tuple(outputs))
            for id_, (owner, outputs) in enumerate(by_owner.items(), self._issued)
        ]
        self._issued += len(new)
        # A new mapping each time: the one before may be on its way to a worker.
        self.shares = {**self.shares, **{share.id: share for share in new}}

    def seal(self, epoch: int) -> bool:
        """Note that all shares of an epoch are complete; False when it is not the current one."""
        if epoch != self.epoch:
            return False
        self.shares = {id_: replace(share, sealed=True) for id_, share in self.shares.items()}
        return True

    @property
    def sealed(self) -> bool:
        """Return whether nothing is to be received any more."""
        return all(share.sealed for share in self.shares.values())

    def received(self, outputs: Iterable[int]) -> set[int]:
        """Return those of some outputs of which nothing more would come without a new share."""
        coming = {output for share in self.open_shares() for output in share.outputs}
        return set(outputs) - coming

    def open_shares(self) -> list[Share]:
        """Return the shares that are still received."""
        return [share for share in self.shares.values() if not share.sealed]


def deal(outputs: Iterable[int], workers: Sequence[str], owned: Mapping[str, int]) -> dict[int, str]:
    """Deal outputs out to workers; each gets neighbours, since a shard is one run of sorted rows.

    Parameters
    ----------
    owned
        How many outputs each worker has to put together already: those with fewer get more.

    Returns
    -------
    dict
        The worker for each output.
    """
    given = dict.fromkeys(workers, 0)
    outputs = sorted(outputs)
    for _ in outputs:
        least = min(workers, key=lambda worker: owned.get(worker, 0) + given[worker])
        given[least] += 1
    order = itertools.chain.from_iterable([worker] * number for worker, number in given.items())
    return dict(zip(outputs, order, strict=True))
