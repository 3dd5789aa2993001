"""How much room workers have, and in which tier their data is: what the ledger says, or else Dask."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from dask.typing import Key
from dask.utils import key_split
from sortedcontainers import SortedKeyList

from dask_gpurt.memory.ledger import Picture, Room
from dask_gpurt.memory.tiers import Tier
from dask_gpurt.placement.cost import Space


class Headroom(Protocol):
    """What placement asks about memory. Called often: answers come from what is known, nobody is asked."""

    def room(self, worker: str) -> Room:
        """The room on a worker."""

    def told(self, worker: str) -> bool:
        """Whether a worker has told of its room; otherwise that is a guess, and what it may spill unknown."""

    def tier(self, worker: str, key: Key) -> Tier:
        """Where the data of a key is on a worker that holds it; ``Tier.DEVICE`` if unknown."""


class LedgerHeadroom:
    """The picture of all ledgers; for a worker that has sent none, what Dask knows.

    Parameters
    ----------
    picture
        As the plugin keeps it.
    workers
        Dask's ``WorkerState`` by address.
    """

    def __init__(self, picture: Picture, workers: Mapping[str, Any]):
        self._picture = picture
        self._workers = workers

    def room(self, worker: str) -> Room:
        """The room on a worker; without end on one that is gone, or has no memory limit."""
        return self._picture.room(worker) or self._known_to_dask(worker)

    def told(self, worker: str) -> bool:
        """Whether a worker has sent its ledger."""
        return self._picture.room(worker) is not None

    def _known_to_dask(self, worker: str) -> Room:
        state = self._workers.get(worker)
        if not state or not state.memory_limit:
            return Room(math.inf)
        return Room(state.memory_limit - state.nbytes, live=state.memory_limit)

    def tier(self, worker: str, key: Key) -> Tier:
        """The tier with most of the bytes that tasks of the same prefix have left on a worker."""
        if not self._picture.spilled(worker):
            return Tier.DEVICE
        return self._picture.fullest(worker, key_split(key)) or Tier.DEVICE


class Spaces:
    """Room by worker, looked up once and kept up to date from then on.

    Parameters
    ----------
    look_up
        The room on a worker.
    """

    def __init__(self, look_up: Callable[[str], Space]):
        self._look_up = look_up
        self._known: dict[str, Space] = {}
        #: By free and by all room, the most last; made when somebody asks.
        self._orders: list[SortedKeyList] = []

    def __getitem__(self, worker: str) -> Space:
        space = self._known.get(worker)
        if space is None:
            space = self._known[worker] = self._look_up(worker)
        return space

    def take(self, worker: str, nbytes: float) -> None:
        """A worker gets so many bytes into its live tier, or loses them."""
        space = self[worker]
        orders = [order for order in self._orders if worker in order]
        for order in orders:
            order.remove(worker)
        self._known[worker] = space._replace(free=space.free - nbytes)
        for order in orders:
            order.add(worker)

    def roomiest(self, workers: Iterable[str]) -> tuple[Iterator[str], Iterator[str]]:
        """All workers, those with the most free room first; and those with the most of all room first.

        Parameters
        ----------
        workers
            Those that there are. They are put in order once.
        """
        if not self._orders:
            names = list(workers)
            self._orders = [
                SortedKeyList(names, key=lambda worker: (self[worker].free, worker)),
                SortedKeyList(names, key=lambda worker: (self[worker].free + self[worker].below, worker)),
            ]
        free, total = self._orders
        return reversed(free), reversed(total)
