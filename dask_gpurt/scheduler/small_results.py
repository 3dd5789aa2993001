"""Send the results of transfers and barriers ahead of the tasks that need them.

A barrier needs the results of all transfers, and each output needs the result of the barrier: a few numbers
each. In Dask workers fetch them from their peers, which puts one round trip before the barrier and one after
it on the critical path. The scheduler knows these results: the end of a transfer carries the attempt that has
succeeded, and the result of a barrier is its run id. So the scheduler sends them to workers right before the
tasks that need them.

A sent result counts as a replica, as if the worker had fetched it, and is released in the same way. If a task
runs again, messages about its previous result may arrive after the new one was sent::

    the scheduler releases a result; the task runs again, on another worker
    the scheduler sends the new result to a worker that had the previous one, and counts a replica
    that worker's report arrives that it has computed, or released, the previous one

Dask would tell the worker to drop the key, and tasks that are about to use it would fail. Or it would forget
the replica: the worker would keep the result when all others release it, and use it after the task has run a
third time. So workers confirm what was sent. Until then their reports about these keys are ignored.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from dask.typing import Key
from distributed.protocol.serialize import ToPickle

from dask_gpurt.dask_hooks import PatchSet, UnsupportedError
from dask_gpurt.dask_hooks.scheduler import require_replicas
from dask_gpurt.dask_hooks.shuffle import RunState, id_from_key
from dask_gpurt.dask_hooks.types import SchedulerServer, SchedulerTask, ShuffleExtension, WorkerState
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.protocol import SEND_RESULTS_OP
from dask_gpurt.scheduler.runs import owners_of
from dask_gpurt.shuffle.owners import Owners
from dask_gpurt.shuffle.transferred import Transferred

#: Dask's stream operations by which a worker reports that it has computed and that it has released a result.
REPORTS = ("task-finished", "release-worker-data")


class SmallResults:
    """Send results of transfers and barriers from the scheduler to the workers that need them next.

    Parameters
    ----------
    scheduler
        Dask's scheduler.
    ready
        The workers with the runtime.
    """

    def __init__(self, scheduler: SchedulerServer, ready: Collection[str], metrics: Metrics):
        self._scheduler = scheduler
        self._extension: ShuffleExtension = scheduler.extensions["shuffle"]
        self._ready = ready
        self._metrics = metrics
        self._send_for: Mapping[str, Callable[[RunState, SchedulerTask], None]] = {}
        self._patches = PatchSet()
        #: How many results a worker has to confirm, by worker and key.
        self._unconfirmed: defaultdict[str, Counter[Key]] = defaultdict(Counter)

    def install(self) -> None:
        """Start sending results, if this version of Dask is supported."""
        try:
            require_replicas()
        except UnsupportedError as error:
            self._metrics.fallback(Fallback.SHUFFLE_RESULTS_FETCHED, str(error))
            return
        for report in REPORTS:
            self._patches.put_item(self._scheduler.stream_handlers, report, self._unless_of_the_previous)
        self._send_for = {"processing": self._send_transfers, "memory": self._send_barrier}

    def uninstall(self) -> None:
        """Stop sending results; workers fetch them again."""
        self._send_for = {}
        self._patches.restore()
        self._unconfirmed.clear()

    def transition(self, key: Key, finish: str) -> None:
        """Send results that a transition requires, ahead of the messages that the transition itself sends."""
        send = self._send_for.get(finish)
        if send is None or (shuffle := id_from_key(key)) is None:
            return
        run = self._extension.active_shuffles.get(shuffle)
        if run is not None and owners_of(run) is not None:
            send(run, self._scheduler.tasks[key])

    def _send_transfers(self, run: RunState, barrier: SchedulerTask) -> None:
        """Send the results of all transfers to the worker of a barrier."""
        results = {}
        for task in barrier.dependencies:
            if (result := Transferred.of_task(task, run.run_id)) is None:
                return  # if the worker must fetch one result, it may as well fetch all
            results[task] = result
        if barrier.processing_on is not None:
            self._send(barrier.processing_on, results)

    def _send_barrier(self, run: RunState, barrier: SchedulerTask) -> None:
        """Send the result of a barrier to the owners of outputs."""
        owners = cast(Owners, run.run_spec.worker_for)
        for owner in {share.owner for share in owners.shares.values()}:
            if (worker := self._scheduler.workers.get(owner)) is not None:
                self._send(worker, {barrier: run.run_id})

    def _send(self, worker: WorkerState, results: Mapping[SchedulerTask, int]) -> None:
        """Send a worker the results that it lacks, ahead of the task that needs them."""
        missing = {task: result for task, result in results.items() if worker not in (task.who_has or ())}
        # Dask closes a worker that receives an unknown operation, as this is without the runtime.
        if not missing or worker.address not in self._ready:
            return
        sent = ToPickle({task.key: result for task, result in missing.items()})
        self._scheduler.send_all({}, {worker.address: [{"op": SEND_RESULTS_OP, "results": sent}]})
        for task in missing:
            self._scheduler.add_replica(task, worker)
        self._unconfirmed[worker.address].update(task.key for task in missing)
        self._metrics.add("shuffle.results.sent", len(missing))

    def confirmed(self, worker: str, keys: Collection[Key]) -> None:
        """Note that a worker has received results (stream handler)."""
        if worker in self._unconfirmed:
            self._unconfirmed[worker] -= Counter(keys)

    def on_worker_removed(self, worker: str) -> None:
        """Forget a worker that has left."""
        self._unconfirmed.pop(worker, None)

    def _unless_of_the_previous(self, handle: Callable[..., None]) -> Callable[..., None]:
        """Ignore reports about results that a worker has yet to confirm: they are of the previous results."""

        def report(key: Key, worker: str, **message: Any) -> None:
            sent = self._unconfirmed.get(worker)
            if not sent or key not in sent:
                handle(key=key, worker=worker, **message)

        return report
