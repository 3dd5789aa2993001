"""Replace choices of Dask's scheduler on single instances, and access its private state."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, cast

from dask_gpurt.dask_hooks.comparison import SeamGroup, UnsupportedError
from dask_gpurt.dask_hooks.patch import FailureHandler, Method, PatchSet, Wrap, guarded
from dask_gpurt.dask_hooks.seams import RETIREMENT
from dask_gpurt.dask_hooks.types import SchedulerServer, SchedulerState, SchedulerTask, WorkerState


class Overrides:
    """Replace choices of the scheduler.

    Dask makes the choice if a replacement raises, or if the method differs in this version of Dask.

    ``failed``: called with the name of such a method and the reason.
    ``originals``: Dask's own methods by name, for replacements that delegate to them.
    """

    def __init__(self, failed: FailureHandler):
        self._failed = failed
        self._patches = PatchSet()
        self.originals: dict[str, Method] = {}

    def replace(self, part: SeamGroup, owner: Any, ours: Callable[[str], Method]) -> None:
        """Replace the choices that a part has of a scheduler, or of its extension.

        ``ours``: returns the replacement of a method by its name.
        """
        for seam in part.seams:
            name = seam.attribute
            original = getattr(owner, name, None)
            try:
                wrap = partial(guarded, name, ours(name), failed=self._failed)
                self._patches.replace(seam, wrap, on=owner)
            except UnsupportedError as error:
                self._failed(name, str(error))
            else:
                assert original is not None  # or the seam would have differed
                self.originals[name] = original

    def restore(self) -> None:
        """Restore Dask's own choices."""
        self._patches.restore()


def wrap_retirement(patches: PatchSet, scheduler: SchedulerServer, wrap: Wrap) -> None:
    """Wrap the coroutine that tracks a worker's retirement.

    ``(ws, policy, *, prev_status, close, remove, stimulus_id)`` is called once the worker does not get tasks
    any more. It waits until the worker's data have been replicated, and then removes the worker.

    Raises UnsupportedError if it differs from the known one.
    """
    patches.replace(RETIREMENT["_track_retire_worker"], wrap, on=scheduler)


def replicate_since(policy: Any) -> None:
    """Have results replicated that a worker has made since the policy of its retirement was done.

    Dask would lose them. This ends the retirement if no other worker can take them.
    """
    manager = policy.manager
    if policy not in manager.policies and not policy.no_recipients:
        manager.add_policy(policy)
        manager.run_once()


def allowed_workers(state: SchedulerState, task: SchedulerTask) -> AbstractSet[WorkerState] | None:
    """Return the running workers that Dask may give a task to; None for all, an empty set for none.

    A task may be restricted to workers, hosts and resources. Loose restrictions (``allow_other_workers``)
    that no running worker meets are none, as in Dask's ``decide_worker``.
    """
    valid: AbstractSet[WorkerState] | None = state.valid_workers(task)
    return None if task.loose_restrictions and not valid else valid


def unpaused_later(state: SchedulerState, task: SchedulerTask) -> AbstractSet[WorkerState]:
    """Return the workers that Dask would give a restricted task to if all of them were running."""
    valid: Any = type(state).valid_workers(cast(Any, _AsIfRunning(state)), task)
    return cast(AbstractSet[WorkerState], valid)


class _AsIfRunning:
    """Show a scheduler to one of its methods as if no worker were paused."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    @property
    def running(self) -> AbstractSet[WorkerState]:
        return set(self._state.workers.values())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)
