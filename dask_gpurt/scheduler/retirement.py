"""Evacuate a worker that retires from the active runs, so that nothing has to be done again.

Dask replicates the data of a worker before it removes it. The runtime does the same with shuffles, meanwhile:

1. The worker's outputs that are not in memory move to other workers.
2. The worker offers its shards to the new owners, and all owners copy its shards that they would read in
   place.
3. Once they have, its transfers do not depend on it any more, and it may leave.

If the owners stop making progress, the worker leaves nevertheless, and its inputs are transferred again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from dask_gpurt.dask_hooks import PatchSet, UnsupportedError
from dask_gpurt.dask_hooks.scheduler import replicate_since, wrap_retirement
from dask_gpurt.dask_hooks.types import SchedulerServer, WorkerState
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.protocol import EVACUATE_HANDLER
from dask_gpurt.scheduler.recovery import REPAIR_POLL_INTERVAL_S, Recovery
from dask_gpurt.scheduler.worker_calls import ask
from dask_gpurt.shuffle.losses import Contribution
from dask_gpurt.shuffle.run import EVACUATION_STEP_S

logger = logging.getLogger(__name__)

Track = Callable[..., Coroutine[Any, Any, Any]]


class Retirement:
    """Delay the removal of workers that retire until they are evacuated.

    ``recovery``: moves outputs, and knows what a worker has transferred.
    """

    def __init__(self, scheduler: SchedulerServer, recovery: Recovery, metrics: Metrics):
        self._scheduler = scheduler
        self._recovery = recovery
        self._metrics = metrics
        self._patches = PatchSet()

    def install(self) -> None:
        """Wrap Dask's retirement, if this version of Dask is supported."""
        try:
            wrap_retirement(self._patches, self._scheduler, self._track)
        except UnsupportedError as error:
            self._metrics.fallback(Fallback.SHUFFLE_RETIREMENT, str(error))

    def uninstall(self) -> None:
        """Restore Dask's retirement."""
        self._patches.restore()

    def _track(self, original: Track) -> Track:
        async def track(ws: WorkerState, policy: Any, **options: Any) -> Any:
            try:
                if await self.evacuate(ws.address):
                    replicate_since(policy)
            except Exception:  # it may leave nevertheless: it then counts as lost
                logger.exception("worker %s retires without being evacuated", ws.address)
            return await original(ws, policy, **options)

        return track

    async def evacuate(self, worker: str) -> bool:
        """Wait until no active run depends on a worker, or owners make no progress; return whether it waited.

        Meanwhile the worker may end tasks, such as outputs that it was assembling already.
        """
        self._recovery.retires(worker)
        left, waited = math.inf, False
        while contributed := self._recovery.contributions(worker):
            waited = True
            if self._recovery.is_repair_pending(contributed):  # a moment later the new owners are known
                await asyncio.sleep(REPAIR_POLL_INTERVAL_S)
                continue
            found = await self._ask(worker, contributed)
            done = [shuffle for shuffle, shards in found.items() if not shards]
            for shuffle in done:
                self._recovery.evacuated(worker, contributed[shuffle])
            before, left = left, sum(found.values())
            if not done and (left >= before or not found):
                logger.warning("worker %s retires before its shards have been copied", worker)
                break
        return waited

    async def _ask(self, worker: str, contributed: Mapping[Any, Contribution]) -> Mapping[Any, int]:
        """Ask a worker to have its shards copied, for some seconds; return how many are left, by shuffle."""
        runs = [(shuffle, each.run_id, each.epoch) for shuffle, each in contributed.items()]
        found = await ask(self._scheduler, worker, EVACUATE_HANDLER, 2 * EVACUATION_STEP_S, runs=runs)
        if isinstance(found, Exception):
            logger.warning("worker %s, which retires, does not answer: %r", worker, found)
            return {}
        return found or {}  # None: the runtime is off there
