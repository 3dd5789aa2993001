"""Synchronise kernel statistics between workers, through the scheduler."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from tornado.ioloop import PeriodicCallback

from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.overlap.governor import Governor, rows
from dask_gpurt.overlap.statistics import OverlapStatistics, average, significant
from dask_gpurt.overlap.statistics_file import CacheKey

#: Heartbeats between two reports of a worker. Dask's heartbeat interval grows with the number of workers.
SYNC_HEARTBEATS = 2
#: How long an average is reused before it is recomputed, in seconds.
AVERAGE_MAX_AGE_S = 0.5


class SharedStatistics:
    """Average the statistics of all workers with the same device and libraries, on the scheduler.

    Parameters
    ----------
    clock
        Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._of: defaultdict[str, dict[str, OverlapStatistics]] = defaultdict(dict)
        self._together: dict[str, tuple[float, dict[str, Any]]] = {}

    def learned(self, worker: str, cache_key: str, known: Mapping[str, Any]) -> dict[str, Any]:
        """Store a worker's statistics, and return the average over workers with the same cache key (handler).

        Parameters
        ----------
        cache_key
            Identifies the device and the library versions.
        known
            :class:`OverlapStatistics` as plain values.

        Raises
        ------
        KeyError, TypeError, ValueError
            If the values are malformed.
        """
        self._of[cache_key][worker] = OverlapStatistics.of(known)
        now = self._clock()
        at, together = self._together.get(cache_key, (-AVERAGE_MAX_AGE_S, {}))
        if now - at >= AVERAGE_MAX_AGE_S:
            together = average(list(self._of[cache_key].values())).plain()
            self._together[cache_key] = now, together
        return together

    def kernels(self) -> list[dict[str, Any]]:
        """Return the statistics of each kernel and setting as :func:`~dask_gpurt.overlap.governor.rows`.

        The ``device`` of each row is its cache key: device and library versions.
        """
        return [
            {"device": cache_key, **row}
            for cache_key, of in self._of.items()
            if of
            for row in rows(average(list(of.values())))
        ]

    def remove(self, worker: str) -> None:
        """Forget the statistics of a worker that has left."""
        for known in self._of.values():
            known.pop(worker, None)


class StatsSync:
    """Exchange the statistics of a worker's governor for the average of all workers.

    Parameters
    ----------
    worker
        The Dask worker.
    cache_key
        The device and library versions to which the statistics apply.
    """

    def __init__(self, worker: WorkerServer, cache_key: CacheKey, governor: Governor, metrics: Metrics):
        self._worker = worker
        self._cache_key = str(cache_key)
        self.governor = governor
        self._metrics = metrics
        self._steps_shared = governor.steps
        heartbeat = worker.periodic_callbacks["heartbeat"].callback_time
        self._telling = PeriodicCallback(self.share, SYNC_HEARTBEATS * heartbeat)

    def start(self) -> None:
        """Start the periodic exchange. On the event loop."""
        self._telling.start()

    def stop(self) -> None:
        """Stop the periodic exchange."""
        self._telling.stop()

    async def share(self) -> None:
        """Exchange statistics with the scheduler, if the governor has new ones."""
        governor = self.governor
        if governor.steps == self._steps_shared:
            return
        self._steps_shared = governor.steps
        try:
            # A scheduler on which the runtime is off returns None.
            together = await self._worker.scheduler.gpurt_learned(
                worker=self._worker.address,
                cache_key=self._cache_key,
                known=significant(governor.known).plain(),
            )
        except OSError as error:
            self._metrics.fallback(Fallback.OVERLAP_NOT_SHARED, str(error))
            governor.agree(None)  # the last average would become stale
            return
        if together is not None:
            governor.agree(OverlapStatistics.of(together))
            self._metrics.add("overlap.agreed")
