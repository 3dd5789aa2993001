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

#: How many replicas of an input have their routes compared.
MAX_REPLICAS = 4
#: How many dependents of an alias count as pending work.
MAX_DEPENDENTS = 8


class InputRef(NamedTuple):
    """Refer to an input of a task.

    Parameters
    ----------
    ts
        Its ``TaskState`` on the scheduler.
    nbytes
        Its size.
    tiers
        The tier of its replica, by the address of some of its holders.
    """

    ts: SchedulerTask
    nbytes: int
    tiers: Mapping[str, Tier]


class Fetch(NamedTuple):
    """Sum up the inputs that a worker has to fetch for a task.

    Parameters
    ----------
    nbytes
        The bytes of inputs that it lacks.
    seconds
        The time until all inputs are in its live tier.
    shares
        Whether some inputs are already in flight to the worker, for other tasks.
    """

    nbytes: int
    seconds: float
    shares: bool


#: The fetch of a task without inputs.
_NO_FETCH = Fetch(0, 0.0, False)


class Demand(NamedTuple):
    """Describe what a task needs on any worker. Computed once for all candidates.

    Parameters
    ----------
    inputs
        Its inputs.
    sources
        The prefixes of the tasks that produce its inputs.
    seconds
        Its duration on a worker with a slowdown of 1.
    nbytes
        The expected size of its result.
    working_set
        The bytes of its inputs and its result, which must be live on its worker at the same time.
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


#: The entry of a worker without pending work.
_NO_WORK = _Pending()


class PendingWork:
    """Track work on workers that is not in Dask's occupancy, by the key of the task that causes it. Pure.

    Amounts are seconds of work or numbers of tasks, as the owner chooses. Entries may be added and removed in
    any order.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, tuple[str, Mapping[str, float], float]] = {}
        self._workers: defaultdict[str, _Pending] = defaultdict(_Pending)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, key: Key, worker: str, by_prefix: Mapping[str, float], tasks: float) -> None:
        """Add the work that a task causes on a worker, replacing its earlier entry.

        Parameters
        ----------
        by_prefix
            Amounts by task prefix; negative if Dask counts too much.
        tasks
            The equivalent number of usual tasks.
        """
        self.remove(key)
        self._entries[key] = worker, by_prefix, tasks
        known = self._workers[worker]
        known.count += 1
        known.tasks += tasks
        for prefix, amount in by_prefix.items():
            known.by_prefix[prefix] += amount

    def remove(self, key: Key) -> str | None:
        """Remove the work that a task causes; return its worker."""
        worker, by_prefix, tasks = self._entries.pop(key, (None, {}, 0.0))
        if worker is None:
            return None
        known = self._workers[worker]
        known.count -= 1
        if not known.count:  # also discards accumulated rounding errors
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
        """Return the number of entries on a worker."""
        return self._workers.get(worker, _NO_WORK).count

    def tasks(self, worker: str) -> float:
        """Return the pending work of a worker as an equivalent number of usual tasks."""
        return self._workers.get(worker, _NO_WORK).tasks


