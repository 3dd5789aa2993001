"""Run shuffles whose scheduler, workers and client share a process, and stop them at a step.

A gate stops the step until the event of a test has happened.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import dask.dataframe as dd
import pandas as pd
import pytest
from dask import config
from dask.typing import Key
from distributed import SchedulerPlugin
from distributed.core import Status
from distributed.shuffle._core import barrier_key, id_from_key

import dask_gpurt
from dask_gpurt.client.session import register_method
from dask_gpurt.shuffle.messages import Transferred
from dask_gpurt.shuffle.offers import Sealing
from dask_gpurt.shuffle.owners import Owners
from dask_gpurt.shuffle.receiver import Receiver
from dask_gpurt.shuffle.run import ShuffleRun
from dask_gpurt.shuffle.sender import Sender
from dask_gpurt.shuffle.spec import outputs_of
from tests.helpers.in_process import Decorator, Test, gen_client_cluster

ROWS, PARTS = 200, 4
#: Send no transfer to a worker whose only thread is stopped: it would have to be stolen first.
ONE_EACH = {"distributed.scheduler.worker-saturation": 1.0}
FRAME = pd.DataFrame({"key": [row % 17 for row in range(ROWS)], "row": range(ROWS)})


def frames(name: str = "row") -> Any:
    """Return the input partitions, each made by its own task."""
    size = ROWS // PARTS
    parts = [FRAME[at * size : (at + 1) * size].rename(columns={"row": name}) for at in range(PARTS)]
    return dd.from_map(lambda at: parts[at], range(PARTS), meta=parts[0][:0])


def shuffled() -> Any:
    with config.set({"dataframe.shuffle.method": "gpurt"}):
        return frames().shuffle("key")


def assert_right(found: pd.DataFrame) -> None:
    assert sorted(found["row"]) == list(range(ROWS))
    assert (found["key"] == found["row"] % 17).all()


async def until(condition: Callable[[], Any]) -> None:
    """Poll for a condition that has no event."""
    while not condition():
        await asyncio.sleep(0.005)


async def nothing_is_left(scheduler: Any, *crew: Any) -> None:
    """Return once neither the scheduler nor a worker holds anything of a shuffle."""
    for worker in crew:
        if worker.status in (Status.closing, Status.closed):
            worker.state.validate = False  # its data are gone
        else:
            await until(lambda worker=worker: not held(worker))
    extension = scheduler.extensions["shuffle"]
    await until(lambda: not extension.active_shuffles)
    await until(lambda: not (extension._shuffles or extension._archived_by_stimulus))


def held(worker: Any) -> list[Any]:
    """Return what is left of shuffles on a worker."""
    exchange = worker.plugins["gpurt"].exchange
    return [
        *worker.plugins["shuffle"].shuffle_runs._runs,
        *exchange._receiving,
        *(incoming for incoming_shards in exchange._incoming.values() for incoming in incoming_shards),
        *([] if not exchange.pools.known("host").pool.used else ["blocks"]),
    ]


def runs(*workers: Any) -> int:
    """Count the runs that these workers took part in."""
    each = [w.plugins["gpurt"].metrics.snapshot()["counters"].get("shuffle.runs", 0) for w in workers]
    return int(sum(each))


def counted(scheduler: Any, name: str) -> float:
    """Return a counter of the scheduler."""
    return float(scheduler.extensions["gpurt"].metrics.snapshot()["counters"].get(name, 0))


_gates: list[Gate] = []


def open_gates() -> None:
    """Open all gates: a thread that is blocked at one would keep the process from ending."""
    while _gates:
        _gates.pop().open.set()


class Gate:
    """Block a step, the first time that it is taken, until the test opens the gate."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.where: list[str] = []
        _gates.append(self)

    def stops(self, address: str) -> bool:
        first = not self.where
        self.where.append(address)
        self.reached.set()
        return first and not self.open.is_set()


def address_of(step: Any) -> str:
    """Return the address of the worker of a run or of one of its parts."""
    worker = step._worker if isinstance(step, ShuffleRun) else step.exchange.worker
    return str(worker.address)


#: The step of each phase of a run that a test can stop.
STEPS = {
    "transfer": (Sender, "add"),
    "offers": (ShuffleRun, "receive"),
    "inputs-done": (ShuffleRun, "_flush"),
    "barrier": (ShuffleRun, "barrier"),
    "unpack": (Receiver, "assemble"),
}
#: Further steps: in the middle of the barrier, when it has read its inputs and the epoch.
FINER_STEPS = {"seal": (Sealing, "seal_all")}


