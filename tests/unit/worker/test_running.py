"""Reserve memory for results, and keep a task from failing because other data could not be spilled."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from distributed.core import clean_exception
from distributed.worker_state_machine import ExecuteFailureEvent

from dask_gpurt import config
from dask_gpurt.device.pool import SharedMemoryFull
from dask_gpurt.memory.disk import DiskTier
from dask_gpurt.memory.ledger import Limits, Tier
from dask_gpurt.observe import Metrics
from dask_gpurt.worker import tasks as running
from dask_gpurt.worker.tasks import TaskRunner
from tests.helpers.tiered_buffers import KIB, array, new_tiered_buffer

MEMORY = config.load().memory


class Result(np.ndarray):
    """An array that can be weakly referenced."""


def test_data_cannot_be_spilled_for_a_result_and_its_task_does_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing stores the result afterwards, as if the task had been cancelled: its reservation expires."""

    def refuse(*args: Any) -> None:
        raise RuntimeError("no kernel can be loaded")

    monkeypatch.setattr(DiskTier, "__setitem__", refuse)
    monkeypatch.setattr(running, "PROMISE_S", 0.05)
    tiered_buffer, metrics = new_tiered_buffer(str(tmp_path), Limits(20 * KIB, 0, 0, None)), Metrics()
    tiered_buffer["other"] = array(1, 15)
    tiers: Any = SimpleNamespace(
        tiered_buffer=tiered_buffer, home=lambda value: Tier.DEVICE, offload=asyncio.to_thread, closed=False
    )

    nothing: Any = None

    async def body() -> weakref.ref[Result]:
        runner = TaskRunner(nothing, tiers, nothing, metrics, nothing, lambda key: False)
        result = array(2, 15).view(Result)
        await runner._keep("result", result, 0, 0)
        assert tiered_buffer.ledger.cell(Tier.DEVICE, "reservations") == 15 * KIB
        return weakref.ref(result)

    async def expires() -> None:
        result = await body()
        while tiered_buffer.ledger.cell(Tier.DEVICE, "reservations"):
            await asyncio.sleep(0.01)
        gc.collect()
        assert result() is None

    asyncio.run(asyncio.wait_for(expires(), 20))
    (said,) = metrics.snapshot()["fallbacks"].values()
    assert said["reason"] == "no kernel can be loaded"


def failed(error: BaseException) -> Any:
    return ExecuteFailureEvent.from_exception(error, key="task", run_id=0, stimulus_id="test")


def raised(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def test_only_a_lack_of_memory_counts_as_one() -> None:
    """A task's own error is not replaced by one that says the task ran out of memory."""
    short = MemoryError("no room")
    of_shuffle = raised(RuntimeError("P2P 12 failed during transfer phase"), short)
    assert isinstance(running._out_of_memory(failed(short)), MemoryError)
    assert isinstance(running._out_of_memory(failed(of_shuffle)), MemoryError)
    assert running._out_of_memory(failed(raised(ValueError("bad file"), short))) is None
    assert running._out_of_memory(failed(RuntimeError("bad file"))) is None


def test_a_lack_of_shared_memory_is_not_retried_and_says_what_to_do(tmp_path: Path) -> None:
    tiered_buffer = new_tiered_buffer(str(tmp_path), Limits(20 * KIB, 0, 0, None))
    full = raised(MemoryError("not packed"), SharedMemoryFull("enlarge /dev/shm"))
    runs = []

    async def execute(key: str, *, stimulus_id: str) -> Any:
        runs.append(key)
        return failed(raised(RuntimeError("P2P 12 failed during transfer phase"), full))

    tiers: Any = SimpleNamespace(tiered_buffer=tiered_buffer, peak=lambda: 0)
    task: Any = SimpleNamespace(state="executing", run_id=0, key="task")
    runner = TaskRunner(cast(Any, None), tiers, MEMORY, Metrics(), execute, lambda key: False)
    event = asyncio.run(runner._until_it_fits("task", task, "test"))
    _, error, _ = clean_exception(cast(Any, event).exception.data)
    assert (type(error), str(error), runs) == (SharedMemoryFull, "enlarge /dev/shm", ["task"])
    tiered_buffer.close()
