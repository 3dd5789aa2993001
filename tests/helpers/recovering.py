"""Watch a run from which a worker is lost, in tests of what is done again."""

from __future__ import annotations

from typing import Any

from dask import config

from dask_gpurt.shuffle.owners import Owners
from tests.helpers.gated_runs import Gate, Watched, counted, frames, until

#: Send no transfer to a worker whose only thread is stopped: it would have to be stolen first.
ONE_EACH = {"distributed.scheduler.worker-saturation": 1.0}

IN_PROCESS: dict[str, Any] = {
    "asynchronous": True,
    "dashboard_address": ":0",
    "processes": False,
    "threads_per_worker": 1,
}


async def stopped_in(phase: str, stopped: Gate, scheduler: Any) -> Watched:
    """Watch a run once all tasks have ended that do not wait for the gate."""
    await until(stopped.reached.is_set)
    watched = Watched(scheduler)
    elsewhere = {output for output, owner in watched.owners.items() if owner != stopped.where[0]}
    ends = {"transfer": watched.transfers, "unpack": {watched.outputs[output] for output in elsewhere}}
    tasks = [scheduler.tasks[key] for key in ends.get(phase, ())]
    waiting = 1 if phase == "transfer" else 0
    await until(lambda: sum(task.state != "memory" for task in tasks) == waiting)
    watched.begin()
    return watched


def joined(client: Any) -> Any:
    """Begin a join, whose sides are two shuffles that share outputs."""
    with config.set({"dataframe.shuffle.method": "gpurt"}):
        return client.compute(frames().merge(frames("other"), on="key"))


async def both_sides_in(stopped: Gate, scheduler: Any) -> list[Watched]:
    """Watch both shuffles of a join once a task waits for the gate."""
    await until(stopped.reached.is_set)
    active = scheduler.extensions["shuffle"].active_shuffles
    await until(lambda: len(active) == 2)
    return [Watched(scheduler, shuffle) for shuffle in active]


def others(crew: Any, stopped: Gate) -> list[Any]:
    """Return the workers that no gate has stopped."""
    return [worker for worker in crew if worker.address != stopped.where[0]]


async def kill(scheduler: Any, worker: Any) -> None:
    """Lose a worker as after kill -9: it does not tell its peers that its runs end."""
    worker.plugins["gpurt"].exchange.requests.withdraw = _says_nothing
    await scheduler.remove_worker(worker.address, stimulus_id="a-worker-is-lost")


async def _says_nothing(run: Any) -> None:
    """Do not withdraw the blocks of a run."""


def owners_on(worker: Any, shuffle: Any) -> Owners:
    """Return the owners of a run that a worker knows."""
    owners: Owners = worker.plugins["shuffle"].shuffle_runs._active_runs[shuffle]._owners
    return owners


def missing(*workers: Any) -> float:
    """Count the inputs that barriers have found missing."""
    each = [worker.plugins["gpurt"].metrics.snapshot()["counters"] for worker in workers]
    return float(sum(counters.get("shuffle.inputs.missing", 0) for counters in each))


def assert_repaired_once(scheduler: Any) -> None:
    assert counted(scheduler, "shuffle.runs.recovered") == 1
    assert not counted(scheduler, "shuffle.runs.restarted")


def report(scheduler: Any, watched: Watched, epoch: int | None = None, **what: Any) -> None:
    """Report a loss to the scheduler, as a worker does."""
    epoch = watched.owners.epoch if epoch is None else epoch
    repair = scheduler.extensions["gpurt"].shuffles.recovery.recover
    repair(watched.id, watched.run_id, epoch, "a test", **what)
