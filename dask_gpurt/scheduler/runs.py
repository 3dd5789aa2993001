"""Look up the runs of a scheduler: which outputs are needed, and which workers may own them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import cast

from dask.typing import Key

from dask_gpurt.dask_hooks.scheduler import allowed_workers, unpaused_later
from dask_gpurt.dask_hooks.shuffle import P2PConsistencyError, RunState, ShuffleId, barrier_key, id_from_key
from dask_gpurt.dask_hooks.types import SchedulerServer, SchedulerTask, ShuffleExtension
from dask_gpurt.dask_hooks.worker import LEAVING
from dask_gpurt.scheduler.switching import Workers
from dask_gpurt.shuffle.owners import Owners
from dask_gpurt.shuffle.spec import RunSpec, outputs_of

#: States of outputs that nothing waits for.
IDLE_STATES = ("released", "forgotten", "erred")


def possible_owners(scheduler: SchedulerServer, workers: Workers, specs: Iterable[RunSpec]) -> list[str]:
    """Return the workers that can own outputs of all given shuffles.

    They have the runtime and the device of the frames, and meet the user's restrictions of the tasks by
    worker, host and resource (Dask's own shuffles only regard workers). An output whose owner does not meet
    them would never run. Workers that retire or close are among them only if there are no others, and so are
    silent workers.
    """
    found = list(scheduler.workers)
    for spec in specs:
        able = workers.ready if spec.device is None else workers.ready_with(spec.device)
        allowed = _allowed(scheduler, barrier_key(spec.id))
        found = [worker for worker in found if worker in able and (allowed is None or worker in allowed)]
    found = [worker for worker in found if scheduler.workers[worker].status not in LEAVING] or found
    return [worker for worker in found if worker not in workers.silent] or found


def _allowed(scheduler: SchedulerServer, barrier: Key) -> Collection[str] | None:
    """Return the workers that a barrier, and so its outputs, may run on; None for all.

    Paused workers are among them only if there are no others: they have no free memory for outputs.
    """
    task = scheduler.tasks[barrier]
    allowed = allowed_workers(scheduler, task)
    if allowed is None:
        return None
    return {ws.address for ws in allowed or unpaused_later(scheduler, task)}


def require_allowed(scheduler: SchedulerServer, shuffle: ShuffleId) -> None:
    """Check that a worker of the cluster may run the outputs of a shuffle, paused or not.

    Raises P2PConsistencyError if there is none: a run would assign outputs to workers that do not exist.
    """
    task = scheduler.tasks[barrier_key(shuffle)]
    if (allowed := _allowed(scheduler, task.key)) is not None and not allowed:
        asked = {
            "workers": sorted(task.worker_restrictions or ()),
            "hosts": sorted(task.host_restrictions or ()),
            "resources": dict(task.resource_restrictions or {}),
        }
        what = ", ".join(f"{name} {value}" for name, value in asked.items() if value)
        raise P2PConsistencyError(
            f"no worker may run the outputs of shuffle {shuffle}: they are restricted to {what}, of which "
            "the cluster has none. allow_other_workers=True makes that a preference"
        )


def is_unfinished(task: SchedulerTask) -> bool:
    """Return whether the task of an output is needed, and not in memory."""
    return task.state not in ("memory", *IDLE_STATES)


def needed_outputs(barrier: SchedulerTask, outputs: Iterable[int]) -> set[int]:
    """Return the subset of outputs that are unfinished, or have no task yet.

    ``barrier``: the barrier task of the shuffle. Several graphs may share a shuffle, so an output may have
    several tasks, or none yet.
    """
    needed, others = set[int | None](), set[int | None]()
    for task, output in outputs_of(barrier):
        (needed if is_unfinished(task) else others).add(output)
    return set(outputs) - (others - needed)


def asked_outputs(barrier: SchedulerTask, outputs: Iterable[int]) -> set[int]:
    """Return the subset of outputs that have a task; all of them if a task's output is unknown."""
    asked = {output for _, output in outputs_of(barrier)}
    return {output for output in outputs if output in asked or None in asked}


def sharing_outputs(barrier: SchedulerTask) -> set[ShuffleId]:
    """Return the other shuffles that share outputs with a barrier's, such as the other side of a join."""
    others = {other.key for output in barrier.dependents for other in output.dependencies} - {barrier.key}
    return {shuffle for key in others if (shuffle := id_from_key(key))}


def owners_of(run: RunState) -> Owners | None:
    """Return the owner of each output of a run of the runtime; None for a run of Dask's own."""
    owners = run.run_spec.worker_for
    return owners if isinstance(owners, Owners) else None


class ActiveRuns:
    """Look up the active runs of a scheduler, their tasks and the owners of their outputs."""

    def __init__(self, scheduler: SchedulerServer, workers: Workers):
        self._scheduler = scheduler
        self._extension: ShuffleExtension = scheduler.extensions["shuffle"]
        self._workers = workers

    def all(self) -> dict[ShuffleId, RunState]:
        """Return the active runs of the runtime, by shuffle."""
        active = self._extension.active_shuffles
        return {shuffle: run for shuffle, run in active.items() if owners_of(run) is not None}

    def get(self, shuffle: ShuffleId) -> RunState | None:
        """Return the active run of a shuffle; None if there is none, or it is Dask's own."""
        run = self._extension.active_shuffles.get(shuffle)
        return run if run is not None and owners_of(run) is not None else None

    def is_active(self, shuffle: ShuffleId) -> bool:
        """Return whether a shuffle has an active run of the runtime."""
        return self.get(shuffle) is not None

    def current_owners(self, shuffle: ShuffleId, run_id: int) -> Owners | None:
        """Return the owner of each output of a run of the runtime; None if it is not the active one."""
        run = self.get(shuffle)
        return owners_of(run) if run is not None and run.run_id == run_id else None

    def is_current(self, shuffle: ShuffleId, run_id: int) -> bool:
        """Return whether a run of the runtime is the active run of its shuffle."""
        return self.current_owners(shuffle, run_id) is not None

    def barrier(self, shuffle: ShuffleId) -> SchedulerTask:
        """Return the barrier task of a shuffle."""
        return self._scheduler.tasks[barrier_key(shuffle)]

    def is_task(self, key: Key, *states: str) -> bool:
        """Return whether a task exists and is in one of the states."""
        task = self._scheduler.tasks.get(key)
        return task is not None and task.state in states

    def owners(self, shuffle: ShuffleId) -> Owners:
        """Return the owner of each output of an active run of the runtime."""
        return cast(Owners, self._extension.active_shuffles[shuffle].run_spec.worker_for)

    def is_sealed(self, shuffle: ShuffleId) -> bool:
        """Return whether all shares are sealed: their owners have received every shard."""
        return self.owners(shuffle).sealed

    def owned(self, shuffle: ShuffleId, worker: str) -> set[int]:
        """Return the outputs that a worker owns."""
        return {output for output, owner in self.owners(shuffle).items() if owner == worker}

    def unfinished(self, shuffle: ShuffleId, outputs: Iterable[int]) -> set[int]:
        """Return the subset of outputs that are unfinished, or have no task yet."""
        return needed_outputs(self.barrier(shuffle), outputs)

    def load(self, shuffle: ShuffleId, moved: Collection[int]) -> Counter[str]:
        """Return the number of unfinished outputs of each worker, excluding those that move."""
        owners = self.owners(shuffle)
        return Counter(owners[output] for output in self.unfinished(shuffle, owners) - set(moved))

    def candidates(self, *shuffles: ShuffleId) -> list[str]:
        """Return the workers that may own outputs of all given shuffles."""
        specs = [
            cast(RunSpec, self._extension.active_shuffles[shuffle].run_spec.spec) for shuffle in shuffles
        ]
        return possible_owners(self._scheduler, self._workers, specs)

    def sharing(self, shuffle: ShuffleId) -> set[ShuffleId]:
        """Return a shuffle and the active ones that share outputs with it, such as both sides of a join."""
        return {shuffle} | {
            other for other in sharing_outputs(self.barrier(shuffle)) if self.is_active(other)
        }

    def grouped(self, shuffles: Collection[ShuffleId]) -> list[set[ShuffleId]]:
        """Return the given shuffles in groups that share outputs."""
        groups: list[set[ShuffleId]] = []
        for shuffle in shuffles:
            if not any(shuffle in group for group in groups):
                groups.append(self.sharing(shuffle))
        return groups
