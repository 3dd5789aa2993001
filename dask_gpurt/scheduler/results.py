"""Keep the results of transfers and barriers while they may be needed, and send them ahead of their readers.

Dask releases a result once all its dependents are done. Here one virtual client for each shuffle wants the
results, so that a lost output can be received again without rerunning transfers.

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
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, cast

from dask.typing import Key
from distributed.metrics import time
from distributed.protocol.serialize import ToPickle

from dask_gpurt.dask_hooks import PatchSet, UnsupportedError
from dask_gpurt.dask_hooks.seams import RESULTS
from dask_gpurt.dask_hooks.shuffle import RunState, ShuffleId, barrier_key, id_from_key
from dask_gpurt.dask_hooks.types import SchedulerServer, SchedulerTask, ShuffleExtension, WorkerState
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.protocol import SEND_RESULTS_OP
from dask_gpurt.scheduler.runs import IDLE_STATES, is_unfinished, owners_of
from dask_gpurt.shuffle.messages import Transferred
from dask_gpurt.shuffle.owners import Owners
from dask_gpurt.shuffle.spec import outputs_of

#: Dask's stream operations by which a worker reports that it has computed and that it has released a result.
REPORTS = ("task-finished", "release-worker-data")


class RetainedResults:
    """Keep results of runs on the scheduler, and end a run once none of its outputs is needed.

    ``ended``: called with each shuffle that ends.
    """

    def __init__(self, scheduler: SchedulerServer, ended: Callable[[ShuffleId], None]):
        self._scheduler = scheduler
        self._ended = ended
        #: The output tasks of each shuffle whose results are kept, with the partition of each if known.
        self._kept: dict[ShuffleId, dict[Key, int | None]] = {}
        #: Outputs that have been in memory since they were last received.
        self._read: dict[ShuffleId, set[int]] = {}
        self._shuffles_of: dict[Key, set[ShuffleId]] = {}
        self._pending: dict[ShuffleId, set[Key]] = {}
        #: The worker that last ran each transfer task; None if it has not run yet, or was evacuated.
        self._producers: dict[Key, str | None] = {}

    def __contains__(self, shuffle: object) -> bool:
        return shuffle in self._kept

    def outputs(self, shuffle: ShuffleId) -> Mapping[Key, int | None]:
        """Return the output tasks of a kept shuffle, with the partition of each if known."""
        return self._kept.get(shuffle, {})

    def read(self, shuffle: ShuffleId) -> set[int]:
        """Return the outputs that have been in memory since they were last received."""
        return self._read[shuffle]

    def unread(self, shuffle: ShuffleId, outputs: Iterable[int]) -> None:
        """Note that outputs will be received again."""
        self._read[shuffle].difference_update(outputs)

    def producer(self, transfer: Key) -> str | None:
        """Return the worker that a transfer task depends on: the last that ran it, unless evacuated."""
        return self._producers.get(transfer)

    def evacuated(self, worker: str, transfers: Iterable[Key]) -> None:
        """Note that the shards of transfer tasks have been copied by their owners: the worker may leave."""
        for key in transfers:
            if self._producers.get(key) == worker:
                self._producers[key] = None

    def begins(self, shuffle: ShuffleId) -> None:
        """Track a run that begins, and keep its results."""
        self._read[shuffle] = set()
        self.keep(shuffle)

    def forgotten(self, shuffle: ShuffleId) -> None:
        """Forget a shuffle whose barrier is forgotten."""
        self._read.pop(shuffle, None)

    def keep(self, shuffle: ShuffleId) -> None:
        """Keep the results of the tasks of a run."""
        barrier = self._barrier(shuffle)
        self._forget(shuffle)
        outputs = {task.key: output for task, output in outputs_of(barrier)}
        # If only some results computed from outputs were lost, the other outputs stay idle as long as the
        # collection is persisted. They must not keep the run alive.
        pending = {task.key for task in barrier.dependents if task.state not in IDLE_STATES}
        self._kept[shuffle], self._pending[shuffle] = outputs, pending
        for key in outputs:
            self._shuffles_of.setdefault(key, set()).add(shuffle)
        transfers = [task.key for task in barrier.dependencies]
        self._producers |= dict.fromkeys(transfers)
        # Dask keeps published datasets in the same way.
        self._scheduler.client_desires_keys([barrier.key, *transfers], _client(shuffle))

    def transition(self, key: Key, finish: str, worker: str | None) -> None:
        """Track the state of a task, and end its run once none of the run's outputs is needed.

        ``worker``: the worker that ran the task, if it is in memory now.
        """
        if finish == "memory" and key in self._producers:
            self._producers[key] = worker
        for shuffle in self._shuffles_of.get(key, ()):
            pending = self._pending[shuffle]
            if finish not in IDLE_STATES:
                pending.add(key)
                if finish == "memory" and (partition := self._kept[shuffle][key]) is not None:
                    self._read[shuffle].add(partition)
                continue
            pending.discard(key)
            if not pending:  # deferred: another transition of this batch may need an output again
                self._scheduler.loop.add_callback(self._end_unless_needed, shuffle)

    def _end_unless_needed(self, shuffle: ShuffleId) -> None:
        if shuffle not in self._kept or self._pending[shuffle]:
            return
        if self.is_done(shuffle):
            self.end(shuffle)
        else:  # a later graph needs other outputs of this run
            self.keep(shuffle)

    def end(self, shuffle: ShuffleId) -> None:
        """Release the kept results of a shuffle; Dask then ends the run if no output waits for it."""
        self._ended(shuffle)
        self._forget(shuffle)
        if (client := self._scheduler.clients.get(_client(shuffle))) is not None:
            keys = [task.key for task in client.wants_what]
            for key in keys:
                self._producers.pop(key, None)
            self._scheduler.client_releases_keys(keys, client.client_key, f"gpurt-shuffle-ends-{time()}")
            self._scheduler.clients.pop(client.client_key, None)

    def _forget(self, shuffle: ShuffleId) -> None:
        self._pending.pop(shuffle, None)
        for key in self._kept.pop(shuffle, ()):
            self._shuffles_of[key].discard(shuffle)
            if not self._shuffles_of[key]:
                del self._shuffles_of[key]

    def restart(self) -> None:
        """Forget all runs when the scheduler restarts and forgets all tasks."""
        for shuffle in list(self._kept):
            self._forget(shuffle)
            self._scheduler.clients.pop(_client(shuffle), None)
        self._producers.clear()
        self._read.clear()

    def end_all(self) -> None:
        """End all runs and release their kept results."""
        for shuffle in list(self._kept):
            self.end(shuffle)
        self._read.clear()

    def is_done(self, shuffle: ShuffleId) -> bool:
        """Return whether all needed outputs of a shuffle are assembled."""
        return not any(map(is_unfinished, self._barrier(shuffle).dependents))

    def _barrier(self, shuffle: ShuffleId) -> SchedulerTask:
        return self._scheduler.tasks[barrier_key(shuffle)]


def _client(shuffle: ShuffleId) -> str:
    """Return the name of the virtual client that keeps the results of a shuffle."""
    return f"gpurt-shuffle-{shuffle}"


class SmallResults:
    """Send results of transfers and barriers from the scheduler to the workers that need them next.

    ``ready``: the workers with the runtime.
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
            RESULTS.require()
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
