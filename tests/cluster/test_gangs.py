"""Run tasks that wait for each other, one per worker, as XGBoost's training does."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from distributed import Worker, wait

from dask_gpurt.memory.ledger import PARTITIONS, Tier
from tests.helpers.in_process import on_cluster

#: Memory limit of a worker, and size of a part; each worker has four parts, half of the limit.
LIMIT, PART = 4 << 20, 1 << 19
#: Rendezvous of the workers' tasks; the workers are threads of this process.
MEETING = threading.Barrier(2)


def make(number: int) -> np.ndarray:
    return np.full(PART // 8, number, np.int64)


def meet(parts: list[dict[str, np.ndarray]]) -> int:
    """Wait for the other tasks, with all parts of this worker as inputs."""
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
        # Other data have to be evicted: without statistics such a task is estimated at twice its inputs.
        others = client.map(make, range(10, 13), workers=[worker.address], pure=False)
        await wait([*packed, *others])
        ledger = worker.plugins["gpurt"].tiers.ledger
        # Parts that a dict refers to count once, so all of them fit.
        assert 7 * PART <= ledger.cell(Tier.DEVICE, PARTITIONS) < LIMIT
        assert ledger.cell(Tier.DISK, PARTITIONS) == 0
        held += [*parts, *packed, *others]
        gang.append(client.submit(meet, packed, workers=[worker.address], pure=False))
    assert await client.gather(gang) == [6, 6]
    for worker in workers:
        counted = worker.plugins["gpurt"].metrics.snapshot()["counters"]
        assert "memory.waits.overdue" not in counted
