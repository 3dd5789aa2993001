"""Estimate the cost of a task on a worker, from the state of Dask's scheduler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from dask.typing import Key

from dask_gpurt.dask_hooks.graph import Alias
from dask_gpurt.dask_hooks.scheduler import network_occupancy, prefix_duration
from dask_gpurt.dask_hooks.types import SchedulerState, SchedulerTask, TaskPrefix, WorkerState
from dask_gpurt.memory.ledger import FreeMemory
from dask_gpurt.memory.tiers import Tier
from dask_gpurt.placement import cost
from dask_gpurt.placement.cost import LOCAL_ROUTE, Candidate, Terms
from dask_gpurt.placement.durations import DurationModel, WorkerSlowdown
from dask_gpurt.placement.free_memory import Headroom
from dask_gpurt.placement.routes import Routes
from dask_gpurt.topology import Topology

#: Replicas of an input whose routes are compared.
MAX_REPLICAS = 4
#: Dependents of an alias that are counted as pending work.
MAX_DEPENDENTS = 8


class InputRef(NamedTuple):
    """Refer to an input of a task.

    Parameters
    ----------
    ts
        Its ``TaskState`` on the scheduler.
    nbytes
        Its bytes.
    tiers
        The tier that it is in, by the address of some workers that have it.
    """

    ts: SchedulerTask
    nbytes: int
    tiers: Mapping[str, Tier]


class Fetch(NamedTuple):
    """List the inputs that a worker has to fetch for a task.

    Parameters
    ----------
    nbytes
        Bytes of inputs that it lacks.
    seconds
        Until it has all inputs in its live tier.
    shares
        Whether some inputs are already on their way there, for other tasks.
    """

    nbytes: int
    seconds: float
    shares: bool


#: The fetch of a task without inputs.
_NO_FETCH = Fetch(0, 0.0, False)


class Demand(NamedTuple):
    """Describe the needs of a task, the same on any worker: looked up once for all candidates.

    Parameters
    ----------
    inputs
        Its inputs.
    sources
        The prefixes of the tasks that make these.
    seconds
        Its work on a worker with a slowdown of 1.
    nbytes
        Bytes of its result.
    working_set
        Bytes of its inputs and its result, which have to be live on its worker at once.
    """

    inputs: Collection[InputRef]
    sources: Collection[str]
    seconds: float
    nbytes: float
    working_set: float


@dataclass(slots=True)
class _Pending:
    """Sum the pending work of one worker."""

    count: int = 0
    tasks: float = 0.0
    by_prefix: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


#: The book entry of a worker without pending work.
_NO_WORK = _Pending()


class PendingWork:
    """Keep work on workers that Dask does not count there, by the key of the task that it comes with. Pure.

    An amount is seconds of work or a number of tasks, as the user of the book says. Entries may come and go
    in any order.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, tuple[str, Mapping[str, float], float]] = {}
        self._workers: defaultdict[str, _Pending] = defaultdict(_Pending)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, key: Key, worker: str, by_prefix: Mapping[str, float], tasks: float) -> None:
        """Put the work that comes with a task on one worker, and take it off any other.

        Parameters
        ----------
        by_prefix
            Amounts by task prefix. They may be below 0, where Dask counts too much.
        tasks
            The number of usual tasks that take as long.
        """
        self.remove(key)
        self._entries[key] = worker, by_prefix, tasks
        known = self._workers[worker]
        known.count += 1
        known.tasks += tasks
        for prefix, amount in by_prefix.items():
            known.by_prefix[prefix] += amount

    def remove(self, key: Key) -> str | None:
        """Remove the work that came with a task; return the worker that it was on."""
        worker, by_prefix, tasks = self._entries.pop(key, (None, {}, 0.0))
        if worker is None:
            return None
        known = self._workers[worker]
        known.count -= 1
        if not known.count:  # drops the rounding errors of the sums, too
            del self._workers[worker]
            return worker
        known.tasks -= tasks
        for prefix, amount in by_prefix.items():
            known.by_prefix[prefix] -= amount
        return worker

    def clear(self) -> set[str]:
        """Remove everything; return the workers that had pending work."""
        workers = set(self._workers)
        self._entries.clear()
        self._workers.clear()
        return workers

    def by_prefix(self, worker: str) -> Mapping[str, float]:
        """Return the amounts on a worker, by task prefix."""
        return self._workers.get(worker, _NO_WORK).by_prefix

    def count(self, worker: str) -> int:
        """Return how many entries there are on a worker."""
        return self._workers.get(worker, _NO_WORK).count

    def tasks(self, worker: str) -> float:
        """Return how many usual tasks the pending work of a worker equals."""
        return self._workers.get(worker, _NO_WORK).tasks


