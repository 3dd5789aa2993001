"""Define the tasks of shuffles and joins under Dask's scheduler, and notice what of them is done in vain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from dask._task_spec import Task, TaskRef
from dask.context import thread_state
from distributed import SchedulerPlugin
from distributed.exceptions import Reschedule
from distributed.shuffle._core import (
    P2PBarrierTask,
    ShuffleId,
    barrier_key,
    handle_transfer_errors,
    handle_unpack_errors,
    p2p_barrier,
)
from distributed.shuffle._exceptions import P2PConsistencyError
from distributed.shuffle._merge import merge_unpack
from distributed.shuffle._shuffle import shuffle_unpack

from dask_gpurt.protocol import RECOVER_HANDLER
from tests.helpers.allocations import failing_allocations, none_fails
from tests.helpers.exchange_scheduler import frame_of, spec_of
from tests.helpers.scheduled import DaskScheduler, ScheduledWorker


class Computation:
    """Define the tasks of one or two shuffles, and run them on workers.

    ``shuffles``: the names of the shuffles.
    ``joined``: whether each output task reads both shuffles, as in a join.
    ``reduced``: whether the client wants a result computed from each output, in place of the output.
    """

    INPUTS, OUTPUTS, ROWS = 3, 4, 400

    def __init__(self, shuffles: Sequence[str], *, joined: bool, reduced: bool):
        self.shuffles, self._joined = shuffles, joined
        #: The allocations of the next transfer that fail.
        self.fails = none_fails
        self.graph: dict[Any, Any] = {}
        self._bodies: dict[Any, Callable[..., Any]] = {}
        self.transfers: dict[Any, tuple[str, int]] = {}
        self.outputs: dict[Any, int] = {}
        for shuffle in shuffles:
            self._add_shuffle(shuffle)
        for together in [tuple(shuffles)] if joined else [(shuffle,) for shuffle in shuffles]:
            self._add_outputs(together)
        if reduced:
            for key in self.outputs:
                self._add(f"result-{key}", Task(f"result-{key}", len, TaskRef(key)), _reduce)
        self.wanted = [key for key in self.graph if not reduced or key.startswith("result")]
        self.wanted = [key for key in self.wanted if key in self.outputs or reduced]

    def _add(self, key: Any, task: Task, body: Callable[..., Any]) -> None:
        self.graph[key], self._bodies[key] = task, body

    def _add_shuffle(self, shuffle: str) -> None:
        for source in range(self.INPUTS):
            key = f"transfer-{shuffle}-{source}"
            self.transfers[key] = shuffle, source
            self._add(key, Task(key, frame_of, source), partial(self._transfer, shuffle, source))
        barrier = barrier_key(ShuffleId(shuffle))
        refs = [TaskRef(key) for key, (of, _) in self.transfers.items() if of == shuffle]
        spec = spec_of(shuffle, self.OUTPUTS)
        task = P2PBarrierTask(barrier, p2p_barrier, shuffle, *refs, spec=spec)
        self._add(barrier, task, partial(_barrier, shuffle))

    def _add_outputs(self, shuffles: Sequence[str]) -> None:
        barriers = [TaskRef(barrier_key(ShuffleId(shuffle))) for shuffle in shuffles]
        for output in range(self.OUTPUTS):
            key = f"output-{'-'.join(shuffles)}-{output}"
            function = shuffle_unpack if len(shuffles) == 1 else merge_unpack
            self.outputs[key] = output
            task = Task(key, function, *shuffles, output, *barriers)
            self._add(key, task, partial(self._unpack, shuffles, output))

    async def run(self, worker: ScheduledWorker, key: Any, values: Mapping[Any, Any]) -> Any:
        """Run a task on a worker."""
        return await self._bodies[key](worker, key, values)

    def rows(self, source: int) -> range:
        """Return the rows of an input."""
        return range(source * self.ROWS, (source + 1) * self.ROWS)

    def check_result(self, key: Any, value: Any) -> None:
        """Assert that what the client wanted is right."""
        if key in self.outputs:
            self.check(key, value)
        else:
            sides = len(self.shuffles) if self._joined else 1
            assert value == sides * self.INPUTS * self.ROWS // self.OUTPUTS

    def check(self, key: Any, value: Sequence[Sequence[int]]) -> None:
        """Assert that an output has the rows that belong to it, each once and in order."""
        rows = [row for source in range(self.INPUTS) for row in self.rows(source)]
        expected = [row for row in rows if row % self.OUTPUTS == self.outputs[key]]
        for side in value:
            assert list(side["row"]) == expected, f"{key} has other rows"

    async def _transfer(
        self, shuffle: str, source: int, worker: ScheduledWorker, key: Any, values: Mapping[Any, Any]
    ) -> Any:
        fails, self.fails = self.fails, none_fails

        def add() -> Any:
            thread_state.key = key
            frame = frame_of(self.rows(source), self.OUTPUTS)
            try:
                with failing_allocations(fails):
                    return run.add_partition(frame, source)
            except MemoryError as error:
                if fails is none_fails:
                    raise
                raise Reschedule from error  # the runtime has the task run again, once there is room

        with handle_transfer_errors(ShuffleId(shuffle)):
            run: Any = await worker.shuffles.shuffle_runs.get_or_create(ShuffleId(shuffle), key)
            return await worker.wire.turns.on_thread(f"the thread of {key}", worker, add)

    async def _unpack(
        self,
        shuffles: Sequence[str],
        output: int,
        worker: ScheduledWorker,
        key: Any,
        values: Mapping[Any, Any],
    ) -> Any:
        sides = []
        for shuffle in shuffles:
            id_ = ShuffleId(shuffle)
            with handle_unpack_errors(id_):
                number = values[barrier_key(id_)]
                run: Any = await worker.shuffles.shuffle_runs.get_with_run_id(id_, number)
                assemble = partial(run.get_output_partition, output, key)
                sides.append(await worker.wire.turns.on_thread(f"the thread of {key}", worker, assemble))
        self.check(key, sides)
        return sides


async def _barrier(shuffle: str, worker: ScheduledWorker, key: Any, values: Mapping[Any, Any]) -> Any:
    """Run the barrier, and sort its errors as ``p2p_barrier`` does."""
    results = list(values.values())
    try:
        run: Any = await worker.shuffles.shuffle_runs.get_most_recent(ShuffleId(shuffle), results)
        return await run.barrier(results)
    except (Reschedule, P2PConsistencyError):
        raise
    except Exception as error:
        raise RuntimeError(f"P2P {shuffle} failed during barrier phase") from error


async def _reduce(worker: ScheduledWorker, key: Any, values: Mapping[Any, Any]) -> int:
    return sum(len(side) for sides in values.values() for side in sides)


# ---- what is done in vain ------------------------------------------------------------


class Witness(SchedulerPlugin):
    """Record what is done again although it was not lost.

    ``in_vain``: results that were dropped although they were needed, no worker with them had left, and no
    barrier had reported them as missing.
    """

    def __init__(self, scheduler: DaskScheduler, computation: Computation):
        self._scheduler, self._computation = scheduler, computation
        self.in_vain: list[str] = []
        #: What was lost with the worker that has left last, and the transfers that a barrier has missed last.
        self._lost: set[Any] = set()
        self._missed: set[Any] = set()
        scheduler.add_plugin(self, name="witness")
        scheduler.leaving.append(self.leaves)
        scheduler.handlers[RECOVER_HANDLER] = self._recover

    def _recover(self, inputs: Sequence[Any] = (), **message: Any) -> None:
        self.misses(inputs)
        self._scheduler.recovery.recover(inputs=inputs, **message)

    def leaves(self, worker: Any) -> None:
        """Note what is lost with a worker."""
        producer = self._scheduler.recovery._results.producer
        self._lost = {task.key for task in worker.has_what if len(task.who_has) == 1}
        self._lost |= {key for key in self._computation.transfers if producer(key) == worker.address}

    def misses(self, inputs: Iterable[Any]) -> None:
        """Note the transfers that a barrier reports as missing."""
        self._missed = set(inputs)

    def transition(self, key: Any, start: str, finish: str, *_: Any, **__: Any) -> None:
        task = self._scheduler.tasks[key]
        if start != "memory" or not (task.who_wants or task.waiters):
            return
        if key in self._computation.transfers:
            shuffle, _ = self._computation.transfers[key]
            if shuffle in self._scheduler.active() and key not in self._lost | self._missed:
                self.in_vain.append(f"{key} is transferred again")
        elif key in self._computation.outputs and key not in self._lost:
            self.in_vain.append(f"{key} is assembled again")