class Estimates:
    """Estimate the costs of tasks on workers, and learn from tasks that have run.

    Parameters
    ----------
    state
        Dask's ``SchedulerState``.
    topology
        The places of workers and the speeds of links.
    headroom
        Free memory of the workers.

    Attributes
    ----------
    routes
        Routes of dependencies over Dask's comms.
    arrivals
        The work of tasks that are about to be placed, in seconds, on the workers with most of their inputs.
    """

    def __init__(self, state: SchedulerState, topology: Topology, headroom: Headroom):
        self._state = state
        self._headroom = headroom
        self.routes = Routes(topology)
        self.durations, self.slowdown = DurationModel(), WorkerSlowdown()
        self.arrivals = PendingWork()
        #: Seconds by which placed tasks are expected to take longer than usual because of their input sizes.
        self._surplus = PendingWork()
        #: Tasks that will follow an alias on its worker. They are counted rather than timed, since their
        #: duration may be unknown until one of them has run. A task with two inputs counts half for each.
        self._followers = PendingWork()
        #: The smallest ratio of a task's result to its inputs, by prefix.
        self._min_result_share: dict[str, float] = {}
        #: Expected seconds per byte in flight to each worker, from the costs of the latest decisions.
        self._inbound_seconds_per_byte: dict[str, float] = {}
        #: Dask's count of bytes on a worker when it last reported its memory.
        self._bytes_at_report: dict[str, int] = {}
        #: The capacities of live tiers, and the largest one, which takes working sets that fit nowhere.
        self._live_capacity: dict[str, float] = {}
        self._largest_live = 0.0

    # ---- the cost of a task ------------------------------------------------------------

    def demand(self, ts: SchedulerTask) -> Demand:
        """Return what a task needs on any worker."""
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

        Bytes already in flight are charged to the task that they are fetched for.
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
        """Return the time until all bytes in flight to a worker have arrived, in seconds."""
        nbytes = network_occupancy(ws)
        if not nbytes:
            return 0.0
        usual = 1 / self._state.bandwidth
        return float(nbytes * self._inbound_seconds_per_byte.get(ws.address, usual))

    def _work_before(self, sources: Collection[str], ws: WorkerState) -> tuple[float, float]:
        """Return the work on a worker that runs before a task, in seconds, and the bytes promised there.

        Dask traverses graphs depth first, so further tasks of the sources' prefixes have a lower priority
        than this task, and only the running ones count. The promised bytes are inputs in flight and the
        results of the next tasks to run; by the time of later tasks, inputs have been released.
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
        """Return the mean duration of a prefix's tasks regardless of their inputs, in seconds."""
        seconds = self.durations.mean(prefix.name)
        return prefix_duration(self._state, prefix) if seconds is None else seconds

    def load(self, ws: WorkerState) -> float:
        """Return the load of a worker as an equivalent number of usual tasks."""
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
        """Return the free memory that a worker has reported, minus bytes that have arrived since."""
        memory = self._headroom.free_memory(ws.address)
        arrived = self._arrived_since_report(ws)
        return memory._replace(free=memory.free - arrived) if arrived else memory

    def has_room(self, ws: WorkerState) -> bool:
        """Return whether a worker has memory for inputs in flight, and for results of its tasks and one more.

        Results count only while root tasks are queued; each is assumed to be as large as that of the first
        queued task's prefix.
        """
        need: float = network_occupancy(ws)
        queued = self._state.queued
        if queued:
            need += (len(ws.processing) + 1) * mean_result_bytes(queued.peek().prefix)
        memory = self._headroom.free_memory(ws.address)
        return memory.free + memory.below - self._arrived_since_report(ws) > need

    def _arrived_since_report(self, ws: WorkerState) -> int:
        """Return the increase of Dask's count of bytes; 0 if it decreased, as spilled bytes may have gone."""
        nbytes: int = ws.nbytes
        return max(0, nbytes - self._bytes_at_report.get(ws.address, nbytes))

    # ---- events ------------------------------------------------------------------------

    def on_memory_reported(self, ws: WorkerState) -> None:
        """Note that a worker has reported its memory."""
        self._bytes_at_report[ws.address] = ws.nbytes
        self._live_capacity[ws.address] = live = self._headroom.free_memory(ws.address).live
        self._largest_live = max(live, self._largest_live)

    def on_arriving(self, ts: SchedulerTask, demand: Demand, worker: str) -> None:
        """Count a task that is about to be placed on its likely worker."""
        usual = self._usual(ts.prefix)
        tasks = demand.seconds / usual if usual else 1.0
        self.arrivals.add(ts.key, worker, {ts.prefix.name: demand.seconds}, tasks)

    def on_decided(self, ts: SchedulerTask, candidate: Candidate, ws: WorkerState) -> None:
        """Count a placed task, and the inputs that it fetches, on its worker."""
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
        """Learn from a task that took ``seconds`` on a worker."""
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
        """Forget a task that has left its worker; return the worker if this changes its load."""
        follower_worker = self._followers.remove(key)
        return self._surplus.remove(key) or follower_worker

    def forget_pending(self) -> None:
        """Forget all pending work, but keep learned durations and slowdowns."""
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
    """Return the mean size of a prefix's results; 0 if there are none."""
    nbytes: float = prefix.nbytes_total
    if not nbytes:
        return 0.0
    states = prefix.states
    done: int = states["memory"] + states["released"] + states["forgotten"] + states["erred"]
    return nbytes / done if done > 1 else nbytes


def is_alias(ts: SchedulerTask) -> bool:
    """Return whether a task only names existing data, as for persisted collections.

    An alias has the prefix of the task that produced the data, but not its duration.
    """
    return isinstance(ts.run_spec, Alias)


def _followers(alias: SchedulerTask) -> Mapping[str, float]:
    """Return the number of tasks, by prefix, that will run on the worker of an alias right after it."""
    counts: defaultdict[str, float] = defaultdict(float)
    for dts in islice(alias.dependents, MAX_DEPENDENTS):
        counts[dts.prefix.name] += 1 / len(dts.dependencies)
    return counts