def gate(monkeypatch: pytest.MonkeyPatch, phase: str) -> Gate:
    """Stop a run in a phase."""
    owner, name = (STEPS | FINER_STEPS)[phase]
    original, gate = getattr(owner, name), Gate()

    async def stops_coroutine(self: Any, *args: Any, **kwargs: Any) -> Any:
        if gate.stops(address_of(self)):
            await until(gate.open.is_set)
        return await original(self, *args, **kwargs)

    def stops_thread(self: Any, *args: Any, **kwargs: Any) -> Any:
        if gate.stops(address_of(self)):
            gate.open.wait(60)
        return original(self, *args, **kwargs)

    # A worker that closes waits for its tasks so long, and tests open the gate once it has left.
    monkeypatch.setattr("dask_gpurt.worker.plugin.CLOSE_TIMEOUT_S", 0.1)
    stops = stops_coroutine if asyncio.iscoroutinefunction(original) else stops_thread
    monkeypatch.setattr(owner, name, stops)
    return gate


def outputs(scheduler: Any) -> list[Any]:
    """Return the tasks behind barriers."""
    barriers = [task for key, task in scheduler.tasks.items() if id_from_key(key)]
    return [output for barrier in barriers for output in barrier.dependents]


class Watched(SchedulerPlugin):
    """Watch the tasks and owners of a run, from a moment in its middle until after its end.

    ``producers``: the transfer tasks that had ended when the watch began, each with its worker.
    ``transfers``, ``outputs``: the keys of the transfer tasks, and of the task of each output.
    ``owners``: the live owners of the run.
    ``before``: the share and the owner of each output when the watch began.
    ``sent``: how often each task has been sent to a worker since then.
    ``made``: the worker of each task that has ended since then.
    """

    def __init__(self, scheduler: Any, shuffle: Any = None):
        active = scheduler.extensions["shuffle"].active_shuffles
        (run,) = active.values() if shuffle is None else [active[shuffle]]
        self._barrier = scheduler.tasks[barrier_key(run.id)]
        self.id, self.run_id, self.barrier = run.id, run.run_id, self._barrier.key
        self.transfers = {task.key for task in self._barrier.dependencies}
        self.outputs = {output: task.key for task, output in outputs_of(self._barrier) if output is not None}
        self.owners: Owners = run.run_spec.worker_for
        self.sent = Counter[Key]()
        self.made: dict[Key, str] = {}
        self.begin()
        scheduler.add_plugin(self, name=f"watched-{run.id}")

    def begin(self) -> None:
        """Begin the watch anew."""
        results = [Transferred.of_task(task, self.run_id) for task in self._barrier.dependencies]
        self.producers = {result.key: result.producer for result in results if result is not None}
        self.before = self.shares()
        self.sent.clear()
        self.made.clear()

    def transition(self, key: Key, start: str, finish: str, *_: Any, **kwargs: Any) -> None:
        if finish == "processing":
            self.sent[key] += 1
        elif finish == "memory" and start == "processing":
            self.made[key] = kwargs["worker"]

    def shares(self) -> dict[int, tuple[int, str]]:
        """Return the share and the owner of each output."""
        return {output: (s.id, s.owner) for s in self.owners.shares.values() for output in s.outputs}

    def moved(self) -> set[int]:
        """Return the outputs that are in another share than when the watch began."""
        now = self.shares()
        return {output for output, share in self.before.items() if now.get(output) != share}

    def owned(self, worker: str) -> set[int]:
        """Return the outputs that a worker owned when the watch began."""
        return {output for output, (_, owner) in self.before.items() if owner == worker}

    def transferred_by(self, worker: str) -> set[Key]:
        """Return the transfer tasks that a worker had run when the watch began."""
        return {key for key, producer in self.producers.items() if producer == worker}

    def transferred_since(self) -> set[Key]:
        """Return the transfer tasks that have been sent to a worker since the watch began."""
        return {key for key in self.transfers if self.sent[key]}

    def assembled_since(self) -> set[int]:
        """Return the outputs whose tasks have been sent to a worker since the watch began."""
        return {output for output, key in self.outputs.items() if self.sent[key]}


