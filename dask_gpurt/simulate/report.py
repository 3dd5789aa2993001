"""What a simulation has shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from dask_gpurt.dask_hooks.scheduler import steal_requests
from dask_gpurt.simulate.tiers import Tiers
from dask_gpurt.simulate.work import Work
from dask_gpurt.topology import Link

if TYPE_CHECKING:
    from dask_gpurt.simulate.simulation import Simulation


@dataclass
class Trace:
    """What happened when.

    Attributes
    ----------
    tasks
        From when to when each task ran.
    transfers
        When transfers had arrived, over which link, and how many bytes.
    between_hosts
        Bytes that went from a host to another.
    gone
        The tiers of workers that left.
    """

    tasks: list[tuple[float, float]] = field(default_factory=list)
    transfers: list[tuple[float, Link, int]] = field(default_factory=list)
    between_hosts: int = 0
    gone: list[Tiers] = field(default_factory=list)

    def ran(self, start: float, stop: float) -> None:
        """A task has run."""
        self.tasks.append((start, stop))

    def moved(self, when: float, link: Link, nbytes: int, between_hosts: bool) -> None:
        """A transfer has arrived."""
        self.transfers.append((when, link, nbytes))
        if between_hosts:
            self.between_hosts += nbytes

    def left(self, tiers: Tiers) -> None:
        """A worker is gone."""
        self.gone.append(tiers)


@dataclass(frozen=True)
class Result:
    """The figures of one simulation.

    Attributes
    ----------
    makespan
        Virtual seconds from the first submission until all that was wanted was there.
    bytes
        By class of link, what was moved between workers.
    between_hosts
        Bytes that went from a host to another.
    spilled
        Bytes that went down a tier.
    worst_memory
        The most that a worker had in its live tier, as a part of what the tier holds.
    over_memory
        How many workers were ever over what their live tier holds.
    too_large
        Tasks whose inputs, result and workspace together no live tier of the cluster holds: whoever runs one
        is over.
    runs
        Tasks that were run to their end; more than ``tasks`` where data was lost.
    steals
        Requests of work stealing.
    decisions, decision_us
        How many choices of a worker there were, and the mean of microseconds of CPU time for one.
    scheduler_us
        Microseconds of CPU time that the scheduler spent on messages and on stealing, for each task.
    fallbacks
        How often a decision of ours was left to Dask, because it raised.
    """

    workload: str
    cluster: str
    placement: str
    workers: int
    tasks: int
    makespan: float
    bytes: dict[str, int]
    between_hosts: int
    spilled: int
    worst_memory: float
    over_memory: int
    too_large: int
    runs: int
    steals: int
    decisions: int
    decision_us: float
    scheduler_us: float
    fallbacks: int

    @classmethod
    def of(cls, simulation: Simulation, makespan: float) -> Result:
        """Sum up a simulation that is over."""
        trace, scheduler = simulation.trace, simulation.scheduler
        moved: Counter[str] = Counter()
        for _, link, nbytes in trace.transfers:
            moved[link.value] += nbytes
        tiers = [*trace.gone, *(worker.tiers for worker in simulation.workers.values())]
        stealing = scheduler.stealing
        return cls(
            workload=simulation.workload.name,
            cluster=simulation.cluster.name,
            placement=simulation.name,
            workers=len(tiers),
            tasks=len(simulation.works),
            makespan=makespan,
            bytes=dict(sorted(moved.items())),
            between_hosts=trace.between_hosts,
            spilled=sum(one.spilled for one in tiers),
            worst_memory=max(one.peak / one.capacity.live for one in tiers),
            over_memory=sum(one.over for one in tiers),
            too_large=_too_large(simulation.works, max(one.capacity.live for one in tiers)),
            runs=sum(simulation.runs.values()),
            steals=steal_requests(stealing) if stealing else 0,
            decisions=scheduler.deciding.count,
            decision_us=scheduler.deciding.microseconds,
            scheduler_us=1e6 * scheduler.busy.seconds / max(1, len(simulation.works)),
            fallbacks=sum(known["count"] for known in simulation.metrics.snapshot()["fallbacks"].values()),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def _too_large(works: Mapping[str, Work], largest: int) -> int:
    """How many tasks need more at once than the largest live tier holds."""
    needed = (
        sum(works[need].nbytes for need in work.needs) + work.nbytes + work.workspace
        for work in works.values()
    )
    return sum(nbytes > largest for nbytes in needed)
