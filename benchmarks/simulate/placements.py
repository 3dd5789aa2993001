"""Define the placements to compare: Dask's own, and the runtime's on top of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.simulate.cluster import Cluster
from benchmarks.simulate.network import Transfer
from benchmarks.simulate.scheduler import VirtualScheduler
from benchmarks.simulate.simulation import Simulation
from benchmarks.simulate.work import Workload
from benchmarks.simulate.worker import Overheads, TieredWorker, VirtualWorker
from dask_gpurt.placement.links import SlowLinks

#: Smaller transfers are not reported, as in a real cluster.
MIN_REPORTED_BYTES = 1_000_000


def reckon_with_links(simulation: Simulation) -> SlowLinks:
    """Have Dask reckon with slow links between hosts. Their speeds are learnt from transfers."""
    topology = simulation.cluster.belief()
    for worker in simulation.workers:
        topology.add(worker, simulation.machine(worker).place)
    scheduler = simulation.scheduler
    links = _TimedLinks(scheduler, topology, simulation.metrics)

    def transferred(transfer: Transfer) -> None:
        if transfer.nbytes > MIN_REPORTED_BYTES:
            seconds = simulation.clock.now - transfer.sent
            topology.observe(transfer.source, transfer.target, transfer.nbytes, seconds, by_comms=True)

    simulation.transferred = transferred
    scheduler.beating = scheduler.busy.around(links.on_heartbeat)
    links.on_places_changed()
    return links


class _TimedLinks(SlowLinks):
    """Replace Dask's choices beneath the instrumentation that times them."""

    _state: VirtualScheduler

    def _bind(self) -> None:
        with self._state.untimed():
            super()._bind()

    def unbind(self) -> None:
        with self._state.untimed():
            super().unbind()


class Mode(NamedTuple):
    """Define a placement and the class of workers that it is used with.

    ``bind``: see :class:`Simulation`; None if Dask decides.
    """

    bind: Callable[[Simulation], object] | None
    worker: type[VirtualWorker]


#: Placements by name. ``stock`` is Dask as shipped, ``tiers`` the runtime with Dask's choices, ``gpurt`` the
#: runtime with placement, by which Dask reckons with slow links.
PLACEMENTS: Mapping[str, Mode] = {
    "stock": Mode(None, VirtualWorker),
    "tiers": Mode(None, TieredWorker),
    "gpurt": Mode(reckon_with_links, TieredWorker),
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
