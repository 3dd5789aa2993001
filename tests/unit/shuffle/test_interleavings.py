"""Interrupt a task's thread with an event at each of its calls.

A transfer or an unpack task runs on a thread, the messages of its run on the event loop. Here the thread
stops on entering its n-th function of the package, until an event is over: a new run begins, a peer is
replaced, outputs move, the input is transferred elsewhere, the worker closes, or the run fails. Then the
shuffle is finished: every row has to arrive exactly once, and no shard may be held.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from distributed.exceptions import Reschedule
from distributed.shuffle._core import ShuffleId
from distributed.shuffle._exceptions import P2PConsistencyError

import dask_gpurt
from dask_gpurt.shuffle import run as run_module
from tests.helpers.examples import FACTOR
from tests.helpers.exchange_processes import Process
from tests.helpers.exchange_scheduler import Active, frame_of, spec_of
from tests.helpers.exchanges import Cluster, quiet, without_pauses
from tests.helpers.nightly import nightly

A, B, C = (f"tcp://{name}:1" for name in "abc")
SHUFFLE = "shuffle"
PACKAGE = str(Path(dask_gpurt.__file__).parent)
#: Timeout in seconds after which a stopped thread continues: it may hold a lock that the event waits for.
LOCKED_S = 0.02
#: The stride between positions. `GPURT_TEST_EXAMPLES=61 python -m pytest …` tests all, which takes minutes.
STRIDE = max(1, round(61 / FACTOR))
NEVER = contextlib.nullcontext()
#: Errors of a task that the scheduler sends again.
AGAIN = (Reschedule, P2PConsistencyError)

Event = Callable[["Wide", Process], Coroutine[Any, Any, None]]


class Wide(Cluster):
    """A cluster whose inputs have more bytes than a small pool."""

    ROWS = 800


async def new_run(cluster: Wide, process: Process) -> None:
    cluster.scheduler.restart(SHUFFLE)
    await cluster.hear()


async def peer_replaced(cluster: Wide, process: Process) -> None:
    cluster.replace(cluster.network.processes[B])
    await cluster.hear()


async def outputs_move(cluster: Wide, process: Process) -> None:
    cluster.scheduler.balance(SHUFFLE, range(cluster.OUTPUTS), C)
    await cluster.hear()


async def transferred_elsewhere(cluster: Wide, process: Process) -> None:
    await transfer(cluster, 1, cluster.network.processes[B])


async def worker_closes(cluster: Wide, process: Process) -> None:
    await process.shuffles.shuffle_runs.teardown()
    cluster.replace(process)
    await cluster.hear()


async def owner_fails(cluster: Wide, process: Process) -> None:
    """From here on an owner has no memory for offers: the run of the worker that sends them fails."""

    def fails(*_: Any) -> None:
        raise MemoryError("no memory for a shard")

    cluster.network.processes[B].exchange.take = fails  # type: ignore[method-assign]


EVENTS = [new_run, peer_replaced, outputs_move, transferred_elsewhere, worker_closes, owner_fails]


class Stop:
    """Run an event on the event loop when this thread enters its n-th function of the package."""

    def __init__(self, position: int, event: Callable[[], Coroutine[Any, Any, None]]):
        self._left, self._event = position, event
        self._loop = asyncio.get_running_loop()
        self._begun: Future[None] | None = None

    def __enter__(self) -> None:
        sys.setprofile(self._called)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, kind: str, _: Any) -> None:
        if kind != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if not self._left:
            sys.setprofile(None)
            self._begun = asyncio.run_coroutine_threadsafe(self._event(), self._loop)
            with contextlib.suppress(TimeoutError):
                self._begun.result(LOCKED_S)
        self._left -= 1

    async def is_over(self) -> bool:
        """Wait for the event; returns whether the task reached this position at all."""
        if self._begun is None:
            return False
        await asyncio.wrap_future(self._begun)
        return True


def on_loop(loop: asyncio.AbstractEventLoop) -> Callable[..., Any]:
    """Replace Dask's ``sync``: here tasks run on threads, but also on the event loop itself."""
    kept = run_module.sync

    def sync(of_worker: Any, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run_coroutine_threadsafe(function(*args, **options), loop).result(10)
        return kept(of_worker, function, *args, **options)

    return sync


async def transfer(cluster: Wide, source: int, process: Process, stop: Any = NEVER) -> None:
    """Run a transfer task on a thread, and record its result as the scheduler does."""
    key = f"transfer-{source}"
    try:
        run: Any = await process.shuffles.shuffle_runs.get_or_create(ShuffleId(SHUFFLE), key)
        active = cluster.scheduler.active[SHUFFLE]
        dispatch = cluster.scheduler.next_dispatch()

        def task() -> Any:
            with process.task(key, dispatch), stop:
                return run.add_partition(frame_of(cluster.rows(source), cluster.OUTPUTS), source)

        result = await asyncio.to_thread(task)
    except (*AGAIN, MemoryError):
        return
    # A result counts if its worker is alive, and the input was not transferred elsewhere meanwhile.
    latest = active.transferred.get(source)
    if process.alive and (latest is None or latest.attempt < result.attempt):
        active.transferred[source] = result


async def unpack(cluster: Wide, output: int, stop: Any = NEVER) -> None:
    """Run an unpack task on a thread, and record its result as the scheduler does."""
    active = cluster.scheduler.active[SHUFFLE]
    process = cluster.network.processes[active.owners[output]]
    run: Any = process.run_of(SHUFFLE)

    def task() -> Any:
        with stop:
            return run.get_output_partition(output, f"unpack-{output}")

    try:
        frame = await asyncio.to_thread(task)
    except AGAIN:
        return
    assert list(frame["row"]) == cluster.expected()[output]
    if process.alive:
        active.outputs[output] = process.address, frame
        run.task_done(f"unpack-{output}")


async def pass_barrier(cluster: Wide) -> Active:
    """Act as the scheduler would until the barrier has passed."""
    for _ in range(10):
        await cluster.hear()
        active = cluster.scheduler.active[SHUFFLE]
        workers = list(cluster.network.processes.values())
        for source in set(range(cluster.INPUTS)) - active.transferred.keys():
            await transfer(cluster, source, workers[source % len(workers)])
            await cluster.hear()
        if len(active.transferred) == cluster.INPUTS:
            try:
                await cluster.barrier(SHUFFLE, list(active.transferred.values()))
            except AGAIN:
                continue
            active.sealed = active.done = True
            await cluster.hear()
            return active
    raise AssertionError("the shuffle was not done after ten barriers")


async def finish(cluster: Wide) -> None:
    """Finish the shuffle, and assert that no shard is held."""
    for _ in range(10):
        active = await pass_barrier(cluster)
        for output in set(range(cluster.OUTPUTS)) - active.outputs.keys():
            await unpack(cluster, output)
        if len(active.outputs) == cluster.OUTPUTS:
            break
        active.sealed = active.done = False
    else:
        raise AssertionError("not all outputs were there after ten tries")
    await cluster.end(SHUFFLE)
    for process in cluster.network.processes.values():
        assert process.outbox.pool.used == 0, "a block is held"
        assert not process.landed.kept, "a pulled shard is held"
        assert not process.exchange._receiving, "a run is not over"
    cluster.close()


async def start(pool: int) -> Wide:
    """Start three workers, and a shuffle with one transferred input."""
    run_module.sync = on_loop(asyncio.get_running_loop())
    cluster = Wide(A, B, C, pool=pool)
    cluster.scheduler.begin(spec_of(SHUFFLE, cluster.OUTPUTS))
    await transfer(cluster, 0, cluster.network.processes[B])
    await cluster.hear()
    return cluster


async def stopped_transfer(cluster: Wide, position: int, event: Event) -> bool:
    """Transfer an input with an event in the middle; return whether there are that many positions."""
    process = cluster.network.processes[A]
    stop = Stop(position, lambda: event(cluster, process))
    await transfer(cluster, 1, process, stop)
    return await stop.is_over()


async def interrupt_transfer(position: int, event: Event, pool: int) -> bool:
    """Return whether a transfer task has that many positions."""
    cluster = await start(pool)
    reached = await stopped_transfer(cluster, position, event)
    await finish(cluster)
    return reached


async def interrupt_transfer_of_a_run_that_fails(position: int, event: Event, pool: int) -> bool:
    """Return whether a transfer task has that many positions; the scheduler does not end the run."""
    cluster = await start(pool)
    reached = await stopped_transfer(cluster, position, event)
    await quiet()
    process = cluster.network.processes[A]
    run: Any = process.run_of(SHUFFLE)
    assert run.is_open or process.outbox.pool.used == 0, "a block of a failed run is held"
    vars(cluster.network.processes[B].exchange).pop("take", None)
    cluster.scheduler.restart(SHUFFLE)
    await finish(cluster)
    return reached


async def interrupt_unpack(position: int, event: Event, pool: int) -> bool:
    """Return whether an unpack task has that many positions."""
    cluster = await start(pool)
    active = await pass_barrier(cluster)
    output = next(output for output, owner in active.owners.items() if owner == A)
    process = cluster.network.processes[A]
    stop = Stop(position, lambda: event(cluster, process))
    await unpack(cluster, output, stop)
    reached = await stop.is_over()
    await finish(cluster)
    return reached


def stop_everywhere(interrupt: Callable[[int, Event, int], Awaitable[bool]], event: Event, pool: int) -> int:
    """Stop at one position after the other; returns the first that is never reached."""

    async def reaches(position: int) -> bool:
        return await asyncio.wait_for(interrupt(position, event, pool), 30)

    position = EVENTS.index(event)
    with without_pauses():
        while asyncio.run(reaches(position)):
            position += STRIDE
    return position


@pytest.mark.parametrize("pool", [2**12, nightly(2**17)])
@pytest.mark.parametrize("event", [each for each in EVENTS if each is not owner_fails])
def test_while_an_input_is_transferred(event: Event, pool: int) -> None:
    assert stop_everywhere(interrupt_transfer, event, pool) > 300


@pytest.mark.parametrize("pool", [2**12, nightly(2**17)])
def test_while_an_input_of_a_run_that_fails_is_transferred(pool: int) -> None:
    """Other shuffles wait for the room of its blocks, which no owner would release."""
    assert stop_everywhere(interrupt_transfer_of_a_run_that_fails, owner_fails, pool) > 100


@pytest.mark.parametrize(
    "event", [each for each in EVENTS if each not in (transferred_elsewhere, owner_fails)]
)
def test_while_an_output_is_read(event: Event) -> None:
    assert stop_everywhere(interrupt_unpack, event, 2**17) > 100