class Estimates:
    """Estimate the costs of tasks on workers, and learn from tasks that have run.

    Parameters
    ----------
    state
        Dask's ``SchedulerState``.
    topology
        Where the workers are, and how fast the links between them are.
    headroom
        Free memory of the workers.

    Attributes
    ----------
    routes, shard_routes
        Routes of dependencies, which go by Dask's comms, and of shards, which go by the exchange.
    arrivals
        Seconds of work of tasks that are about to be placed, on the workers with most of their inputs.
    """

    def __init__(self, state: SchedulerState, topology: Topology, headroom: Headroom):
        self._state = state
        self._headroom = headroom
        self.routes, self.shard_routes = Routes(topology), Routes(topology, by_comms=False)
        self.durations, self.slowdown = DurationModel(), WorkerSlowdown()
        self.arrivals = PendingWork()
        #: Seconds by which tasks that were placed take longer than usual, by their inputs.
        self._surplus = PendingWork()
        #: Tasks that will follow an alias on its worker. They are counted, not timed, since their duration
        #: may not be known before the first of them has run; a task with two inputs counts half for each.
        self._followers = PendingWork()
        #: By prefix, the smallest result of a task as a share of its inputs.
        self._min_result_share: dict[str, float] = {}
        #: Seconds per byte of what is on its way to a worker, by the costs that decisions were made with.
        self._inbound_seconds_per_byte: dict[str, float] = {}
        #: Dask's count of bytes on a worker when it last reported its memory.
        self._bytes_at_report: dict[str, int] = {}
        #: The capacity of live tiers, and the largest of them: a working set that fits none may go there.
        self._live_capacity: dict[str, float] = {}
        self._largest_live = 0.0

    # ---- the cost of a task ------------------------------------------------------------

    def demand(self, ts: SchedulerTask) -> Demand:
        """Return what a task needs of a worker."""
        prefix, inputs = ts.prefix, self.inputs(ts)
        input_bytes = sum([nbytes for _, nbytes, _ in inputs])
        if inputs and is_alias(ts):
            return Demand(inputs, (), 0.0, 0.0, input_bytes)
        seconds = self.durations.predict(prefix.name, input_bytes)
        if seconds is None:
            seconds = prefix_duration(self._state, prefix)
        if not inputs:
            nbytes = mean_result_bytes(prefix)
            return Demand((), (), seconds, nbytes, nbytes)
        nbytes = max(mean_result_bytes(prefix), self._min_result_share.get(prefix.name, 0.0) * input_bytes)
        sources = {dts.prefix.name for dts in ts.dependencies}
        return Demand(inputs, sources, seconds, nbytes, input_bytes + nbytes)

    def inputs(self, ts: SchedulerTask) -> Collection[InputRef]:
        """Return the inputs of a task."""
        if not ts.dependencies:
            return ()
        tier = self._headroom.tier
        return [
            InputRef(
                dts,
                dts.get_nbytes(),
                {ws.address: tier(ws.address, dts.key) for ws in islice(dts.who_has or (), MAX_REPLICAS)},
            )
            for dts in ts.dependencies
        ]

    def cost(self, demand: Demand, ws: WorkerState) -> Candidate:
        """Return the cost of a task on a worker."""
        inputs, sources, seconds, nbytes, working_set = demand
        missing, moving, shares = self.fetch(inputs, ws) if inputs else _NO_FETCH
        if missing or shares:
            moving += self.seconds_inbound(ws)
        address, tasks, threads = ws.address, len(ws.processing), ws.nthreads
        work, promised = self._work_before(sources, ws) if tasks else (0.0, network_occupancy(ws))
        slowdown = self.slowdown.of(address)
        room, fits = self._room(ws, missing + nbytes, promised, working_set)
        if self.arrivals:
            work += sum(self.arrivals.by_prefix(address).values())
            tasks += self.arrivals.count(address)
        terms = Terms(cost.waiting(work, tasks, threads, slowdown), seconds * slowdown, moving, room, fits)
        return Candidate(address, terms, self.load(ws) / threads, ws.nbytes, missing)

    def fetch(self, inputs: Collection[InputRef], ws: WorkerState) -> Fetch:
        """Return what a worker has to fetch for a task.

        Bytes that are on their way already count for the task that they were sent for.
        """
        missing, seconds, shares = 0, 0.0, False
        address, here, on_their_way = ws.address, ws.has_what, ws.needs_what
        between = self.routes.between
        for dts, nbytes, tiers in inputs:
            if on_their_way and dts in on_their_way:
                shares = True
            elif dts in here:
                tier = tiers.get(address) or self._headroom.tier(address, dts.key)
                if tier is not Tier.DEVICE:
                    seconds += cost.moving(nbytes, [self.routes.out_of(tier, address)])
            else:
                missing += nbytes
                seconds += cost.moving(
                    nbytes, [between(source, tier, address) for source, tier in tiers.items()]
                )
        return Fetch(missing, seconds, shares)

    def seconds_inbound(self, ws: WorkerState) -> float:
        """Return the seconds until a worker has what is on its way to it."""
        nbytes = network_occupancy(ws)
        if not nbytes:
            return 0.0
        usual = 1 / self._state.bandwidth
        return float(nbytes * self._inbound_seconds_per_byte.get(ws.address, usual))

    def _work_before(self, sources: Collection[str], ws: WorkerState) -> tuple[float, float]:
        """Return seconds of the work on a worker that comes before a task, and bytes that are promised there.

        Dask goes through graphs depth first, so tasks like those that made the inputs, the sources, have a
        lower priority: only the running ones count. The promised bytes are the inputs on their way and the
        results of the tasks that run next; later ones find inputs gone.
        """
        prefixes, usual, surplus = self._state.task_prefixes, self._usual, self._surplus.by_prefix(ws.address)
        work, results, threads = 0.0, 0.0, ws.nthreads
        for name, count in self._followers.by_prefix(ws.address).items():
            work += usual(prefixes[name]) * count
        for name, count in ws.task_prefix_count.items():
            prefix = prefixes[name]
            if count > threads and name in sources:
                work += usual(prefix) * threads
            else:
                work += max(0.0, usual(prefix) * count + surplus.get(name, 0.0))
            results += mean_result_bytes(prefix) * count
        tasks = len(ws.processing)
        if tasks > threads:
            results *= threads / tasks
        return work, network_occupancy(ws) + results

    def _usual(self, prefix: TaskPrefix) -> float:
        """Return seconds of work of a task of a prefix, whatever its inputs."""
        seconds = self.durations.mean(prefix.name)
        return prefix_duration(self._state, prefix) if seconds is None else seconds

    def load(self, ws: WorkerState) -> float:
        """Return how many usual tasks a worker has to do."""
        tasks: float = len(ws.processing)
        for pending in (self.arrivals, self._surplus, self._followers):
            if pending:
                tasks += pending.tasks(ws.address)
        return tasks

    # ---- free memory -------------------------------------------------------------------

    def _room(self, ws: WorkerState, need: float, promised: float, working_set: float) -> tuple[float, bool]:
        memory = self.free_memory(ws)
        holds = working_set <= memory.live or memory.live >= self._largest_live
        if holds and need <= memory.free - promised:
            return 0.0, True
        spill = LOCAL_ROUTE if memory.tier is None else self.routes.out_of(memory.tier, ws.address)
        seconds, fits = cost.room(need, memory._replace(free=memory.free - promised), spill)
        return seconds, fits and holds

    def free_memory(self, ws: WorkerState) -> FreeMemory:
        """Return the free memory that a worker has reported, less the bytes that have arrived there since."""
        memory = self._headroom.free_memory(ws.address)
        arrived = self._arrived_since_report(ws)
        return memory._replace(free=memory.free - arrived) if arrived else memory

    def has_room(self, ws: WorkerState) -> bool:
        """Return whether a worker has room for what is on its way, and for results of its tasks and one more.

        The results count only while root tasks are queued: each as large as that of the first one.
        """
        need: float = network_occupancy(ws)
        queued = self._state.queued
        if queued:
            need += (len(ws.processing) + 1) * mean_result_bytes(queued.peek().prefix)
        memory = self._headroom.free_memory(ws.address)
        return memory.free + memory.below - self._arrived_since_report(ws) > need

    def _arrived_since_report(self, ws: WorkerState) -> int:
        """Return bytes by Dask's count; 0 where it has fallen, for what is gone may have been spilled."""
        nbytes: int = ws.nbytes
        return max(0, nbytes - self._bytes_at_report.get(ws.address, nbytes))

    # ---- events ------------------------------------------------------------------------

    def on_memory_reported(self, ws: WorkerState) -> None:
        """Note that a worker has reported its memory."""
        self._bytes_at_report[ws.address] = ws.nbytes
        self._live_capacity[ws.address] = live = self._headroom.free_memory(ws.address).live
        self._largest_live = max(live, self._largest_live)

    def on_arriving(self, ts: SchedulerTask, demand: Demand, worker: str) -> None:
        """Count a task that is about to be placed on the worker that it will probably get."""
        usual = self._usual(ts.prefix)
        tasks = demand.seconds / usual if usual else 1.0
        self.arrivals.add(ts.key, worker, {ts.prefix.name: demand.seconds}, tasks)

    def on_decided(self, ts: SchedulerTask, candidate: Candidate, ws: WorkerState) -> None:
        """Count a task on the worker that it is about to be given to, and the inputs that it fetches."""
        if candidate.missing:
            nbytes = network_occupancy(ws) + candidate.missing
            self._inbound_seconds_per_byte[candidate.worker] = candidate.terms.moving / nbytes
        name = ts.prefix.name
        usual = self.durations.mean(name)
        if is_alias(ts):
            usual = self._usual(ts.prefix)
            followers = _followers(ts)
            self._followers.add(ts.key, candidate.worker, followers, sum(followers.values()))
        if usual:
            seconds = candidate.terms.running / self.slowdown.of(candidate.worker)
            self._surplus.add(ts.key, candidate.worker, {name: seconds - usual}, seconds / usual - 1)

    def on_task_finished(self, ts: SchedulerTask, worker: str, seconds: float) -> None:
        """Learn from a task that has taken ``seconds`` of work on a worker."""
        if is_alias(ts):
            return
        prefix, name = ts.prefix, ts.prefix.name
        input_bytes = sum([dts.get_nbytes() for dts in ts.dependencies])
        usual = self.durations.predict(name, input_bytes)
        self.slowdown.observe(worker, seconds, prefix.duration_average if usual is None else usual)
        self.durations.observe(name, input_bytes, seconds)
        if input_bytes:
            share = ts.get_nbytes() / input_bytes
            self._min_result_share[name] = min(share, self._min_result_share.get(name, share))

    def on_task_ended(self, key: Key) -> str | None:
        """Forget a task that is no longer on a worker; return that worker if its load changes by it."""
        follower_worker = self._followers.remove(key)
        return self._surplus.remove(key) or follower_worker

    def forget_pending(self) -> None:
        """Forget the tasks that were counted on workers, not what was learnt."""
        for pending in (self.arrivals, self._surplus, self._followers):
            pending.clear()

    def on_worker_removed(self, worker: str) -> None:
        """Forget a worker that Dask has removed."""
        self.slowdown.on_worker_removed(worker)
        self._inbound_seconds_per_byte.pop(worker, None)
        self._bytes_at_report.pop(worker, None)
        if self._live_capacity.pop(worker, 0.0) == self._largest_live:
            self._largest_live = max(self._live_capacity.values(), default=0.0)


def mean_result_bytes(prefix: TaskPrefix) -> float:
    """Return the mean size of the results of a task prefix, 0 while there are none."""
    nbytes: float = prefix.nbytes_total
    if not nbytes:
        return 0.0
    states = prefix.states
    done: int = states["memory"] + states["released"] + states["forgotten"] + states["erred"]
    return nbytes / done if done > 1 else nbytes


def is_alias(ts: SchedulerTask) -> bool:
    """Return whether a task only names data that exist already, as for persisted collections.

    An alias has the prefix of the task that made the data, but not its duration.
    """
    return isinstance(ts.run_spec, Alias)


def _followers(alias: SchedulerTask) -> Mapping[str, float]:
    """Return how many tasks, by prefix, will run where an alias is as soon as it is there."""
    counts: defaultdict[str, float] = defaultdict(float)
    for dts in islice(alias.dependents, MAX_DEPENDENTS):
        counts[dts.prefix.name] += 1 / len(dts.dependencies)
    return counts
