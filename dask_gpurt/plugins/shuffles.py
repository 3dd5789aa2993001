"""Dask's p2p extension on the scheduler, which creates runs, chooses owners and restarts.

Four of its methods are replaced on that one instance; each replacement ends in the original.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from dask.typing import Key
from distributed.metrics import time

from dask_gpurt.config import Settings
from dask_gpurt.dask_hooks import PatchSet
from dask_gpurt.dask_hooks.shuffle import (
    DataFrameShuffleSpec,
    P2PConsistencyError,
    barrier_key,
    id_from_key,
    replace_on_extension,
    restart_without,
    runs_of,
    set_restriction,
)
from dask_gpurt.frames import library
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.plugins.placement import SchedulerPlacement
from dask_gpurt.shuffle.retries import RunsInARow
from dask_gpurt.shuffle.spec import ShuffleSpec, output_partition


class SchedulerShuffles:
    """Has shuffles run through the runtime, those included that clients without it ask for.

    Parameters
    ----------
    scheduler
        Dask's.
    placement
        What chooses owners now, if anything.
    ready
        The workers that have the runtime.
    """

    def __init__(
        self,
        scheduler: Any,
        settings: Settings,
        metrics: Metrics,
        placement: Callable[[], SchedulerPlacement | None],
        ready: Collection[str],
    ):
        self._scheduler = scheduler
        self._extension = scheduler.extensions["shuffle"]
        self._settings = settings
        self._metrics = metrics
        self._placement = placement
        self._ready = ready
        self._patches = PatchSet()
        self._runs = RunsInARow()

    def install(self) -> None:
        """Take part from now on; runs that have begun go on as they are."""
        replace_on_extension(
            self._patches,
            self._extension,
            retrieve_spec=self._retrieve_spec,
            create=self._create,
            calculate_worker_for=self._calculate_worker_for,
            restart_recommendations=self._restart_recommendations,
        )

    def uninstall(self) -> None:
        """Leave everything to Dask; runs that were taken over begin again as its own."""
        self._patches.restore()
        extension, stimulus_id = self._extension, f"gpurt-off-{time()}"
        for shuffle_id, run in list(extension.active_shuffles.items()):
            if isinstance(run.run_spec.spec, ShuffleSpec) and self._is_dasks(shuffle_id):
                message = f"the runtime was switched off during {run}"
                restart_without(extension, self._scheduler, run, message, stimulus_id)

    def _is_dasks(self, shuffle_id: Any) -> bool:
        spec = self._scheduler.tasks[barrier_key(shuffle_id)].run_spec.spec
        return type(spec) is DataFrameShuffleSpec

    def transition(self, key: Key, finish: str) -> None:
        """Note what has become of a task."""
        if finish in ("memory", "forgotten"):
            self._runs.done(key)
        if finish == "forgotten" and isinstance(key, str) and (shuffle_id := id_from_key(key)):
            self._runs.forget(shuffle_id)

    # ---- in the place of the extension's own ---------------------------------------------

    def _retrieve_spec(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def retrieve(shuffle_id: Any) -> Any:
            spec = original(shuffle_id)
            if type(spec) is not DataFrameShuffleSpec or not self._settings.takeover:
                return spec
            if library(spec.meta) is None:
                reason = f"{type(spec.meta)} is no frame of pandas or cudf"
                self._metrics.fallback(Fallback.SHUFFLE_UNSUPPORTED_FRAMES, reason)
                return spec
            self._metrics.add("shuffle.taken-over")
            return ShuffleSpec.of(spec)

        return retrieve

    def _create(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def create(shuffle_id: Any, key: Any, worker: str) -> Any:
            self._refuse_after_retries(shuffle_id)
            run = original(shuffle_id, key, worker)
            if isinstance(run.spec, ShuffleSpec):
                barrier = self._scheduler.tasks[barrier_key(shuffle_id)]
                # Dask ends the run of a barrier that failed. Tried again, it would find no run, and say that
                # in place of what went wrong.
                barrier.retries = 0
                self._runs.begins(
                    shuffle_id, [task.key for task in barrier.dependents if task.state != "memory"]
                )
                self._send_outputs_to_owners(shuffle_id, run.worker_for)
            return run

        return create

    def _calculate_worker_for(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def calculate(spec: Any) -> dict[Any, str]:
            chosen: dict[Any, str] = original(spec)
            if not isinstance(spec, ShuffleSpec):
                return chosen
            barrier = self._scheduler.tasks[barrier_key(spec.id)]
            placement = self._placement()
            if placement is not None and not _has_partner(barrier, self._extension.active_shuffles):
                chosen = placement.owners(barrier, chosen)
            return self._among_ready(spec, chosen, barrier.worker_restrictions)

        return calculate

    def _restart_recommendations(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def recommend(shuffle_id: Any) -> dict[Key, str]:
            recommendations: dict[Key, str] = original(shuffle_id)
            runs = runs_of(self._extension, shuffle_id)
            if any(isinstance(run.run_spec.spec, ShuffleSpec) for run in runs):
                # Dask recommends nothing where an output has failed. Other outputs, asked of a run that has
                # to begin again, would be rescheduled for ever.
                for each in (shuffle_id, *self._partners_to_restart(shuffle_id)):
                    recommendations |= self._releases(each)
            return recommendations

        return recommend

    def _releases(self, shuffle_id: Any) -> dict[Key, str]:
        """What has a shuffle begin again: its tasks are released, but for those that have failed."""
        barrier = self._scheduler.tasks[barrier_key(shuffle_id)]
        tasks = (*barrier.dependents, barrier, *barrier.dependencies)
        return {task.key: "released" for task in tasks if task.state != "erred"}

    def _partners_to_restart(self, shuffle_id: Any) -> list[Any]:
        """The shuffles past their barriers that share outputs with one that begins again.

        They have let go of the shards of outputs that were in memory, and are made again now. Were that left
        to their runs to find out, the two sides of a join would have each other begin again, in turns.
        """
        tasks = self._scheduler.tasks
        others = _sharing_outputs(tasks[barrier_key(shuffle_id)]) & self._extension.active_shuffles.keys()
        return [other for other in others if tasks[barrier_key(other)].state == "memory"]

    def _among_ready(
        self, spec: ShuffleSpec, chosen: dict[Any, str], allowed: Collection[str] | None
    ) -> dict[Any, str]:
        """Choose other owners than workers that have registered, and not switched the runtime on yet."""
        ready = [w for w in self._scheduler.workers if w in self._ready and (not allowed or w in allowed)]
        if not ready or all(worker in self._ready for worker in chosen.values()):
            return chosen
        return {p: w if w in self._ready else spec.pick_worker(p, ready) for p, w in chosen.items()}

    def _refuse_after_retries(self, shuffle_id: Any) -> None:
        runs, retries = self._runs[shuffle_id], self._settings.shuffle.retries
        if runs > retries:
            raise P2PConsistencyError(
                f"shuffle {shuffle_id} is given up after {runs} runs in a row: all lost a worker or "
                f"disagreed, the workers' logs say which. 'gpurt.shuffle.retries' is {retries}"
            )

    def _send_outputs_to_owners(self, shuffle_id: Any, worker_for: dict[int, str]) -> None:
        """Restrict output tasks before they start; Dask lets them start anywhere and moves them then."""
        for task in self._scheduler.tasks[barrier_key(shuffle_id)].dependents:
            partition = output_partition(task.run_spec)
            if partition in worker_for and task.state in ("released", "waiting"):
                set_restriction(self._extension, task, worker_for[partition])


def _has_partner(barrier: Any, active: Collection[Any]) -> bool:
    """Whether a shuffle with a barrier shares outputs with an active one, whose owners Dask has taken."""
    return any(other in active for other in _sharing_outputs(barrier))


def _sharing_outputs(barrier: Any) -> set[Any]:
    """The shuffles that share outputs with that of a barrier, as the other side of a join does."""
    others = {other.key for output in barrier.dependents for other in output.dependencies} - {barrier.key}
    return {shuffle_id for key in others if (shuffle_id := id_from_key(key))}
