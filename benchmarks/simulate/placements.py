"""Define the placements to compare: Dask's own, and the runtime's on top of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from benchmarks.simulate.cluster import Cluster
from benchmarks.simulate.network import Transfer
from benchmarks.simulate.simulation import Simulation
from benchmarks.simulate.work import Workload
from benchmarks.simulate.worker import Overheads, TieredWorker, VirtualWorker
from dask_gpurt.placement import FreeMemory, GatedPlacement, Placement
from dask_gpurt.topology import Topology

#: Virtual seconds between two reports of a worker's memory to the scheduler.
REPORT_INTERVAL_S = 0.2
#: Smaller transfers are not reported, as in a real cluster.
MIN_REPORTED_BYTES = 1_000_000


class VirtualHeadroom:
    """Keep the free memory of workers as of their last reports, like ledgers in a real cluster."""

    def __init__(self, simulation: Simulation):
        self._simulation = simulation
        self._reported: dict[str, FreeMemory] = {}

    def free_memory(self, worker: str) -> FreeMemory:
        """Return the free memory of a worker."""
        if worker not in self._reported:
            self._reported[worker] = self._now(worker)
        return self._reported[worker]

    def report(self) -> list[str]:
        """Update the reports of all workers; return the workers whose free memory has changed."""
        changed = []
        for worker in self._simulation.workers:
            now = self._now(worker)
            if self._reported.get(worker) != now:
                self._reported[worker] = now
                changed.append(worker)
        return changed

    def _now(self, worker: str) -> FreeMemory:
        known = self._simulation.workers[worker]
        below = sum(max(0.0, free) for free in known.tiers.free_below().values())
        return FreeMemory(known.tiers.free, below, known.tiers.capacity.live)


class _Events(SchedulerPlugin):
    """Forward events to placement, like the runtime's scheduler plugin in a real cluster."""

    def __init__(self, simulation: Simulation, placement: GatedPlacement, topology: Topology):
        self._simulation = simulation
        self._placement = placement
        self._topology = topology

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        self._topology.add(worker, self._simulation.machine(worker).place)
        self._placement.on_place_changed(worker)

    def update_graph(self, scheduler: Scheduler, **kwargs: Any) -> None:
        self._placement.on_graph()


class _TimedPlacement(Placement):
    """Bind and unbind placement beneath the instrumentation that times decisions."""

    def __init__(self, simulation: Simulation, topology: Topology, headroom: VirtualHeadroom, **options: Any):
        super().__init__(simulation.scheduler, topology, headroom, simulation.metrics, **options)
        self._scheduler = simulation.scheduler

    def bind(self) -> None:
        """Start choosing workers."""
        with self._scheduler.untimed():
            super().bind()

    def unbind(self) -> None:
        """Return choices to Dask."""
        with self._scheduler.untimed():
            super().unbind()


def bind_placement(simulation: Simulation, **options: Any) -> None:
    """Use the runtime's placement in a simulation. It learns the speeds of links from transfers.

    ``options``: other arguments of :class:`Placement`.
    """
    topology = simulation.cluster.belief()
    for worker in simulation.workers:
        topology.add(worker, simulation.machine(worker).place)
    headroom = VirtualHeadroom(simulation)
    scheduler, bound = simulation.scheduler, _TimedPlacement(simulation, topology, headroom, **options)
    clock = simulation.clock
    placement = GatedPlacement(bound, scheduler, topology, simulation.metrics, lambda: clock.now)

    # Reading the tiers of all workers is the simulator's own work; a real scheduler gets messages.
    noted = scheduler.busy.around(placement.on_memory_reported)

    def report() -> None:
        for worker in headroom.report():
            noted(worker)

    def transferred(transfer: Transfer) -> None:
        if transfer.nbytes > MIN_REPORTED_BYTES:
            seconds = simulation.clock.now - transfer.sent
            topology.observe(transfer.source, transfer.target, transfer.nbytes, seconds, by_comms=True)

    scheduler.add_plugin(_Events(simulation, placement, topology), name="gpurt-placement")
    simulation.clock.every(lambda: REPORT_INTERVAL_S, report)
    simulation.transferred = transferred
    placement.bind()


class Mode(NamedTuple):
    """Define a placement and the class of workers that it is used with.

    ``bind``: see :class:`Simulation`; None if Dask decides.
    """

    bind: Callable[[Simulation], None] | None
    worker: type[VirtualWorker]


#: Placements by name. ``stock`` is Dask as shipped, ``tiers`` the runtime with Dask's choices, ``gpurt`` the
#: runtime with placement, which chooses while links differ.
PLACEMENTS: Mapping[str, Mode] = {
    "stock": Mode(None, VirtualWorker),
    "tiers": Mode(None, TieredWorker),
    "gpurt": Mode(bind_placement, TieredWorker),
}


def charged(simulation: Simulation) -> Overheads:
    """Return the overheads of a finished simulation, with the CPU time that its scheduler has taken.

    With them, the same simulation takes as much longer as its scheduler is busy: with choices of workers one
    by one, and with all else, such as work stealing and what placement learns, as a part of each message.
    """
    scheduler = simulation.scheduler
    others = scheduler.busy.seconds - scheduler.deciding.seconds
    return replace(
        simulation.overheads,
        scheduler=simulation.overheads.scheduler + max(0.0, others) / max(1, scheduler.messages),
        decision=scheduler.deciding.microseconds / 1e6,
    )


def simulate(cluster: Cluster, workload: Workload, placement: str = "stock", **options: Any) -> Simulation:
    """Simulate a workload to its end.

    ``cluster``, ``workload``: see :class:`Simulation`.
    ``options``: other arguments of :class:`Simulation`.
    Returns the finished simulation, with its ``result``.
    Raises ValueError if the placement is unknown.
    """
    if placement not in PLACEMENTS:
        raise ValueError(f"unknown placement {placement!r}: expected one of {', '.join(PLACEMENTS)}")
    bind, worker = PLACEMENTS[placement]
    simulation = Simulation(cluster, workload, bind=bind, worker=worker, name=placement, **options)
    simulation.run()
    return simulation