class Gated:
    """Hold a cluster of one process, and the run on it that a test stops at a step.

    ``stopped``, ``watched``: the gate that :meth:`stop` puts, and the watch over the run that reaches it.
    """

    stopped: Gate
    watched: Watched

    def __init__(self, client: Any, scheduler: Any, crew: Sequence[Any], monkeypatch: pytest.MonkeyPatch):
        self.client, self.scheduler, self.crew, self.monkeypatch = client, scheduler, crew, monkeypatch
        self._result: Any = None

    def gate(self, phase: str) -> Gate:
        """Stop runs in a phase."""
        self.stopped = gate(self.monkeypatch, phase)
        return self.stopped

    async def begin(self, phase: str, compute: Any = None, collection: Any = None, **options: Any) -> None:
        """Compute a shuffle, by default one for its rows, and return once a worker is stopped in a phase."""
        self.gate(phase)
        compute = compute or self.client.compute
        self._result = compute(shuffled() if collection is None else collection, **options)
        await until(self.stopped.reached.is_set)

    async def stop(self, phase: str, compute: Any = None) -> None:
        """Compute a shuffle, and watch it once all tasks have ended that do not wait for the gate."""
        await self.begin(phase, compute)
        watched = self.watched = Watched(self.scheduler)
        elsewhere = {at for at, owner in watched.owners.items() if owner != self.stopped.where[0]}
        ends = {"transfer": watched.transfers, "unpack": {watched.outputs[at] for at in elsewhere}}
        tasks = [self.scheduler.tasks[key] for key in ends.get(phase, ())]
        waiting = 1 if phase == "transfer" else 0
        await until(lambda: sum(task.state != "memory" for task in tasks) == waiting)
        watched.begin()

    async def stop_join(self, phase: str) -> tuple[Watched, Watched]:
        """Begin a join, whose sides share outputs, and watch both once a task waits for the gate."""
        with config.set({"dataframe.shuffle.method": "gpurt"}):
            await self.begin(phase, collection=frames().merge(frames("other"), on="key"))
        active = self.scheduler.extensions["shuffle"].active_shuffles
        await until(lambda: len(active) == 2)
        left, right = (Watched(self.scheduler, shuffle) for shuffle in active)
        return left, right

    async def result_at_gate(self) -> None:
        """Assert that the shuffle gives all rows while a worker is still stopped."""
        assert_right(await self._result)

    def released(self) -> Any:
        """Open the gate, and return the future or the persisted collection, which is no longer held here."""
        self.stopped.open.set()
        result, self._result = self._result, None
        return result

    async def ends_right(self) -> None:
        """Open the gate, and assert that the shuffle gives all rows."""
        assert_right(await self.released())

    async def join_ends_right(self) -> None:
        """Open the gate, and assert that the join gives all rows."""
        assert len(await self.released()) == len(FRAME.merge(FRAME, on="key"))

    @property
    def at_gate(self) -> Any:
        """Return the worker that is stopped."""
        (worker,) = (worker for worker in self.crew if worker.address == self.stopped.where[0])
        return worker

    @property
    def others(self) -> list[Any]:
        """Return the workers that are not stopped."""
        return [worker for worker in self.crew if worker.address != self.stopped.where[0]]

    def counted(self, name: str) -> float:
        """Return a counter of the scheduler."""
        return counted(self.scheduler, name)

    def assert_repaired_once(self) -> None:
        assert self.counted("shuffle.runs.recovered") == 1
        assert not self.counted("shuffle.runs.restarted")

    async def remove(self, worker: Any) -> None:
        """Have the scheduler lose a worker."""
        await self.scheduler.remove_worker(worker.address, stimulus_id="a-worker-is-lost")

    async def kill(self, worker: Any) -> None:
        """Lose a worker as after kill -9: it does not tell its peers that its runs end."""
        worker.plugins["gpurt"].exchange.requests.withdraw = _says_nothing
        await self.remove(worker)

    async def close(self, worker: Any) -> None:
        """Close a worker, and return once the scheduler knows."""
        await worker.close(executor_wait=False)
        await until(lambda: worker.address not in self.scheduler.workers)

    def report(self, epoch: int | None = None, **what: Any) -> None:
        """Report a loss to the scheduler, as a worker does."""
        epoch = self.watched.owners.epoch if epoch is None else epoch
        repair = self.scheduler.extensions["gpurt"].shuffles.recovery.recover
        repair(self.watched.id, self.watched.run_id, epoch, "a test", **what)


def owners_on(worker: Any, shuffle: Any) -> Owners:
    """Return the owners of a run that a worker knows."""
    owners: Owners = worker.plugins["shuffle"].shuffle_runs._active_runs[shuffle]._owners
    return owners


def missing(*workers: Any) -> float:
    """Count the inputs that barriers have found missing."""
    each = [worker.plugins["gpurt"].metrics.snapshot()["counters"] for worker in workers]
    return float(sum(counters.get("shuffle.inputs.missing", 0) for counters in each))


async def _says_nothing(run: Any) -> None:
    """Do not withdraw the blocks of a run."""


def on_gated_cluster(workers: int = 2, **settings: Any) -> Decorator:
    """Run a test on a :class:`Gated` cluster; asserts that no shuffle data are left."""

    def decorate(test: Test) -> Callable[..., None]:
        async def body(client: Any, scheduler: Any, *crew: Any, **fixtures: Any) -> None:
            register_method()
            await dask_gpurt.enable(client)
            with pytest.MonkeyPatch.context() as monkeypatch:
                try:
                    await test(Gated(client, scheduler, crew, monkeypatch), **fixtures)
                finally:
                    open_gates()
                await nothing_is_left(scheduler, *crew)
                await dask_gpurt.disable(client)

        servers = [*inspect.signature(body).parameters.values()][:3]
        fixtures = [each.replace(kind=each.KEYWORD_ONLY) for each in parameters(test)[1:]]
        body.__name__, body.__doc__, body.__module__ = test.__name__, test.__doc__, test.__module__
        body.__signature__ = inspect.Signature([*servers, *fixtures])  # type: ignore[attr-defined]
        return gen_client_cluster(nthreads=[("127.0.0.1", 1)] * workers, config=settings)(body)

    return decorate


def parameters(test: Test) -> list[inspect.Parameter]:
    return [*inspect.signature(test).parameters.values()]
