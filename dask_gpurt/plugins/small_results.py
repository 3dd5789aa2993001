"""Send the results of transfers and barriers ahead of the tasks that need them.

A barrier needs the results of all transfers, and each output that of the barrier: a few numbers each. Dask
has a worker fetch them from those that have them, one round trip before the barrier and one after it, in
which nothing else happens. The scheduler can know them. A worker tells with the end of a transfer which
attempt has succeeded, and the result of a barrier is the number of its run. So they are sent to the workers
that need them, right before the tasks that do.

A result that was sent counts as a replica from then on, as if it had been fetched: it is released with the
task.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from dask.typing import Key
from distributed.protocol.serialize import ToPickle

from dask_gpurt.dask_hooks import UnsupportedError
from dask_gpurt.dask_hooks.scheduler import require_replicas
from dask_gpurt.dask_hooks.shuffle import id_from_key
from dask_gpurt.dask_hooks.types import SchedulerServer
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.shuffle.owners import Owners
from dask_gpurt.shuffle.transferred import Transferred

#: The stream operation by which the scheduler sends results to a worker.
RESULTS = "gpurt-results"


class SmallResults:
    """Send results of shuffles from the scheduler to the workers that are about to need them.

    Parameters
    ----------
    scheduler
        Dask's.
    ready
        The workers that have the runtime.
    """

    def __init__(self, scheduler: SchedulerServer, ready: Collection[str], metrics: Metrics):
        self._scheduler = scheduler
        self._extension = scheduler.extensions["shuffle"]
        self._ready = ready
        self._metrics = metrics
        self._send_for: Mapping[str, Callable[[Any, Any], None]] = {}

    def install(self) -> None:
        """Send from now on, if Dask is as it is known."""
        try:
            require_replicas()
        except UnsupportedError as error:
            self._metrics.fallback(Fallback.SHUFFLE_RESULTS_FETCHED, str(error))
            return
        self._send_for = {"processing": self._send_transfers, "memory": self._send_barrier}

    def uninstall(self) -> None:
        """Let workers fetch these results again."""
        self._send_for = {}

    def transition(self, key: Key, finish: str) -> None:
        """Note what has become of a task. Its messages, and those of its dependents, are not sent yet."""
        send = self._send_for.get(finish)
        if send is None or (shuffle := id_from_key(key)) is None:
            return
        run = self._extension.active_shuffles.get(shuffle)
        if run is not None and isinstance(run.run_spec.worker_for, Owners):
            send(run, self._scheduler.tasks[key])

    def _send_transfers(self, run: Any, barrier: Any) -> None:
        """Send the results of all transfers to the worker that a barrier has been given to."""
        results = {}
        for task in barrier.dependencies:
            if (result := Transferred.of_task(task, run.run_id)) is None:
                return  # it fetches one, and so may fetch all
            results[task] = result
        self._send(barrier.processing_on, results)

    def _send_barrier(self, run: Any, barrier: Any) -> None:
        """Send the result of a barrier to the workers that put outputs together."""
        for owner in {share.owner for share in run.run_spec.worker_for.shares.values()}:
            if (worker := self._scheduler.workers.get(owner)) is not None:
                self._send(worker, {barrier: run.run_id})

    def _send(self, worker: Any, results: Mapping[Any, Any]) -> None:
        """Send the results that a worker has not, as a message before that of the task that needs them."""
        missing = {task: result for task, result in results.items() if worker not in task.who_has}
        # Dask closes a worker that is sent what it does not know, as one does where the runtime is not on.
        if not missing or worker.address not in self._ready:
            return
        sent = ToPickle({task.key: result for task, result in missing.items()})
        self._scheduler.send_all({}, {worker.address: [{"op": RESULTS, "results": sent}]})
        for task in missing:
            self._scheduler.add_replica(task, worker)
        self._metrics.add("shuffle.results.sent", len(missing))
