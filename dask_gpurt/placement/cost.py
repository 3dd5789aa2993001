"""Compare workers for a task by the time until it would have run there, in seconds. Pure.

The time to move its inputs comes from routes between workers, which are cached.

Decisions and their figures: ``docs/decisions/placement.md``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from dask_gpurt.topology import Topology
from dask_gpurt.topology.model import BETWEEN_HOSTS

#: Routes expire, to use current speeds, after this many lookups, and more for each route that was worked out,
#: which keeps the overhead small, up to a limit.
MIN_LOOKUPS, LOOKUPS_PER_ROUTE, MAX_LOOKUPS = 1_000, 50, 50_000


# ---- candidates ----------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """Describe a worker that may run a task, and the cost there.

    ``waiting``: seconds until earlier tasks leave a thread free.
    ``moving``: seconds to move the task's inputs to the worker.
    ``fits``: whether its inputs and its result fit into memory.
    ``load``: the worker's tasks per thread; breaks ties of the cost.
    ``held``: the bytes that it holds; breaks ties of cost and load.
    ``missing``: the bytes of inputs that it lacks.
    """

    worker: str
    waiting: float
    moving: float
    running: float
    fits: bool
    load: float = 0
    held: float = 0
    missing: int = 0

    @property
    def seconds(self) -> float:
        """Return the sum of all terms."""
        return self.waiting + self.moving + self.running


def rank(candidate: Candidate) -> tuple[bool, float, float, float, str]:
    """Return a sort key; better candidates are smaller.

    Fitting into memory comes before time. The address comes last, so that decisions are deterministic.
    """
    worker, waiting, moving, running, fits, load, held, _ = candidate
    return not fits, waiting + moving + running, load, held, worker


def best(candidates: Iterable[Candidate]) -> Candidate:
    """Return the best candidate.

    Raises ValueError if there is none.
    """
    return min(candidates, key=rank)


def waiting(work: float, tasks: int, threads: int) -> float:
    """Return the time until a thread is free, in seconds.

    ``work``: the work of all tasks on the worker, in seconds.
    """
    if tasks < threads:
        return 0.0
    return work * (tasks - threads + 1) / (tasks * threads)


# ---- routes --------------------------------------------------------------------------------------------


class Route(NamedTuple):
    """Describe how fast bytes get from one worker to another.

    ``latency``: time before the first byte, in seconds.
    ``seconds_per_byte``: time for each byte, in seconds.
    """

    latency: float = 0.0
    seconds_per_byte: float = 0.0


class End(NamedTuple):
    """Describe one end of a route.

    ``worker``: the address of the worker.
    ``host``: its host.
    ``kind``: a number that all workers share whose routes to other hosts are the same.
    """

    worker: str
    host: str
    kind: int


class Routes:
    """Cache routes between workers: by pair of workers where these are near, else by kind of worker.

    A large cluster has far more pairs of workers than tasks, or than room in a cache. But between hosts all
    links of a class are alike.

    ``topology``: the source of speeds. It learns continuously, so routes expire after some lookups.
    """

    def __init__(self, topology: Topology):
        self._topology = topology
        self._known: dict[tuple[Hashable, Hashable], Route] = {}
        self._ends: dict[str, End] = {}
        self._kinds: dict[Hashable, int] = {}
        #: Lookups until the routes expire.
        self._left = 0

    def end(self, worker: str) -> End:
        """Return the end of routes at a worker, valid until a place changes."""
        return self._ends.get(worker) or self._end(worker)

    def between(self, source: End, target: End) -> Route:
        """Return the route of dependencies, which go over Dask's comms, from one worker to another."""
        self._left -= 1
        if self._left < 0:
            self._expire()
        worker, host, kind = source
        other, other_host, other_kind = target
        pair: tuple[Hashable, Hashable] = (worker, other) if host == other_host else (kind, other_kind)
        return self._known.get(pair) or self._work_out(pair, worker, other)

    def clear(self) -> None:
        """Clear the cache, as the place of a worker has changed."""
        self._ends.clear()
        self._kinds.clear()
        self._expire()

    def _expire(self) -> None:
        """Drop all routes, so that they use the topology's current speeds."""
        self._known.clear()
        self._left = MIN_LOOKUPS

    def _end(self, worker: str) -> End:
        place = self._topology.place(worker)
        if place is None:  # as if alone on a host of its own
            found = End(worker, worker, self._kind(None))
        else:
            alike = place.rdma, place.by_tcp, self._workers_on_host_of(worker)
            found = End(worker, place.host, self._kind(alike))
        self._ends[worker] = found
        return found

    def _kind(self, alike: Hashable) -> int:
        """Return a number for workers with an equal value."""
        return self._kinds.setdefault(alike, len(self._kinds))

    def _work_out(self, pair: tuple[Hashable, Hashable], source: str, target: str) -> Route:
        link, speed = self._topology.way(source, target, by_comms=True)
        # Workers of a host share its link, and mostly send to other hosts at the same time.
        sharing = self._workers_on_host_of(source) if link in BETWEEN_HOSTS else 1
        route = self._known[pair] = Route(speed.latency, sharing / speed.bandwidth)
        self._left = min(MAX_LOOKUPS, self._left + LOOKUPS_PER_ROUTE)
        return route

    def _workers_on_host_of(self, worker: str) -> int:
        place = self._topology.place(worker)
        return 1 if place is None else len(self._topology.on_host(place.host))
