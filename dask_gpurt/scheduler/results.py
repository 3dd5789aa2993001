"""Keep the results of transfers and barriers while an output of their run may be needed again.

Dask releases a result once all its dependents are done. Here one virtual client for each shuffle wants the
results, so that a lost output can be received again without rerunning transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from dask.typing import Key
from distributed.metrics import time

from dask_gpurt.dask_hooks.shuffle import ShuffleId, barrier_key
from dask_gpurt.dask_hooks.types import SchedulerServer, SchedulerTask
from dask_gpurt.scheduler.runs import IDLE_STATES, is_unfinished
from dask_gpurt.shuffle.spec import outputs_of


class KeptResults:
    """Keep results of runs on the scheduler, and end a run once none of its outputs is needed.

    Parameters
    ----------
    scheduler
        Dask's scheduler.
    ended
        Called with each shuffle that ends.
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

        Parameters
        ----------
        worker
            The worker that ran the task, if it is in memory now.
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
