"""Simulate a workload on Dask's workers and on the runtime's, and charge the CPU time of the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.simulate.cluster import Cluster
from benchmarks.simulate.simulation import Simulation
from benchmarks.simulate.work import Workload
from benchmarks.simulate.worker import Overheads, TieredWorker, VirtualWorker

#: Workers by name: ``stock`` is Dask as shipped, ``tiers`` the runtime with Dask's choices.
SIDES: Mapping[str, type[VirtualWorker]] = {"stock": VirtualWorker, "tiers": TieredWorker}


def charged(simulation: Simulation) -> Overheads:
    """Return the overheads of a finished simulation, with the CPU time that its scheduler has taken.

    With them, the same simulation takes as much longer as its scheduler is busy: with choices of workers one
    by one, and with all else, such as work stealing, as a part of each message.
    """
    scheduler = simulation.scheduler
    others = scheduler.busy.seconds - scheduler.deciding.seconds
    return replace(
        simulation.overheads,
        scheduler=simulation.overheads.scheduler + max(0.0, others) / max(1, scheduler.messages),
        decision=scheduler.deciding.microseconds / 1e6,
    )


def simulate(cluster: Cluster, workload: Workload, side: str = "stock", **options: Any) -> Simulation:
    """Simulate a workload to its end.

    ``side``: one of :data:`SIDES`.
    ``options``: other arguments of :class:`Simulation`.
    Returns the finished simulation, with its ``result``.
    """
    simulation = Simulation(cluster, workload, worker=SIDES[side], name=side, **options)
    simulation.run()
    return simulation
