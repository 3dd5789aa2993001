"""Reserve memory for results, and keep a task from failing because other data could not be spilled."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dask_gpurt.memory.disk import DiskTier
from dask_gpurt.memory.tiers import Limits, Tier
from dask_gpurt.observe import Metrics
from dask_gpurt.plugins.worker import running
from dask_gpurt.plugins.worker.running import TaskRunner
from tests.helpers.tiered_buffers import KIB, array, new_tiered_buffer


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
