"""The room on workers while replicas are handed out: what was decided counts at once. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from sortedcontainers import SortedKeyList

from dask_gpurt.placement.cost import Space


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
