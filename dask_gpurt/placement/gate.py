"""Switch placement on only while workers differ enough for it to matter; otherwise Dask chooses.

Decisions and their figures: ``docs/decisions/placement.md``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, pairwise
from time import monotonic

from dask_gpurt.dask_hooks.types import SchedulerState, TaskPrefix
from dask_gpurt.observe import Metrics
from dask_gpurt.placement.candidates import UNKNOWN_RESULT_BYTES
from dask_gpurt.placement.engagement import Holding, Reason, UsualTask, is_short, lie_unevenly, links_differ
from dask_gpurt.placement.estimates import mean_result_bytes
from dask_gpurt.placement.free_memory import Headroom
from dask_gpurt.placement.strategy import Placement
from dask_gpurt.topology import Topology
from dask_gpurt.topology.links import BETWEEN_HOSTS

logger = logging.getLogger(__name__)

#: The shortest interval between checks of links and residency, in seconds: a check looks at all workers.
RECHECK_S = 0.5
#: How long placement stays on after the last difference, in seconds: a hysteresis.
HOLD_S = 5.0
#: The most hosts, and the most neighbours on each host, whose links are compared.
MAX_HOSTS, MAX_NEIGHBOURS = 16, 4


def usual_task(prefixes: Iterable[TaskPrefix]) -> UsualTask | None:
    """Return the mean of tasks that have not run, by their prefixes; None if nothing is known of these."""
    tasks, seconds, nbytes = 0, 0.0, 0.0
    for prefix in prefixes:
        states = prefix.states
        count = states["released"] + states["waiting"] + states["queued"] + states["processing"]
        if count and prefix.duration_average >= 0:
            tasks += count
            seconds += count * prefix.duration_average
            nbytes += count * mean_result_bytes(prefix)
    return UsualTask(seconds / tasks, nbytes / tasks) if tasks else None


class GatedPlacement:
    """Bind a placement while workers differ in a way that matters for the present tasks.

    Otherwise Dask's own methods are in place, and decisions have no overhead. The rule is evaluated again
    when a worker becomes short of memory, or has memory again; and when a memory report or a graph arrives
    after a worker has joined, moved or left, or at least ``RECHECK_S`` after the last check. Residency is
    only checked when a graph arrives.

    Parameters
    ----------
    placement
        The placement to bind and unbind; it receives the events.
    state
        Dask's ``SchedulerState``.
    topology
        The places of workers and the speeds of links.
    headroom
        Free memory of the workers.
    metrics
        Counts how often placement is switched on.
    clock
        Returns the time in seconds.
    """

    def __init__(
        self,
        placement: Placement,
        state: SchedulerState,
        topology: Topology,
        headroom: Headroom,
        metrics: Metrics,
        clock: Callable[[], float] = monotonic,
    ):
        self._placement = placement
        self._state = state
        self._topology = topology
        self._headroom = headroom
        self._metrics = metrics
        self._clock = clock
        #: Workers that are short of memory, by address.
        self._short: set[str] = set()
        self._reason: Reason | None = None
        self._uneven = False
        self._checked_at = self._looked_at = self._differed_at = -math.inf

    @property
    def reason(self) -> Reason | None:
        """Return the difference for which placement is on; None while Dask chooses."""
        return self._reason

    def bind(self) -> None:
        """Check the present workers, and bind the placement if it can matter."""
        for worker in list(self._state.workers):
            self._note_memory(worker)
        self._check()

    def unbind(self) -> None:
        """Unbind the placement, so that Dask chooses."""
        if self._reason is not None:
            self._placement.unbind()
            self._reason = None

    # ---- events ------------------------------------------------------------------------

    def on_graph(self) -> None:
        """Note a new graph, before any of its tasks is placed."""
        if self._clock() - min(self._checked_at, self._looked_at) >= RECHECK_S:
            self.look()

    def on_memory_reported(self, worker: str) -> None:
        """Note that a worker has reported its memory."""
        if self._note_memory(worker) or self._clock() - self._checked_at >= RECHECK_S:
            self._check()
        self._placement.on_memory_reported(worker)

    def on_place_changed(self, worker: str) -> None:
        """Note that a worker has joined or that its place has changed."""
        self._placement.on_place_changed(worker)
        self._checked_at = -math.inf

    def on_worker_removed(self, worker: str) -> None:
        """Forget a worker that Dask has removed."""
        self._short.discard(worker)
        self._placement.on_worker_removed(worker)
        self._checked_at = -math.inf

    def _note_memory(self, worker: str) -> bool:
        """Note whether a worker is short of memory; return whether that has changed."""
        memory = self._headroom.free_memory(worker)
        short = is_short(memory.free, memory.live)
        if short is (worker in self._short):
            return False
        (self._short.add if short else self._short.discard)(worker)
        return True

    # ---- checks ------------------------------------------------------------------------

    def look(self) -> None:
        """Check how evenly data lie on workers, before tasks move them, and evaluate the rule."""
        self._looked_at = self._clock()
        self._uneven = lie_unevenly([Holding(ws.nbytes, ws.nthreads) for ws in self._state.running])
        self._check()

    def _check(self) -> None:
        """Evaluate the rule, and bind or unbind the placement."""
        now = self._checked_at = self._clock()
        reason = self._differing()
        if reason is not None:
            self._differed_at = now
        elif now - self._differed_at < HOLD_S:
            return
        if (reason is None) is (self._reason is None):
            self._reason = reason
            return
        self._reason = reason
        if reason is None:
            logger.info("Placement is off: workers do not differ enough for it to matter")
            self._placement.unbind()
        else:
            logger.info("Placement is on: workers differ in %s", reason)
            self._metrics.add("placement.engaged.{reason}", 1, str(reason))
            self._placement.bind()

    def _differing(self) -> Reason | None:
        """Return the first difference between workers that matters, cheapest check first; else None."""
        workers = len(self._state.running)
        if workers < 2:
            return None
        if 0 < len(self._short) < workers:  # where all are short, no choice helps
            return Reason.HEADROOM
        if self._uneven:
            return Reason.RESIDENCY
        usual = usual_task(self._state.task_prefixes.values())
        nbytes = UNKNOWN_RESULT_BYTES if usual is None else usual.nbytes
        return Reason.LINKS if links_differ(list(self._transfers(nbytes)), usual) else None

    def _transfers(self, nbytes: float) -> Iterator[float]:
        """Yield the seconds of a transfer between neighbours on some hosts, and from host to host."""
        on_host = self._topology.on_host
        hosts = [on_host(host) for host in islice(self._topology.hosts, MAX_HOSTS)]
        for workers in hosts:
            for one, other in pairwise(islice(workers, MAX_NEIGHBOURS)):
                yield self._topology.way(one, other, by_comms=True)[1].seconds(nbytes)
        for here, there in pairwise(hosts):
            link, speed = self._topology.way(next(iter(here)), next(iter(there)), by_comms=True)
            # The workers of a host share its link and mostly send at the same time.
            yield speed.seconds(nbytes * len(here) if link in BETWEEN_HOSTS else nbytes)
