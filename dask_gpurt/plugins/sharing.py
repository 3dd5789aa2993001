"""What workers learn of kernels beside communication, put together on the scheduler."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from tornado.ioloop import PeriodicCallback

from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.overlap.governor import Governor
from dask_gpurt.overlap.statistics import CacheKey, OverlapStatistics, average, significant

#: The name of what workers call.
HANDLER = "gpurt_learned"
#: Heartbeats between what a worker tells. Dask lets hearts beat more slowly the more workers there are.
SYNC_HEARTBEATS = 2
#: Seconds for which what has been put together is handed out.
AVERAGE_MAX_AGE_S = 0.5


class SharedStatistics:
    """The scheduler's end: what all workers with the same kind of device and libraries have learnt.

    Parameters
    ----------
    clock
        Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._of: defaultdict[str, dict[str, OverlapStatistics]] = defaultdict(dict)
        self._together: dict[str, tuple[float, dict[str, Any]]] = {}

    def learned(self, worker: str, cache_key: str, known: Mapping[str, Any]) -> dict[str, Any]:
        """Handler: take what a worker knows, and answer with what all know.

        Parameters
        ----------
        cache_key
            What it is true of; only workers that have the same share it.
        known
            Plain values of :class:`OverlapStatistics`.

        Raises
        ------
        KeyError, TypeError, ValueError
            When the values are none.
        """
        self._of[cache_key][worker] = OverlapStatistics.of(known)
        now = self._clock()
        at, together = self._together.get(cache_key, (-AVERAGE_MAX_AGE_S, {}))
        if now - at >= AVERAGE_MAX_AGE_S:
            together = average(list(self._of[cache_key].values())).plain()
            self._together[cache_key] = now, together
        return together

    def remove(self, worker: str) -> None:
        """A worker has left; what it has learnt is forgotten with it."""
        for known in self._of.values():
            known.pop(worker, None)


class StatsSync:
    """A worker's end: tells now and then what its governor has learnt, and gives it what all have.

    Parameters
    ----------
    worker
        The Dask worker.
    cache_key
        What is learnt is true of that.
    """

    def __init__(self, worker: Any, cache_key: CacheKey, governor: Governor, metrics: Metrics):
        self._worker = worker
        self._cache_key = str(cache_key)
        self.governor = governor
        self._metrics = metrics
        self._steps_shared = governor.steps
        heartbeat = worker.periodic_callbacks["heartbeat"].callback_time
        self._telling = PeriodicCallback(self.share, SYNC_HEARTBEATS * heartbeat)

    def start(self) -> None:
        """On the event loop."""
        self._telling.start()

    def stop(self) -> None:
        """Tell nothing any more."""
        self._telling.stop()

    async def share(self) -> None:
        """Tell and be told, if there is anything new."""
        governor = self.governor
        if governor.steps == self._steps_shared:
            return
        self._steps_shared = governor.steps
        try:
            # None is the answer of a scheduler on which the runtime has been switched off.
            together = await self._worker.scheduler.gpurt_learned(
                worker=self._worker.address,
                cache_key=self._cache_key,
                known=significant(governor.known).plain(),
            )
        except OSError as error:
            self._metrics.fallback(Fallback.OVERLAP_NOT_SHARED, str(error))
            governor.agree(None)  # what was agreed upon would be out of date soon
            return
        if together is not None:
            governor.agree(OverlapStatistics.of(together))
            self._metrics.add("overlap.agreed")
