"""Assign outputs to the workers that assemble them, and reassign them during a run. Pure.

The outputs of a run are divided into *shares*. Producers pack one shard per input and share, and the owner
of a share tracks which of them it has received. A share never changes its owner: outputs that need another
owner, or that have to be received again, are moved to new shares. Messages in flight for old shares are
recognised by the id of the share, and refused.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Share:
    """List outputs that one worker receives together.

    ``id``: unique within a run; increases with each new share.
    ``owner``: the address of the worker.
    ``outputs``: in ascending order; outputs that move to another share are removed.
    ``sealed``: whether the barrier has found the share complete, so that nothing more is sent for it.
    """

    id: int
    owner: str
    outputs: tuple[int, ...]
    sealed: bool = False


class Owners(dict[int, str]):
    """Map each output to the address of its owner, in place of the plain dict of Dask's runs.

    The scheduler modifies it, and sends copies to the workers; the one with the greatest epoch is the newest.

    ``epoch``: incremented each time that outputs are moved or have to be sealed again.
    ``left``: ids of shares whose owners have left; nothing reads the shards published for them.
    """

    epoch: int
    shares: Mapping[int, Share]
    left: frozenset[int]
    _issued: int

    @classmethod
    def begin(cls, worker_for: Mapping[int, str], wanted: Collection[int] | None = None) -> Owners:
        """Assign the outputs of a new run.

        ``wanted``: the outputs to receive; None for all. Other outputs are moved to a share once they are
        needed.
        """
        self = cls(worker_for)
        self.epoch, self.shares, self.left, self._issued = 0, {}, frozenset(), 0
        self._deal(
            {output: owner for output, owner in worker_for.items() if wanted is None or output in wanted}
        )
        return self

    @classmethod
    def of(cls, worker_for: Mapping[int, str]) -> Owners:
        """Return a snapshot of owners, or the initial owners of a run for a plain mapping."""
        return worker_for.snapshot() if isinstance(worker_for, Owners) else cls.begin(worker_for)

    def snapshot(self) -> Owners:
        """Return a copy. Messages within one process would otherwise share the object itself."""
        copy = Owners(self)
        copy.epoch, copy.shares, copy.left, copy._issued = self.epoch, self.shares, self.left, self._issued
        return copy

    def move(
        self, to: Mapping[int, str], gone: Collection[str] = (), idle: Mapping[int, str] | None = None
    ) -> None:
        """Move outputs to new shares.

        ``to``: the new owners, which may equal the current ones.
        ``idle``: new owners of outputs that are in no share because they are not needed now.
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
        # A new mapping each time, since the old one may be in flight to a worker.
        self.shares = {**self.shares, **{share.id: share for share in new}}

    def seal(self, epoch: int) -> bool:
        """Seal all shares, if ``epoch`` is the current one; return whether it is."""
        if epoch != self.epoch:
            return False
        self.shares = {id_: replace(share, sealed=True) for id_, share in self.shares.items()}
        return True

    @property
    def sealed(self) -> bool:
        """Return whether all shares are sealed."""
        return all(share.sealed for share in self.shares.values())

    def received(self, outputs: Iterable[int]) -> set[int]:
        """Return the given outputs that are in no open share: to receive them again takes a new share."""
        coming = {output for share in self.open_shares() for output in share.outputs}
        return set(outputs) - coming

    def open_shares(self) -> list[Share]:
        """Return the shares that are not sealed."""
        return [share for share in self.shares.values() if not share.sealed]


def deal(outputs: Iterable[int], workers: Sequence[str], owned: Mapping[str, int]) -> dict[int, str]:
    """Distribute outputs among workers, neighbours together, since a shard is one range of sorted rows.

    ``owned``: the number of outputs that each worker already has to assemble; workers with fewer get more.
    Returns the worker for each output.
    """
    given = dict.fromkeys(workers, 0)
    outputs = sorted(outputs)
    for _ in outputs:
        least = min(workers, key=lambda worker: owned.get(worker, 0) + given[worker])
        given[least] += 1
    order = itertools.chain.from_iterable([worker] * number for worker, number in given.items())
    return dict(zip(outputs, order, strict=True))


def fair_share(owners: Mapping[int, str], workers: int) -> set[int]:
    """Return the outputs to give to one more worker, taken from the owners with the most of them."""
    left, taken = Counter(owners.values()), set[int]()
    for _ in range(len(owners) // workers):
        ((most, _),) = left.most_common(1)
        taken.add(max(output for output, owner in owners.items() if owner == most and output not in taken))
        left[most] -= 1
    return taken
