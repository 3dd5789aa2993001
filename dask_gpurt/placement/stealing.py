"""Which worker may take a task from another: the nearest with room where the task gains time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import islice
from typing import Any

from dask_gpurt.placement import cost
from dask_gpurt.placement.chooser import Chooser
from dask_gpurt.placement.cost import Candidate
from dask_gpurt.placement.estimates import Demand

#: The most workers of a neighbourhood whose costs are compared, and out of how many of the least loaded.
MOST_THIEVES, LOOKED_AT = 4, 64


def thief(
    chooser: Chooser, ts: Any, thieves: Collection[Any], occupancy: Callable[[Any], float]
) -> tuple[Any, Candidate] | None:
    """The worker that should take a task from the one that has it; None if no one gains by it.

    Parameters
    ----------
    thieves
        The workers that may.
    occupancy
        Seconds of work that a worker has, with what is being moved counted where it goes.
    """
    victim, demand = ts.processing_on, chooser.estimates.demand(ts)
    patience = occupancy(victim) / victim.nthreads
    for name in chooser.neighbourhoods(victim):
        near = (ws for ws in chooser.least_loaded(name, LOOKED_AT) if ws in thieves and ws is not victim)
        found = {ws.address: ws for ws in islice(near, MOST_THIEVES)}
        costs = [_cost(chooser, demand, ws, occupancy(ws)) for ws in found.values()]
        fitting = [candidate for candidate in costs if candidate.terms.fits]
        if fitting and (candidate := cost.best(fitting)).terms.seconds < patience:
            return found[candidate.worker], candidate
    return None


def _cost(chooser: Chooser, demand: Demand, ws: Any, occupancy: float) -> Candidate:
    candidate = chooser.estimates.cost(demand, ws)
    return candidate._replace(terms=candidate.terms._replace(waiting=occupancy / ws.nthreads))
