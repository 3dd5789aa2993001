"""Extend Dask's p2p extension on the scheduler, which creates runs, chooses owners and restarts shuffles.

Methods are replaced on the one instance. For shuffles of plain Dask each replacement calls the original.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, cast

from dask.typing import Key
from distributed.metrics import time

from dask_gpurt.config import Settings
from dask_gpurt.dask_hooks import PatchSet, UnsupportedError
from dask_gpurt.dask_hooks.shuffle import (
    ArrayRechunkSpec,
    DataFrameShuffleSpec,
    P2PConsistencyError,
    ShuffleId,
    ShuffleRunSpec,
    barrier_key,
    end_run,
    id_from_key,
    keep_barriers_in_bags,
    name_workers,
    replace_on_extension,
    restart,
    restart_without,
    runs_of,
    set_restriction,
    silence,
)
from dask_gpurt.dask_hooks.shuffle import ShuffleSpec as DaskShuffleSpec
from dask_gpurt.dask_hooks.types import SchedulerServer, ShuffleExtension, WorkerState
from dask_gpurt.frames import library
from dask_gpurt.frames.registry import LIBRARIES
from dask_gpurt.observe import Fallback, MethodChoice, Metrics
from dask_gpurt.protocol import ACCEPTED_OP
from dask_gpurt.scheduler.balancing import Balancing
from dask_gpurt.scheduler.recovery import SHUFFLE_TOPIC, Recovery
from dask_gpurt.scheduler.results import SmallResults
from dask_gpurt.scheduler.runs import (
    ActiveRuns,
    asked_outputs,
    is_unfinished,
    needed_outputs,
    possible_owners,
    require_allowed,
)
from dask_gpurt.scheduler.switching import Workers
from dask_gpurt.scheduler.unresponsive import Abandoning, BarrierEnds, Retirement
from dask_gpurt.shuffle.losses import ConsecutiveRuns
from dask_gpurt.shuffle.owners import Owners
from dask_gpurt.shuffle.rechunk import RechunkSpec
from dask_gpurt.shuffle.run import ASSEMBLED_KEY
from dask_gpurt.shuffle.spec import RunSpec, ShuffleSpec, outputs_of

logger = logging.getLogger(__name__)


class SchedulerShuffles:
    """Run shuffles through the runtime, including those of clients without it."""

    def __init__(self, scheduler: SchedulerServer, settings: Settings, metrics: Metrics, workers: Workers):
        self._scheduler = scheduler
        self._extension: ShuffleExtension = scheduler.extensions["shuffle"]
        self._settings = settings
        self._metrics = metrics
        self._workers = workers
        self._patches = PatchSet()
        self._undo = ExitStack()
        self._in_a_row = ConsecutiveRuns()
        self.runs = runs = ActiveRuns(scheduler, workers)
        self.recovery = Recovery(
            scheduler, workers, runs, settings.shuffle.retries, metrics, self._begin_again
        )
        self.abandoning = Abandoning(scheduler, workers, runs, self.recovery.rerun)
        self._barrier_ends = BarrierEnds(scheduler)
        self.results = SmallResults(scheduler, workers.ready, metrics)
        self._balancing = Balancing(scheduler, runs, self.recovery, workers.token)
        self._retirement = Retirement(scheduler, self.recovery, metrics)

    def _begin_again(self, shuffle_id: ShuffleId, reason: str) -> None:
        logger.warning("Shuffle %s restarts: %s", shuffle_id, reason)
        self._scheduler.log_event(
            SHUFFLE_TOPIC, {"action": "begins-again", "shuffle": str(shuffle_id), "reason": reason}
        )
        restart(self._extension, self._scheduler, shuffle_id, f"gpurt-begin-again-{time()}")

    def install(self) -> None:
        """Take over new runs. Active runs of Dask are left alone."""
        replace_on_extension(
            self._patches,
            self._extension,
            {
                "_retrieve_spec": self._retrieve_spec,
                "_create": self._create,
                "_calculate_worker_for": self._calculate_worker_for,
                "_restart_recommendations": self._restart_recommendations,
                "_restart_shuffle": self._restart_shuffle,
                "transition": self._transition,
                "remove_worker": self._remove_worker,
                "valid_workers_downscaling": self._valid_workers_downscaling,
            },
        )
        self._undo.callback(silence(self._was_taken_over))
        try:
            keep_barriers_in_bags(self._patches)
        except UnsupportedError as error:
            self._metrics.fallback(Fallback.SHUFFLE_BAGS, str(error))
        self._barrier_ends.install()
        self.results.install()
        self._retirement.install()

    def uninstall(self) -> None:
        """Restore Dask's extension; runs that were taken over restart as Dask's own."""
        self._retirement.uninstall()
        self.results.uninstall()
        self._barrier_ends.uninstall()
        self.recovery.end_all()
        self._patches.restore()
        self._undo.close()
        stimulus_id = f"gpurt-off-{time()}"
        for shuffle_id, run in self.runs.all().items():
            if self._is_dasks(shuffle_id):
                message = f"the runtime was switched off during {run}"
                restart_without(self._extension, self._scheduler, run, message, stimulus_id)

    def _is_dasks(self, shuffle_id: ShuffleId) -> bool:
        barrier: Any = self._scheduler.tasks[barrier_key(shuffle_id)].run_spec
        return type(barrier.spec) in (DataFrameShuffleSpec, ArrayRechunkSpec)

    def transition(
        self, key: Key, finish: str, worker: str | None, metadata: Mapping[str, Any] | None
    ) -> None:
        """Track the state of a task.

        ``worker``, ``metadata``: the worker that ran the task and the metadata that it sent, if the task is
        in memory now.
        """
        self.recovery.transition(key, finish, worker)
        self.abandoning.transition(key, finish)
        if finish in ("memory", "forgotten"):
            self._in_a_row.done(key)
        if finish == "forgotten" and isinstance(key, str) and (shuffle_id := id_from_key(key)):
            self._in_a_row.forget(shuffle_id)
            self.recovery.forgotten(shuffle_id)
            self._balancing.forgotten(shuffle_id)
        if finish == "memory":
            self._balancing.in_memory(key)
            if worker is not None and metadata and ASSEMBLED_KEY in metadata:
                self._accept(key, worker)
        self.results.transition(key, finish)

    def _accept(self, key: Key, worker: str) -> None:
        """Tell a worker that the result of a task that has assembled outputs is accepted."""
        # Dask closes a worker that receives an unknown operation, as this is without the runtime.
        if self._patches and worker in self._workers.ready and worker in self._scheduler.stream_comms:
            self._scheduler.send_all({}, {worker: [{"op": ACCEPTED_OP, "key": key}]})

    # ---- replacements of the extension's methods -----------------------------------------

    def _retrieve_spec(
        self, original: Callable[[ShuffleId], DaskShuffleSpec[Any]]
    ) -> Callable[[ShuffleId], DaskShuffleSpec[Any]]:
        def retrieve(shuffle_id: ShuffleId) -> DaskShuffleSpec[Any]:
            spec = original(shuffle_id)
            if type(spec) not in (DataFrameShuffleSpec, ArrayRechunkSpec):
                return spec
            if not self._settings.takeover:
                MethodChoice.TAKEOVER_OFF.count(self._metrics)
                return spec
            if isinstance(spec, DataFrameShuffleSpec) and library(spec.meta) is None:
                reason = f"{type(spec.meta)} is not a frame of {' or '.join(LIBRARIES)}"
                self._metrics.fallback(Fallback.SHUFFLE_UNSUPPORTED_FRAMES, reason)
                return spec
            self._metrics.add("shuffle.taken-over")
            if isinstance(spec, DataFrameShuffleSpec):
                return ShuffleSpec.of(spec)
            return RechunkSpec.of(cast(ArrayRechunkSpec, spec))

        return retrieve

    def _create(self, original: Callable[..., ShuffleRunSpec[Any]]) -> Callable[..., ShuffleRunSpec[Any]]:
        def create(shuffle_id: ShuffleId, key: Key, worker: str) -> ShuffleRunSpec[Any]:
            self._refuse_after_retries(shuffle_id)
            run = original(shuffle_id, key, worker)
            if isinstance(run.spec, RunSpec):
                self._metrics.add("shuffle.runs")
                barrier = self._scheduler.tasks[barrier_key(shuffle_id)]
                # Dask ends the run when its barrier fails. A retry of the barrier would find no run, and that
                # error would hide the cause.
                barrier.retries = 0
                self._in_a_row.begins(
                    shuffle_id, [task.key for task in barrier.dependents if is_unfinished(task)]
                )
                self._send_outputs_to_owners(shuffle_id, run.worker_for)
                self.recovery.begins(shuffle_id)
                if self._settings.shuffle.balance:
                    self._balancing.begins(shuffle_id, run)
                begins = {"action": "begins", "shuffle": str(shuffle_id), "run": run.run_id, "worker": worker}
                self._scheduler.log_event(SHUFFLE_TOPIC, begins)
            return run

        return create

    def _calculate_worker_for(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def calculate(spec: DaskShuffleSpec[Any]) -> dict[Any, str]:
            chosen: dict[Any, str] = original(spec)
            if not isinstance(spec, RunSpec):
                return chosen
            require_allowed(self._scheduler, spec.id)
            barrier = self._scheduler.tasks[barrier_key(spec.id)]
            chosen = self._among_possible(spec, chosen)
            wanted = needed_outputs(barrier, chosen)
            if isinstance(spec, RechunkSpec):  # Dask's spec of a rechunk does not list the culled chunks
                wanted = asked_outputs(barrier, wanted)
            if logger.isEnabledFor(logging.DEBUG):
                unneeded = sorted(chosen.keys() - set(wanted))
                logger.debug("Shuffle %s: first owners %s, without tasks %s", spec.id, chosen, unneeded)
            return Owners.begin(chosen, wanted)

        return calculate

    def _transition(self, original: Callable[..., None]) -> Callable[..., None]:
        def transition(key: Key, start: str, finish: str, *args: Any, **options: Any) -> None:
            # Dask ends a shuffle when its barrier is released. Skip that if the barrier is about to rerun.
            if finish != "released" or not self._is_needed_again(key):
                original(key, start, finish, *args, **options)
            if finish == "erred":
                self._end_failed(key)

        return transition

    def _end_failed(self, key: Key) -> None:
        """End the run of a barrier that has failed.

        Dask ends it only if the cause is another task. Workers would keep its shards until the client forgets
        the error.
        """
        shuffle_id = id_from_key(key) if isinstance(key, str) else None
        if shuffle_id is not None and (run := self.runs.get(shuffle_id)) is not None:
            end_run(self._extension, run, f"{run} has failed", f"gpurt-failed-{time()}")

    def _is_needed_again(self, key: Key) -> bool:
        shuffle_id = id_from_key(key) if isinstance(key, str) else None
        if shuffle_id is None or not self.runs.is_active(shuffle_id):
            return False
        barrier = self._scheduler.tasks[key]
        return bool(barrier.who_wants or barrier.waiters)

    def _was_taken_over(self, shuffle_id: ShuffleId) -> bool:
        """Return whether any run of a shuffle has been of the runtime."""
        return any(isinstance(run.run_spec.spec, RunSpec) for run in runs_of(self._extension, shuffle_id))

    def _restart_shuffle(self, original: Callable[..., None]) -> Callable[..., None]:
        def begin_again(id: ShuffleId, scheduler: SchedulerServer, *, stimulus_id: str) -> None:
            # _transition does not end it when its barrier is released
            if (run := self.runs.get(id)) is not None:
                self._metrics.add("shuffle.runs.restarted")
                end_run(self._extension, run, f"{run} begins again", stimulus_id)
            original(id, scheduler, stimulus_id=stimulus_id)

        return begin_again

    def _remove_worker(self, original: Callable[..., None]) -> Callable[..., None]:
        def remove(scheduler: SchedulerServer, worker: str, **options: Any) -> None:
            self.recovery.remove_worker(worker)
            self.results.on_worker_removed(worker)
            original(scheduler, worker, **options)
            for heartbeats in self._extension.heartbeats.values():  # of runs that continue without the worker
                heartbeats.pop(worker, None)

        return remove

    def _valid_workers_downscaling(
        self, original: Callable[..., list[WorkerState]]
    ) -> Callable[..., list[WorkerState]]:
        def valid(scheduler: SchedulerServer, workers: list[WorkerState]) -> list[WorkerState]:
            # Workers may leave once all outputs of a shuffle are in memory: hide these shuffles from Dask.
            active = self._extension.active_shuffles
            done = [shuffle for shuffle in self.runs.all() if self.recovery.is_done(shuffle)]
            kept = {shuffle_id: active.pop(shuffle_id) for shuffle_id in done}
            try:
                return original(scheduler, workers)
            finally:
                active.update(kept)

        return valid

    def _restart_recommendations(
        self, original: Callable[[ShuffleId], dict[Key, str]]
    ) -> Callable[[ShuffleId], dict[Key, str]]:
        def recommend(shuffle_id: ShuffleId) -> dict[Key, str]:
            if self._was_taken_over(shuffle_id):
                # Dask recommends nothing once an output has erred. The other outputs would then wait for a
                # restart that never comes, and be rescheduled forever.
                return self._releases(shuffle_id)
            recommendations: dict[Key, str] = original(shuffle_id)
            return recommendations

        return recommend

    def _releases(self, shuffle_id: ShuffleId) -> dict[Key, str]:
        """Recommend the release of a shuffle's tasks, except erred ones and outputs in memory."""
        barrier = self._scheduler.tasks[barrier_key(shuffle_id)]
        outputs = (task for task in barrier.dependents if task.state != "memory")
        return {
            task.key: "released"
            for task in (*outputs, barrier, *barrier.dependencies)
            if task.state != "erred"
        }

    def _among_possible(self, spec: RunSpec, chosen: dict[int, str]) -> dict[int, str]:
        """Replace owners that cannot assemble outputs or have not switched on yet."""
        possible = possible_owners(self._scheduler, self._workers, [spec])
        if not possible or all(worker in possible for worker in chosen.values()):
            return chosen
        return {p: w if w in possible else spec.pick_worker(p, possible) for p, w in chosen.items()}

    def _refuse_after_retries(self, shuffle_id: ShuffleId) -> None:
        runs, retries = self._in_a_row[shuffle_id], self._settings.shuffle.retries
        if runs > retries:
            raise P2PConsistencyError(
                f"shuffle {shuffle_id} is given up after {runs} runs in a row: each lost a worker or failed "
                f"a consistency check, see the workers' logs. 'gpurt.shuffle.retries' is {retries}"
            )

    def _send_outputs_to_owners(self, shuffle_id: ShuffleId, worker_for: dict[int, str]) -> None:
        """Restrict output tasks to their owners before they start; Dask reschedules them after they do."""
        for task, partition in outputs_of(self._scheduler.tasks[barrier_key(shuffle_id)]):
            name_workers(self._scheduler, task)
            if partition in worker_for and task.state in ("released", "waiting"):
                set_restriction(self._extension, task, worker_for[partition])
