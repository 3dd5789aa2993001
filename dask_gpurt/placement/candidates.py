"""Which workers are looked at for a task: where its inputs are, and a bounded few with room near to them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from heapq import nsmallest
from typing import Any

from dask.typing import Key

from dask_gpurt.placement import cost
from dask_gpurt.placement.cost import Candidate
from dask_gpurt.placement.estimates import Estimates, InputRef, is_alias
from dask_gpurt.placement.free_memory import Headroom
from dask_gpurt.placement.queueing import Loads, Neighbourhood, siblings, whereabouts
from dask_gpurt.placement.routes import EVERYWHERE, neighbourhoods
from dask_gpurt.topology import Topology

#: The most holders of inputs that are looked at, those with the most bytes.
MOST_HOLDERS = 4
#: The least loaded workers that are looked at in each neighbourhood, and where nobody near will do.
NEAR, FAR = 2, 16
#: Bytes of a result that nobody has seen yet: enough to keep siblings together, too few to outweigh a task.
UNKNOWN_SIZE = 1 << 20
#: Seconds by which it is certain that a task will be done earlier elsewhere.
CERTAIN = 0.05
#: Seconds for which it does not matter whether inputs move: the scheduler spends a part of that on a task.
NO_TIME = 0.001
#: By how much the work before a task may take longer or shorter than expected, as a part of it.
UNSURE = 1 / 3


class Chooser:
    """Candidates for a task, with their costs.

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
        self.estimates = Estimates(state, topology, headroom)
        # The addresses of workers with room. Dask's objects for workers have a hash in Python, which is slow.
        self._loads: Loads[str] = Loads()

    # ---- what is known of the workers ------------------------------------------------

    def look_at(self, ws: Any) -> bool:
        """Take notice of what a running worker has to do; tell whether it has room."""
        address, load = ws.address, math.ceil(self.estimates.load(ws)) // ws.nthreads
        if not self.estimates.has_room(ws):
            self._loads.discard(address)
            return False
        if not self._loads.change(address, load):
            self._loads.put(address, load, neighbourhoods(self._topology, address, ws.host))
        return True

    def look_anew(self, ws: Any) -> None:
        """The place of a worker may be another than before."""
        names = neighbourhoods(self._topology, ws.address, ws.host)
        if names != self._loads.neighbourhoods(ws.address):
            self._loads.discard(ws.address)
            self.estimates.routes.clear()
            self.estimates.shard_routes.clear()

    def forget(self, worker: str) -> None:
        """Dask has removed a worker."""
        self._loads.discard(worker)
        self.estimates.on_worker_removed(worker)

    def neighbourhoods(self, ws: Any) -> Sequence[Neighbourhood]:
        """What a worker belongs to, from near to far."""
        return self._loads.neighbourhoods(ws.address) or neighbourhoods(self._topology, ws.address, ws.host)

    def home(self, ws: Any) -> Neighbourhood:
        """The NVLink domain of a worker, or else its host."""
        return next(name for name in self.neighbourhoods(ws) if name[0] in ("nvlink", "host"))

    def least_loaded(self, neighbourhood: Neighbourhood, number: int) -> Iterator[Any]:
        """Running workers with room, the least loaded of a neighbourhood first."""
        workers, running = self._state.workers, self._state.running
        for address in list(self._loads.least(neighbourhood, number)):
            ws = workers.get(address)
            if ws is not None and ws in running:
                yield ws
            else:  # it has stopped since it was looked at
                self._loads.discard(address)

    def least_loaded_of(self, workers: Collection[Any]) -> Any | None:
        """Of some workers one with little to do; None if many others have less, or these no room.

        The only one of a set is looked up here too: to iterate over a set that has had many takes long.
        """
        for ws in self.least_loaded(EVERYWHERE, FAR):
            if ws in workers:
                return ws
        return next(iter(workers)) if len(workers) == 1 else None

    def has_room(self, ws: Any) -> bool:
        """Whether a worker had room when it was last looked at."""
        return ws.address in self._loads

    def anyone_has_room(self) -> bool:
        """Whether there is a running worker with room."""
        while len(self._loads):
            if any(True for _ in self.least_loaded(EVERYWHERE, FAR)):
                return True
        return False

    # ---- tasks that are about to be placed ---------------------------------------------

    def arrived(self, tasks: Iterable[Any]) -> None:
        """Of tasks that have come in one graph those count at once whose inputs are all there."""
        self.settle()
        for ts in tasks:
            valid, demand = self._state.valid_workers(ts), self.estimates.demand(ts)
            holders = self._holders(demand.inputs)
            home = next((ws for ws in holders if valid is None or ws in valid), None)
            if home is not None:
                self.estimates.on_arriving(ts, demand, home.address)
                self._look_at_again(home.address)

    def placing(self, ts: Any) -> None:
        """A task is about to be placed: it is not expected anywhere any more."""
        self._look_at_again(self.estimates.arrivals.remove(ts.key))

    def ended(self, key: Key) -> None:
        """A task is no longer on its worker."""
        self._look_at_again(self.estimates.on_task_ended(key))

    def settle(self) -> None:
        """All tasks of a graph that could be placed have been."""
        if self.estimates.arrivals:
            for address in self.estimates.arrivals.clear():
                self._look_at_again(address)

    def _look_at_again(self, worker: str | None) -> None:
        ws = self._state.workers.get(worker) if worker is not None else None
        if ws is not None and ws in self._state.running:
            self.look_at(ws)

    # ---- tasks with inputs -------------------------------------------------------------

    def candidates(self, ts: Any, valid: Collection[Any] | None) -> list[Candidate]:
        """The costs of a task where its inputs are, and on a few workers near to them.

        Parameters
        ----------
        valid
            The running workers that it may run on; None for all that run.
        """
        allowed = self._state.running if valid is None else valid
        demand = self.estimates.demand(ts)
        estimate = partial(self.estimates.cost, demand)
        if len(allowed) == 1:
            return [estimate(ws) for ws in allowed]
        holders = [ws for ws in self._holders(demand.inputs) if ws in allowed]
        found = {ws.address: estimate(ws) for ws in holders}
        if found and is_alias(ts):  # what it names is there already, whoever else has room
            return list(found.values())
        if found:
            if len(found) > 1:
                stays = _with_most(found.values())
                found = {worker: each for worker, each in found.items() if self._is_no_worse(each, stays)}
            first = cost.best(found.values())
            forced = not first.terms.fits or _waits_for_inputs(first)
            if forced or (_is_late(first) and self._may_move(ts)):
                near = [estimate(ws) for ws in self._near(holders[0], first) if ws in allowed]
                found.update((each.worker, each) for each in near if forced or self._pays(each, first))
        if not any(candidate.terms.fits for candidate in found.values()):
            found.update((ws.address, estimate(ws)) for ws in self._far(allowed))
        return list(found.values())

    def _holders(self, needs: Collection[InputRef]) -> list[Any]:
        """Those with the most bytes of inputs, the most first; of many with as much, the least work."""
        held: defaultdict[str, int] = defaultdict(int)
        for _, nbytes, replicas in needs:
            for address in replicas:
                held[address] += nbytes
        found = [self._state.workers[address] for address in held]
        if len(found) > 1:
            found.sort(key=lambda ws: (held[ws.address], -ws.occupancy, ws.address), reverse=True)
        return found[:MOST_HOLDERS]

    def _may_move(self, ts: Any) -> bool:
        """Whether inputs may be moved only to run a task earlier.

        Not for a guess, while nobody knows how long such tasks take: stealing corrects that. And not while
        root tasks are queued: then no worker is idle for long.
        """
        return ts.prefix.duration_average >= 0 and not self._state.queued

    def _is_no_worse(self, holder: Candidate, most: Candidate) -> bool:
        """Whether one that holds inputs moves no more than the one with most of them, or it pays."""
        return holder.missing <= most.missing or self._pays(holder, most)

    def _pays(self, candidate: Candidate, holder: Candidate) -> bool:
        """Whether to move inputs takes no longer than what is gained: their holder is done a task earlier.

        What is on its way before them comes while others run, and that two workers meet is for all that
        follows too. It has to be certain that a task is done earlier, and one that waits there, too, is to
        gain a part of that: nobody knows better than that who will be idle when, and whoever is first may
        still steal it. Of a short task half of what it takes is enough where inputs move in no time.
        """
        before = self.estimates.seconds_inbound(self._state.workers[candidate.worker])
        alone = candidate.terms.moving - (before if candidate.missing else 0.0)
        meeting = self.estimates.routes.contact(holder.worker, candidate.worker)
        running = holder.terms.running
        gained = holder.terms.seconds - candidate.terms.seconds
        least = min(running / 2, CERTAIN) if alone <= NO_TIME else CERTAIN
        enough = max(least, UNSURE * candidate.terms.waiting)
        return alone - meeting - holder.terms.moving <= running + holder.terms.room and gained >= enough

    def _near(self, holder: Any, first: Candidate) -> Iterator[Any]:
        """Workers around a holder with less to do than the first choice so far, and than any nearer one."""
        least = first.load if first.terms.fits else math.inf
        for name in self.neighbourhoods(holder):
            lowest = self._loads.lowest(name)
            if lowest is not None and lowest < least:
                least = lowest
                yield from self.least_loaded(name, NEAR)

    def _far(self, allowed: Collection[Any]) -> Collection[Any]:
        """A few workers, where there are no inputs or nobody around them will do."""
        if len(allowed) <= FAR:
            return allowed
        found = [ws for ws in self.least_loaded(EVERYWHERE, FAR) if ws in allowed]
        return found or nsmallest(FAR, allowed, key=lambda ws: (len(ws.processing) / ws.nthreads, ws.address))

    # ---- root tasks ----------------------------------------------------------------------

    def root_candidates(self, ts: Any, open_to: Collection[Any], slot: Any | None = None) -> list[Candidate]:
        """The costs of a root task: its result is to be near those that will be needed together with it.

        Parameters
        ----------
        open_to
            The workers that take root tasks now.
        slot
            The one of these with the least to do, where it is known already.
        """
        slot = slot or self.least_loaded_of(open_to)
        demand = self.estimates.demand(ts)
        if len(open_to) == 1:
            return [self.estimates.cost(demand, slot)]
        anchor = next((ws for sibling in siblings(ts) if (ws := whereabouts(sibling))), None)
        nbytes = int(demand.nbytes) or UNKNOWN_SIZE
        found = [self.estimates.cost(demand, ws) for ws in self._open(anchor, open_to, slot)]
        waits = anchor is not None and any([each.terms.waiting for each in found])
        if waits and self._fill_all_slots(ts.group):
            found = [_at_once(each) if each.terms.waiting else each for each in found]
        return [self._gathered(each, anchor, nbytes) for each in found]

    def _fill_all_slots(self, group: Any) -> bool:
        """Whether root tasks of a group take all slots that Dask's queue has.

        Then one of them waits in each slot: it costs nothing to wait in that near to a sibling.
        """
        saturation, states = self._state.WORKER_SATURATION, group.states
        if math.isinf(saturation):  # there is no queue
            return False
        over = states["memory"] + states["erred"] + states["forgotten"]
        if group.stop:  # before the first is done, those are released that have not begun
            over += states["released"]
        slots = math.ceil(saturation) * self._state.total_nthreads
        return bool(len(group) - over >= slots)

    def _open(self, anchor: Any | None, open_to: Collection[Any], slot: Any | None) -> Collection[Any]:
        """Of the open workers an anchor, the least loaded around it, and the least loaded of all."""
        found: dict[Any, None] = {}
        if anchor is not None:
            if anchor in open_to and self.has_room(anchor):
                found[anchor] = None
            names = self.neighbourhoods(anchor)
            near = ([ws for ws in self.least_loaded(name, NEAR) if ws in open_to] for name in names)
            found.update(dict.fromkeys(next(filter(None, near), ())))
        if slot is not None:
            found[slot] = None
        return found

    def _gathered(self, candidate: Candidate, anchor: Any | None, nbytes: int) -> Candidate:
        """With the time that the result will take to a sibling."""
        if anchor is None or anchor.address == candidate.worker:
            return candidate
        apart = self._topology.seconds(candidate.worker, anchor.address, nbytes, by_comms=True)
        return candidate._replace(terms=candidate.terms._replace(moving=candidate.terms.moving + apart))


def _at_once(candidate: Candidate) -> Candidate:
    """The same without waiting."""
    return candidate._replace(terms=candidate.terms._replace(waiting=0.0))


def _with_most(holders: Iterable[Candidate]) -> Candidate:
    """The holder for which the fewest bytes move, of those with room if there are any."""
    return min(holders, key=lambda each: (not each.terms.fits, each.missing, cost.rank(each)))


def _is_late(candidate: Candidate) -> bool:
    """Whether another worker could run a task earlier, wherever its inputs are."""
    waiting, _, moving, room, _ = candidate.terms
    return waiting > 0 or moving > 0 or room > 0


def _waits_for_inputs(candidate: Candidate) -> bool:
    """Whether inputs have to come, and that takes longer than the work before it."""
    return candidate.missing > 0 and candidate.terms.moving > candidate.terms.waiting
