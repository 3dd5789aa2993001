"""Which workers may run a task, and what it would cost there: the state of Dask's scheduler put into figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from heapq import nlargest
from itertools import islice
from typing import Any

from dask_gpurt.placement import cost
from dask_gpurt.placement.cost import Candidate, Space, Terms
from dask_gpurt.placement.headroom import Headroom
from dask_gpurt.placement.loads import Loads, Neighbourhood
from dask_gpurt.placement.routes import EVERYWHERE, LINK_OF_TIER, neighbourhoods, route
from dask_gpurt.topology import Topology

#: The most holders of inputs that are looked at, those with the most bytes; of one input, the most replicas.
MOST_HOLDERS, MOST_REPLICAS = 4, 4
#: The most workers that are looked at where a task may run on few only.
MOST_VALID = 16
#: The least loaded workers that are looked at in each neighbourhood.
NEAR = 2
#: The most siblings that are looked at, and the links of the chain of single inputs that leads to them.
MOST_SIBLINGS, LONGEST_CHAIN = 16, 4
#: What the pace of a worker changes with each task that it has done, and what it stays within.
PACE_WEIGHT, SLOWEST, FASTEST = 0.1, 10.0, 0.1
#: Bytes of a result that nobody has seen yet: enough to keep siblings together, too few to outweigh a task.
UNKNOWN_SIZE = 1 << 20

_DONE = ("memory", "released", "forgotten", "erred")


class Chooser:
    """Candidates for a task, and their costs.

    Parameters
    ----------
    state
        Dask's ``SchedulerState``.
    topology
        Where the workers are, and how fast the links between them are.
    headroom
        What room they have.
    """

    def __init__(self, state: Any, topology: Topology, headroom: Headroom):
        self._state = state
        self._topology = topology
        self._headroom = headroom
        #: The workers with room.
        self.loads: Loads[Any] = Loads()
        self._paces: dict[str, float] = {}
        #: Seconds per byte of what is on its way to a worker, by the costs that it was chosen with.
        self._inbound: dict[str, float] = {}

    # ---- what is known of the workers ------------------------------------------------

    def look_at(self, ws: Any) -> bool:
        """Take notice of the load of a worker; tell whether it has room for what may come next."""
        tasks, state = len(ws.processing), self._state
        need = ws._network_occ
        if state.queued:
            need += (tasks + 1) * _size(state.queued.peek().prefix)
        room = self._headroom.room(ws.address)
        if room.free + room.below <= need:
            self.loads.discard(ws)
            return False
        if ws in self.loads:
            self.loads.change(ws, tasks // ws.nthreads)
        elif ws in state.running:
            self.loads.put(ws, tasks // ws.nthreads, self.neighbourhoods(ws))
        return True

    def forget(self, worker: str) -> None:
        """Dask has removed a worker."""
        self._paces.pop(worker, None)
        self._inbound.pop(worker, None)

    def neighbourhoods(self, ws: Any) -> tuple[Neighbourhood, ...]:
        """What a worker belongs to, from near to far."""
        return neighbourhoods(self._topology, ws.address, ws.host)

    def observe_pace(self, worker: str, seconds: float, usual: float) -> None:
        """A task has taken so many seconds of work, where others like it usually take ``usual``."""
        if usual > 0 and seconds > 0:
            pace = self._paces.get(worker, 1.0)
            seen = min(max(seconds / usual, FASTEST), SLOWEST)
            self._paces[worker] = pace + PACE_WEIGHT * (seen - pace)

    def least_loaded(self, neighbourhood: Neighbourhood, number: int) -> Iterator[Any]:
        """Running workers with room, the least loaded of a neighbourhood first; those that are gone are left out."""
        found = list(self.loads.least(neighbourhood, number))
        for ws in found:
            if ws in self._state.running:
                yield ws
            else:
                self.loads.discard(ws)

    def least_loaded_of(self, workers: Collection[Any]) -> Any | None:
        """One of some workers with the least load; None if they all have more to do than many others, or no room."""
        return next((ws for ws in self.least_loaded(EVERYWHERE, MOST_VALID) if ws in workers), None)

    def anyone_has_room(self) -> bool:
        """Whether there is a running worker with room."""
        while len(self.loads):
            if any(True for _ in self.least_loaded(EVERYWHERE, MOST_VALID)):
                return True
        return False

    # ---- candidates ------------------------------------------------------------------

    def candidates(self, ts: Any, valid: Collection[Any] | None) -> list[Candidate]:
        """The costs of a task where its inputs are, and on a few workers near to them.

        Parameters
        ----------
        valid
            The workers that it may run on; None for all that run.
        """
        allowed = self._state.running if valid is None else valid
        if len(allowed) <= MOST_HOLDERS:
            return [self.cost(ts, ws) for ws in allowed]
        holders = [ws for ws in _holders(ts.dependencies) if ws in allowed]
        found = {ws: self.cost(ts, ws) for ws in holders}
        first = cost.best(found.values()) if found else None
        if first is None or not first.terms.fits or _needs_better(first.terms):
            near = self._near(holders, None if first is None or not first.terms.fits else first)
            found.update((ws, self.cost(ts, ws)) for ws in near if ws in allowed and ws not in found)
        if not found or not any(candidate.terms.fits for candidate in found.values()):
            found.update((ws, self.cost(ts, ws)) for ws in self._anywhere(allowed) if ws not in found)
        return list(found.values())

    def _near(self, holders: list[Any], first: Candidate | None) -> dict[Any, None]:
        """The least loaded workers around the holder with the most bytes; only those with less to do than the first."""
        names = self.neighbourhoods(holders[0]) if holders else (EVERYWHERE,)
        found: dict[Any, None] = {}
        for name in names:
            for ws in self.least_loaded(name, NEAR):
                if first is None or len(ws.processing) < first.load * ws.nthreads:
                    found[ws] = None
        return found

    def _anywhere(self, allowed: Collection[Any]) -> Iterable[Any]:
        """A few workers, where nobody around the inputs will do."""
        if len(allowed) <= MOST_VALID:
            return allowed
        found = [ws for ws in self.least_loaded(EVERYWHERE, MOST_VALID) if ws in allowed]
        return found or sorted(allowed, key=_load)[:MOST_VALID]

    def root_candidates(self, ts: Any, open_to: Collection[Any]) -> list[Candidate]:
        """The costs of a root task: its result is to be near those that will be needed together with it.

        Parameters
        ----------
        open_to
            The workers that take root tasks now.
        """
        anchor = next((ws for sibling in siblings(ts) if (ws := _whereabouts(sibling))), None)
        names = self.neighbourhoods(anchor) if anchor else (EVERYWHERE,)
        found = dict.fromkeys(ws for name in names for ws in self.least_loaded(name, NEAR) if ws in open_to)
        if not found:
            found = dict.fromkeys(ws for ws in self.least_loaded(EVERYWHERE, MOST_VALID) if ws in open_to)
        size = int(_size(ts.prefix) or UNKNOWN_SIZE)
        return [self._with_gathering(self.cost(ts, ws), anchor, size) for ws in found]

    def _with_gathering(self, candidate: Candidate, anchor: Any | None, size: int) -> Candidate:
        if anchor is None or anchor.address == candidate.worker:
            return candidate
        apart = self._topology.seconds(candidate.worker, anchor.address, size)
        return candidate._replace(terms=candidate.terms._replace(moving=candidate.terms.moving + apart))

    # ---- the cost of one -------------------------------------------------------------

    def cost(self, ts: Any, ws: Any) -> Candidate:
        """What a task costs on a worker."""
        missing, moving, coming = self.inputs(ts, ws)
        work, promised = self._work(ws)
        pace = self._paces.get(ws.address, 1.0)
        tasks, threads = len(ws.processing), ws.nthreads
        if missing or coming:
            moving += self._seconds_inbound(ws)
        seconds, fits = cost.room(missing + _size(ts.prefix), self._space(ws.address, promised))
        terms = Terms(
            cost.waiting(work, tasks, threads, pace),
            self._state._get_prefix_duration(ts.prefix) * pace,
            moving,
            seconds,
            fits,
        )
        return Candidate(ws.address, terms, tasks / threads, ws.nbytes, missing)

    def inputs(self, ts: Any, ws: Any) -> tuple[int, float, bool]:
        """Bytes of inputs that a worker lacks, the seconds to get all inputs, and whether some are on their way.

        What is on its way counts for the task that it was sent for.
        """
        missing, seconds, coming = 0, 0.0, False
        here, on_their_way = ws.has_what, ws.needs_what
        for dts in ts.dependencies:
            if dts in on_their_way:
                coming = True
                continue
            nbytes = dts.get_nbytes()
            if dts in here:
                holders: Iterable[Any] = (ws,)
            else:
                missing += nbytes
                holders = _replicas(dts)
            seconds += cost.moving(
                nbytes,
                [
                    route(
                        self._topology, holder.address, self._headroom.tier(holder.address, dts.key), ws.address
                    )
                    for holder in holders
                ],
            )
        return missing, seconds, coming

    def _work(self, ws: Any) -> tuple[float, float]:
        """Seconds of the work of a worker, and bytes that are promised there.

        These are what comes in, and the results of the tasks that run next; further ones find their inputs gone.
        """
        state, work, results = self._state, 0.0, 0.0
        for name, count in ws.task_prefix_count.items():
            prefix = state.task_prefixes[name]
            work += state._get_prefix_duration(prefix) * count
            results += _size(prefix) * count
        return work, ws._network_occ + results * min(1.0, ws.nthreads / max(1, len(ws.processing)))

    def _space(self, worker: str, promised: float) -> Space:
        free, below, tier = self._headroom.room(worker)
        spill = self._topology.tier_speed(LINK_OF_TIER[tier], worker) if tier else None
        return Space(free - promised, below, spill)

    # ---- transfers that were chosen ----------------------------------------------------

    def took(self, candidate: Candidate, ws: Any) -> None:
        """A task is about to be given to a worker: the inputs that it lacks will be on their way."""
        if candidate.missing:
            self._inbound[ws.address] = candidate.terms.moving / (ws._network_occ + candidate.missing)

    def _seconds_inbound(self, ws: Any) -> float:
        """Until what is on its way to a worker has come."""
        if not ws._network_occ:
            return 0.0
        return float(ws._network_occ * self._inbound.get(ws.address, 1 / self._state.bandwidth))


def siblings(ts: Any) -> Iterator[Any]:
    """Some of the tasks whose results will be needed together with that of a task, not of a group that all need."""
    for dependent in islice(ts.dependents, 1):
        for _ in range(LONGEST_CHAIN):
            if len(dependent.dependencies) > 1:
                break
            dependent = next(iter(dependent.dependents), None)
            if dependent is None:
                return
        if 1 < len(dependent.dependencies) <= MOST_SIBLINGS:
            yield from (origin for sibling in dependent.dependencies if (origin := _origin(sibling)) is not ts)


def _origin(ts: Any) -> Any:
    """The head of the chain of single inputs that ends in a task, or what of it is known to be somewhere."""
    for _ in range(LONGEST_CHAIN):
        if len(ts.dependencies) != 1 or ts.who_has or ts.processing_on:
            break
        ts = next(iter(ts.dependencies))
    return ts


def _whereabouts(ts: Any) -> Any | None:
    if ts.processing_on is not None:
        return ts.processing_on
    return next(iter(ts.who_has), None) if ts.who_has else None


def _replicas(dts: Any) -> Iterable[Any]:
    return islice(dts.who_has, MOST_REPLICAS)


def _holders(dependencies: Collection[Any]) -> list[Any]:
    """Those with the most bytes of the inputs, the most first."""
    held: defaultdict[Any, int] = defaultdict(int)
    for dts in dependencies:
        nbytes = dts.get_nbytes()
        for ws in _replicas(dts) if len(dts.who_has) > MOST_REPLICAS else dts.who_has:
            held[ws] += nbytes
    if len(held) == 1:
        return list(held)
    return nlargest(MOST_HOLDERS, held, key=lambda ws: (held[ws], ws.address))


def _needs_better(terms: Terms) -> bool:
    """Whether another worker could do better, whatever its inputs cost there."""
    return terms.waiting > 0 or terms.moving > 0 or terms.room > 0


def _load(ws: Any) -> tuple[float, str]:
    return len(ws.processing) / ws.nthreads, ws.address


def _size(prefix: Any) -> float:
    """The mean size of results of a prefix, 0 while there are none."""
    if not prefix.nbytes_total:
        return 0.0
    states = prefix.states
    return float(prefix.nbytes_total) / max(1, sum(states[name] for name in _DONE))
