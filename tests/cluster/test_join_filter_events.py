"""The keys that filter a join are collected again where they are lost.

Scheduler, workers and client share a process. A gate stops a step of a run until the event has happened.
"""

from __future__ import annotations

import asyncio
from typing import Any

import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from dask.utils import key_split

from tests.helpers.gated_runs import gate, run, until

ITEMS = pd.DataFrame({"part": [row % 50 for row in range(600)], "item": range(600)})
PARTS = pd.DataFrame({"id": range(50), "kind": [row % 10 for row in range(50)]})
FILTER = {"gpurt.planning.filter": True, "dataframe.shuffle.method": "gpurt"}


def join() -> Any:
    items = dd.from_pandas(ITEMS, npartitions=6, sort=False)
    parts = dd.from_pandas(PARTS, npartitions=4, sort=False)
    return items.merge(parts[parts.kind == 7], left_on="part", right_on="id")


@pytest.mark.parametrize("phase", ["transfer", "barrier", "unpack"])
def test_a_worker_is_closed(monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    stopped = gate(monkeypatch, phase)
    expected = ITEMS[ITEMS.part % 10 == 7].item.tolist()

    async def test(client: Any, scheduler: Any, *crew: Any) -> None:
        with dask.config.set(FILTER):
            result = client.compute(join())
        await until(stopped.reached.is_set)
        (leaves, *_) = [worker for worker in crew if worker.address == stopped.where[0]]
        closing = asyncio.create_task(leaves.close(executor_wait=False))
        await until(lambda: leaves.address not in scheduler.workers)
        stopped.open.set()
        await closing
        assert sorted((await result)["item"]) == expected
        assert any(key_split(key) == "join-keys-gpurthashjoin" for key in scheduler.tasks)
        del result

    run(test, workers=3)
