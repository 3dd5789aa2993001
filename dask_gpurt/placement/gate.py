"""Switch placement on only while workers differ enough for it to matter; otherwise Dask chooses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, pairwise
from math import inf
from time import monotonic

from dask.typing import Key

from dask_gpurt.dask_hooks.types import SchedulerState
from dask_gpurt.observe import Metrics
from dask_gpurt.observe.estimators import RunningMoments
from dask_gpurt.placement import engagement
from dask_gpurt.placement.engagement import Holding, Reason, UsualTask
from dask_gpurt.placement.free_memory import Headroom
from dask_gpurt.placement.strategy import Placement
from dask_gpurt.topology import Topology
from dask_gpurt.topology.links import BETWEEN_HOSTS

logger = logging.getLogger(__name__)

#: The shortest interval between checks of speeds and residency, in seconds.
RECHECK_S = 0.5
#: How long placement stays on after the last difference, in seconds: a hysteresis.
HOLD_S = 5.0
#: One of this many finished tasks is sampled, for the mean task and, while Dask chooses, for the speed of its
#: worker; and the window of sampled tasks over which the mean is taken.
SAMPLED_TASKS, WINDOW_TASKS = 32, 64
#: The most hosts, and the most neighbours on each host, whose links are compared.
MAX_HOSTS, MAX_NEIGHBOURS = 16, 4


class GatedPlacement:
    """Bind a placement while workers differ in a way that matters for the present tasks.

    Otherwise Dask's own methods are in place, and decisions have no overhead. The rule is
    :mod:`~dask_gpurt.placement.engagement`. It is evaluated again when a worker becomes short of memory, or
    has memory again; and when a memory report or a graph arrives after a worker has joined, moved or left, or
    at least ``RECHECK_S`` after the last check. Residency is only checked when a graph arrives.

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
        self._checked_at = self._looked_at = self._differed_at = -inf
        self._ended = 0
        self._seconds, self._nbytes = RunningMoments(WINDOW_TASKS), RunningMoments(WINDOW_TASKS)

    @property
    def reason(self) -> Reason | None:
        """Return the difference for which placement is on; None while Dask chooses."""
        return self._reason

    # ---- on and off --------------------------------------------------------------------

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

    def on_graph(self, keys: Iterable[Key]) -> None:
        """Note a new graph, before any of its tasks is placed."""
        if self._clock() - min(self._checked_at, self._looked_at) >= RECHECK_S:
            self.look()
        if self._reason is not None:
            self._placement.on_graph(keys)

    def on_task_ended(self, key: Key, worker: str | None = None, seconds: float = 0.0) -> None:
        """Note that a task is no longer on a worker, see :meth:`Placement.on_task_ended`."""
        self._ended += 1
        if not self._ended % SAMPLED_TASKS:
            ts = self._state.tasks.get(key)
            if ts is not None and worker is not None:
                self._seconds.observe(seconds)
                self._nbytes.observe(ts.get_nbytes())
        elif self._reason is None:
            return
        self._placement.on_task_ended(key, worker, seconds)

    def on_memory_reported(self, worker: str) -> None:
        """Note that a worker has reported its memory."""
        if self._note_memory(worker) or self._clock() - self._checked_at >= RECHECK_S:
            self._check()
        self._placement.on_memory_reported(worker)

    def on_place_changed(self, worker: str) -> None:
        """Note that a worker has joined or that its place has changed."""
        self._placement.on_place_changed(worker)
        self._checked_at = -inf

    def on_worker_removed(self, worker: str) -> None:
        """Forget a worker that Dask has removed."""
        self._short.discard(worker)
        self._placement.on_worker_removed(worker)
        self._checked_at = -inf

    # ---- the rule ----------------------------------------------------------------------

    def look(self) -> None:
        """Check how evenly data lie on workers, before tasks move them, and evaluate the rule."""
        self._looked_at = self._clock()
        self._uneven = engagement.lie_unevenly(
            [Holding(ws.nbytes, ws.nthreads) for ws in self._state.running]
        )
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
        if len(self._state.running) < 2:
            return None
        if engagement.headroom_differs(len(self._short), len(self._state.running)):
            return Reason.HEADROOM
        if self._uneven:
            return Reason.RESIDENCY
        if engagement.speeds_differ(self._placement.slowdowns()):
            return Reason.SPEEDS
        usual = self._usual_task()
        nbytes = engagement.UNKNOWN_RESULT_BYTES if usual is None else usual.nbytes
        if engagement.links_differ(list(self._transfers(nbytes)), usual):
            return Reason.LINKS
        return None

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

    def _usual_task(self) -> UsualTask | None:
        """Return the mean of the sampled tasks; None without any."""
        return UsualTask(self._seconds.mean, self._nbytes.mean) if self._seconds.count else None

    def _note_memory(self, worker: str) -> bool:
        """Note whether a worker is short of memory; return whether that has changed."""
        memory = self._headroom.free_memory(worker)
        short = engagement.is_short(memory.free, memory.live)
        if short is (worker in self._short):
            return False
        (self._short.add if short else self._short.discard)(worker)
        return True
