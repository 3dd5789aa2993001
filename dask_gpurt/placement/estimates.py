"""What a task would cost on a worker, with the figures that the state of Dask's scheduler has for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any, NamedTuple

from dask.typing import Key

from dask_gpurt.dask_hooks.graph import Alias
from dask_gpurt.dask_hooks.scheduler import network_occupancy, prefix_duration
from dask_gpurt.memory.ledger import Room
from dask_gpurt.memory.tiers import Tier
from dask_gpurt.placement import cost
from dask_gpurt.placement.behind import Behind
from dask_gpurt.placement.cost import NO_WAY, Candidate, Space, Terms
from dask_gpurt.placement.expected import Expected
from dask_gpurt.placement.headroom import Headroom
from dask_gpurt.placement.lengths import Lengths
from dask_gpurt.placement.paces import Paces
from dask_gpurt.placement.routes import Routes
from dask_gpurt.topology import Topology

#: The most replicas of an input that are looked at.
MOST_REPLICAS = 4
#: Tasks behind an alias that are looked at.
MOST_DEPENDENTS = 8
#: An input, its bytes, and the tiers that it is in on some workers that have it.
Need = tuple[Any, int, dict[str, Tier]]
#: Of a task without inputs: none is missing, in no time, and none is coming.
NOTHING = 0, 0.0, False


class Demand(NamedTuple):
    """What a task asks of whichever worker runs it: looked up once for all that are compared.

    Parameters
    ----------
    inputs
        What it needs.
    sources
        The prefixes of the tasks that make these.
    seconds
        Its work on a worker of pace 1.
    nbytes
        Its result.
    together
        Its inputs and its result: what has to be live on its worker at once.
    """

    inputs: Collection[Need]
    sources: Collection[str]
    seconds: float
    nbytes: float
    together: float


class Estimates:
    """The costs of tasks on workers.

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
        self._headroom = headroom
        self.routes, self.routes_of_shards = Routes(topology), Routes(topology, by_comms=False)
        self.lengths, self.paces = Lengths(), Paces()
        #: Tasks of a graph that are about to be placed, where most of their inputs are.
        self.arrivals = Expected()
        # How much longer than usual the tasks take that were given to workers, by their inputs.
        self._surplus = Expected()
        # Tasks behind aliases, where these are.
        self._behind = Behind()
        #: By prefix, the least part of its inputs that the result of a task has been.
        self._least: dict[str, float] = {}
        #: Seconds per byte of what is on its way to a worker, by the costs that it was chosen with.
        self._inbound: dict[str, float] = {}
        #: What Dask counted on a worker when it last told its room, what its live tier holds, and the most
        #: that one holds: for what is larger than all of them those are as good as any.
        self._told: dict[str, int] = {}
        self._live: dict[str, float] = {}
        self._largest = 0.0

    def demand(self, ts: Any) -> Demand:
        """What a task asks of workers."""
        prefix, needs = ts.prefix, self.needs(ts)
        inputs = sum([nbytes for _, nbytes, _ in needs])
        if needs and is_alias(ts):
            return Demand(needs, (), 0.0, 0.0, inputs)
        seconds = self.lengths.seconds(prefix.name, inputs)
        if seconds is None:
            seconds = prefix_duration(self._state, prefix)
        if not needs:
            nbytes = size(prefix)
            return Demand((), (), seconds, nbytes, nbytes)
        nbytes = max(size(prefix), self._least.get(prefix.name, 0.0) * inputs)
        sources = {dts.prefix.name for dts in ts.dependencies}
        return Demand(needs, sources, seconds, nbytes, inputs + nbytes)

    def _usual(self, prefix: Any) -> float:
        """Seconds of work of a task of a prefix, whatever its inputs."""
        seconds = self.lengths.mean(prefix.name)
        return prefix_duration(self._state, prefix) if seconds is None else seconds

    def needs(self, ts: Any) -> Collection[Need]:
        """The inputs of a task."""
        if not ts.dependencies:
            return ()
        tier = self._headroom.tier
        return [
            (
                dts,
                dts.get_nbytes(),
                {ws.address: tier(ws.address, dts.key) for ws in islice(dts.who_has, MOST_REPLICAS)},
            )
            for dts in ts.dependencies
        ]

    def cost(self, demand: Demand, ws: Any) -> Candidate:
        """What a task costs on a worker."""
        needs, sources, seconds, nbytes, together = demand
        missing, moving, coming = self.inputs(needs, ws) if needs else NOTHING
        if missing or coming:
            moving += self.seconds_inbound(ws)
        address, tasks, threads = ws.address, len(ws.processing), ws.nthreads
        work, promised = self._work(sources, ws) if tasks else (0.0, network_occupancy(ws))
        pace = self.paces.of(address)
        room, fits = self._room(ws, missing + nbytes, promised, together)
        if self.arrivals:
            work += sum(self.arrivals.seconds(address).values())
            tasks += self.arrivals.number(address)
        terms = Terms(cost.waiting(work, tasks, threads, pace), seconds * pace, moving, room, fits)
        return Candidate(address, terms, self.load(ws) / threads, ws.nbytes, missing)

    def load(self, ws: Any) -> float:
        """How many usual tasks a worker has to do."""
        tasks: float = len(ws.processing)
        if self.arrivals:
            tasks += self.arrivals.weight(ws.address)
        if self._surplus:
            tasks += self._surplus.weight(ws.address)
        if self._behind:
            tasks += self._behind.number(ws.address)
        return tasks

    def inputs(self, needs: Collection[Need], ws: Any) -> tuple[int, float, bool]:
        """Bytes of inputs that a worker lacks, the seconds to get all, and whether some are on their way.

        What is on its way counts for the task that it was sent for.
        """
        missing, seconds, coming = 0, 0.0, False
        address, here, on_their_way = ws.address, ws.has_what, ws.needs_what
        between = self.routes.between
        for dts, nbytes, replicas in needs:
            if on_their_way and dts in on_their_way:
                coming = True
            elif dts in here:
                tier = replicas.get(address) or self._headroom.tier(address, dts.key)
                if tier is not Tier.DEVICE:
                    seconds += cost.moving(nbytes, [self.routes.out_of(tier, address)])
            else:
                missing += nbytes
                seconds += cost.moving(
                    nbytes, [between(source, tier, address) for source, tier in replicas.items()]
                )
        return missing, seconds, coming

    def _work(self, sources: Collection[str], ws: Any) -> tuple[float, float]:
        """Seconds of the work on a worker that comes before a task, and bytes that are promised there.

        Of tasks like those that made its inputs, the sources, only the running ones: their priority is lower,
        since Dask goes through graphs depth first. What is promised is what comes in, and the results of the
        tasks that run next; later ones find inputs gone.
        """
        prefixes, usual, surplus = self._state.task_prefixes, self._usual, self._surplus.seconds(ws.address)
        work, results, threads = 0.0, 0.0, ws.nthreads
        for name, part in self._behind.parts(ws.address).items():
            work += usual(prefixes[name]) * part
        for name, count in ws.task_prefix_count.items():
            prefix = prefixes[name]
            if count > threads and name in sources:
                work += usual(prefix) * threads
            else:
                work += max(0.0, usual(prefix) * count + surplus.get(name, 0.0))
            results += size(prefix) * count
        tasks = len(ws.processing)
        if tasks > threads:
            results *= threads / tasks
        return work, network_occupancy(ws) + results

    def _room(self, ws: Any, need: float, promised: float, together: float) -> tuple[float, bool]:
        free, below, tier, live = self.room(ws)
        holds = together <= live or live >= self._largest
        if holds and need <= free - promised:
            return 0.0, True
        spill = NO_WAY if tier is None else self.routes.out_of(tier, ws.address)
        seconds, fits = cost.room(need, Space(free - promised, below, spill))
        return seconds, fits and holds

    def room(self, ws: Any) -> Room:
        """The room that a worker has told, less what has come there since."""
        room = self._headroom.room(ws.address)
        nbytes = ws.nbytes
        come = nbytes - self._told.get(ws.address, nbytes)
        return room._replace(free=room.free - come) if come > 0 else room

    def has_room(self, ws: Any) -> bool:
        """Whether a worker has room for what comes there, and in the end for the next of Dask's queue."""
        need: float = network_occupancy(ws)
        queued = self._state.queued
        if queued:
            need += (len(ws.processing) + 1) * size(queued.peek().prefix)
        address, nbytes = ws.address, ws.nbytes
        room = self._headroom.room(address)
        come: int = max(0, nbytes - self._told.get(address, nbytes))
        return room.free + room.below - come > need

    # ---- what decisions and workers show ---------------------------------------------

    def told(self, ws: Any) -> None:
        """A worker has told its room anew."""
        self._told[ws.address] = ws.nbytes
        self._live[ws.address] = live = self._headroom.room(ws.address).live
        self._largest = max(live, self._largest)

    def took(self, ts: Any, candidate: Candidate, ws: Any) -> None:
        """A task is about to be given to a worker: the inputs that it lacks will be on their way."""
        if candidate.missing:
            nbytes = network_occupancy(ws) + candidate.missing
            self._inbound[candidate.worker] = candidate.terms.moving / nbytes
        name = ts.prefix.name
        usual = self.lengths.mean(name)
        if is_alias(ts):
            usual = self._usual(ts.prefix)
            self._behind.add(ts.key, candidate.worker, _behind_alias(ts))
        if usual:
            seconds = candidate.terms.running / self.paces.of(candidate.worker)
            self._surplus.add(ts.key, candidate.worker, name, seconds - usual, seconds / usual - 1)

    def arriving(self, ts: Any, demand: Demand, worker: str) -> None:
        """A task is about to be placed, probably on a worker."""
        usual = self._usual(ts.prefix)
        weight = demand.seconds / usual if usual else 1.0
        self.arrivals.add(ts.key, worker, ts.prefix.name, demand.seconds, weight)

    def seconds_inbound(self, ws: Any) -> float:
        """Until what is on its way to a worker has come."""
        if not network_occupancy(ws):
            return 0.0
        return float(network_occupancy(ws) * self._inbound.get(ws.address, 1 / self._state.bandwidth))

    def finished(self, ts: Any, worker: str, seconds: float) -> None:
        """A task has taken so many seconds of work on a worker."""
        if is_alias(ts):
            return
        prefix, name = ts.prefix, ts.prefix.name
        inputs = sum([dts.get_nbytes() for dts in ts.dependencies])
        usual = self.lengths.seconds(name, inputs)
        self.paces.observe(worker, seconds, prefix.duration_average if usual is None else usual)
        self.lengths.observe(name, inputs, seconds)
        if inputs:
            part = ts.get_nbytes() / inputs
            self._least[name] = min(part, self._least.get(name, part))

    def left(self, key: Key) -> str | None:
        """A task is no longer on the worker that it was given to; tell which if that changes its load."""
        behind = self._behind.remove(key)
        return self._surplus.remove(key) or behind

    def forget(self, worker: str) -> None:
        """Dask has removed a worker."""
        self.paces.forget(worker)
        self._inbound.pop(worker, None)
        self._told.pop(worker, None)
        if self._live.pop(worker, 0.0) == self._largest:
            self._largest = max(self._live.values(), default=0.0)


def size(prefix: Any) -> float:
    """The mean size of results of a task prefix, 0 while there are none."""
    nbytes: float = prefix.nbytes_total
    if not nbytes:
        return 0.0
    states = prefix.states
    done: int = states["memory"] + states["released"] + states["forgotten"] + states["erred"]
    return nbytes / done if done > 1 else nbytes


def is_alias(ts: Any) -> bool:
    """Whether a task only names what there is already, as for data that were persisted.

    It has the prefix of what has made them, and none of its length.
    """
    return isinstance(ts.run_spec, Alias)


def _behind_alias(ts: Any) -> Mapping[str, float]:
    """The tasks that will run where an alias is, as soon as it is there, by prefix."""
    parts: defaultdict[str, float] = defaultdict(float)
    for dts in islice(ts.dependents, MOST_DEPENDENTS):
        parts[dts.prefix.name] += 1 / len(dts.dependencies)
    return parts
