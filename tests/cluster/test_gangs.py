"""Run tasks that wait for each other, one on each worker, as a training of XGBoost does."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from distributed import Worker, wait

from dask_gpurt.memory.ledger import PARTITIONS
from dask_gpurt.memory.tiers import Tier
from tests.helpers.in_process import on_cluster

#: What a worker may hold, and parts of which each worker has four: the half of it.
LIMIT, PART = 4 << 20, 1 << 19
#: Where the tasks of the workers, which are threads of this process, meet.
MEETING = threading.Barrier(2)


def make(number: int) -> np.ndarray:
    return np.full(PART // 8, number, np.int64)


def meet(parts: list[dict[str, np.ndarray]]) -> int:
    """Wait for the others, with all parts of this worker at hand."""
    MEETING.wait(60)
    return sum(int(part["data"][0]) for part in parts)


@on_cluster(workers=2, **{"gpurt.memory.device": LIMIT})
async def test_a_gang_gets_what_it_needs(client: Any, scheduler: Any, *workers: Worker) -> None:
    held, gang = [], []
    for worker in workers:
        parts = client.map(make, range(4), workers=[worker.address], pure=False)
        packed = [
            client.submit(lambda part: {"data": part}, part, workers=[worker.address]) for part in parts
        ]
        # What else there is, and has to give way: what such a task needs is not known, twice its inputs.
        others = client.map(make, range(10, 13), workers=[worker.address], pure=False)
        await wait([*packed, *others])
        ledger = worker.plugins["gpurt"].tiers.ledger
        # Parts that are in a dict too are there once, so that all of it fits.
        assert 7 * PART <= ledger.cell(Tier.DEVICE, PARTITIONS) < LIMIT
        assert ledger.cell(Tier.DISK, PARTITIONS) == 0
        held += [*parts, *packed, *others]
        gang.append(client.submit(meet, packed, workers=[worker.address], pure=False))
    assert await client.gather(gang) == [6, 6]
    for worker in workers:
        counted = worker.plugins["gpurt"].metrics.snapshot()["counters"]
        assert "memory.waits.overdue" not in counted
