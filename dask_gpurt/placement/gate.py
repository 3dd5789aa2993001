"""Switch placement on only while links between workers differ enough to matter; otherwise Dask chooses.

Decisions and their figures: ``docs/decisions/placement.md``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from time import monotonic
from typing import NamedTuple

from dask_gpurt.dask_hooks.types import SchedulerState, TaskPrefix
from dask_gpurt.observe import Metrics
from dask_gpurt.placement.estimates import mean_result_bytes
from dask_gpurt.placement.strategy import Placement
from dask_gpurt.topology import Topology
from dask_gpurt.topology.model import BETWEEN_HOSTS

logger = logging.getLogger(__name__)

#: Two links differ if the result of a mean task takes this many times as long over one as over the other:
#: speeds are learnt from few transfers, so that a smaller ratio may be chance ...
LINK_FACTOR = 2.0
#: ... and if the difference is at least this fraction of the duration of that task, since a choice of links
#: gains no more than the difference.
LINK_SHARE = 0.05
#: The assumed size of a result while nothing is known of tasks: too small to outweigh one.
UNKNOWN_RESULT_BYTES = 1 << 20
#: The shortest interval between checks, in seconds: a check looks at links of all hosts.
RECHECK_S = 0.5
#: How long placement stays on after the last difference, in seconds: a hysteresis.
HOLD_S = 5.0
#: The most hosts, and the most neighbours on each host, whose links are compared.
MAX_HOSTS, MAX_NEIGHBOURS = 16, 4


# ---- the rule ------------------------------------------------------------------------------------------


class UsualTask(NamedTuple):
    """Describe the mean of the tasks at present."""

    seconds: float
    nbytes: float


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


def links_differ(seconds: Sequence[float], usual: UsualTask | None) -> bool:
    """Return whether links differ enough to matter for the usual task.

    ``seconds``: transfer times of the usual task's result over links between workers.
    ``usual``: the usual task. If None, any difference of links counts.
    """
    if not seconds:
        return False
    fast, slow = min(seconds), max(seconds)
    if slow < LINK_FACTOR * fast or slow == fast:
        return False
    return usual is None or slow - fast >= LINK_SHARE * usual.seconds


# ---- on a scheduler ------------------------------------------------------------------------------------


class GatedPlacement:
    """Bind a placement while links between workers differ in a way that matters for the present tasks.

    Otherwise Dask's own methods are in place, and decisions have no overhead. The rule is evaluated again
    when a memory report or a graph arrives after a worker has joined, moved or left, or at least
    ``RECHECK_S`` after the last check.

    ``clock``: returns the time in seconds.
    """

    def __init__(
        self,
        placement: Placement,
        state: SchedulerState,
        topology: Topology,
        metrics: Metrics,
        clock: Callable[[], float] = monotonic,
    ):
        self._placement = placement
        self._state = state
        self._topology = topology
        self._metrics = metrics
        self._clock = clock
        self._is_open = False
        self._checked_at = self._differed_at = -math.inf

    @property
    def is_open(self) -> bool:
        """Return whether placement chooses at present, rather than Dask."""
        return self._is_open

    def bind(self) -> None:
        """Bind the placement if it can matter for the present workers."""
        self._check()

    def unbind(self) -> None:
        """Unbind the placement, so that Dask chooses."""
        if self._is_open:
            self._placement.unbind()
            self._is_open = False

    # ---- events ------------------------------------------------------------------------

    def on_graph(self) -> None:
        """Note a new graph, before any of its tasks is placed."""
        if self._clock() - self._checked_at >= RECHECK_S:
            self._check()

    def on_memory_reported(self, worker: str) -> None:
        """Note that a worker has reported its memory."""
        self.on_graph()  # reports are regular, so links are checked between graphs too
        self._placement.on_memory_reported(worker)

    def on_place_changed(self, worker: str) -> None:
        """Note that a worker has joined or that its place has changed."""
        self._placement.on_place_changed(worker)
        self._checked_at = -math.inf

    def on_worker_removed(self, worker: str) -> None:
        """Forget a worker that Dask has removed."""
        self._placement.on_worker_removed(worker)
        self._checked_at = -math.inf

    # ---- checks ------------------------------------------------------------------------

    def _check(self) -> None:
        """Evaluate the rule, and bind or unbind the placement."""
        now = self._checked_at = self._clock()
        differ = self._differ()
        if differ:
            self._differed_at = now
        elif now - self._differed_at < HOLD_S:
            return
        if differ is self._is_open:
            return
        self._is_open = differ
        if differ:
            logger.info("Placement is on: links between workers differ")
            self._metrics.add("placement.engaged")
            self._placement.bind()
        else:
            logger.info("Placement is off: links between workers do not differ enough for it to matter")
            self._placement.unbind()

    def _differ(self) -> bool:
        if len(self._state.running) < 2:
            return False
        usual = usual_task(self._state.task_prefixes.values())
        nbytes = UNKNOWN_RESULT_BYTES if usual is None else usual.nbytes
        transfers = list(self._transfers(nbytes))
        differ = links_differ(transfers, usual)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "Links differ: %s. %.3g to %.3g s over %d links for %.0f bytes; usual task %s",
                differ,
                min(transfers, default=0.0),
                max(transfers, default=0.0),
                len(transfers),
                nbytes,
                usual,
            )
        return differ

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
