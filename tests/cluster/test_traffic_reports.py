"""Report transfers of workers with their heartbeats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dask_gpurt.exchange.paths import MAX_PEERS, Traffic
from dask_gpurt.protocol import PROGRESS_METRIC
from tests.helpers.in_process import on_cluster, until


@on_cluster(workers=2)
async def test_dependencies_that_dask_fetches_are_reported(
    client: Any, scheduler: Any, a: Any, b: Any
) -> None:
    block = client.submit(np.ones, 30_000_000 // 8, workers=[a.address])
    await client.submit(np.sum, block, workers=[b.address])
    state = scheduler.workers[b.address]
    await until(lambda: bool(state.metrics.get(PROGRESS_METRIC, {}).get("traffic")))
    ((peer, path, nbytes, seconds),) = state.metrics[PROGRESS_METRIC]["traffic"]
    assert (peer, path) == (a.address, "comms")
    assert nbytes >= 30_000_000
    assert seconds > 0


def test_a_worker_that_has_left_is_forgotten() -> None:
    traffic = Traffic()
    for peer, path in (("left", "comms"), ("left", "cuda-ipc"), ("here", "comms")):
        traffic.note(peer, path, 7, 0.5)
    traffic.forget("left")
    assert traffic.largest() == [("here", "comms", 7, 0.5)]


def test_a_copy_that_fails_is_not_counted() -> None:
    def fails(_: Any) -> list[Any]:
        raise MemoryError

    traffic = Traffic()
    with pytest.raises(MemoryError):
        traffic.timed("peer", "cuda-ipc", fails, 1)([])
    assert traffic.timed("peer", "cuda-ipc", list, 7)([1]) == [1]
    (seen,) = traffic.largest()
    assert seen[:3] == ("peer", "cuda-ipc", 7)


def test_the_pairs_with_the_most_bytes_are_reported() -> None:
    traffic = Traffic()
    for number in range(MAX_PEERS + 1):
        traffic.note(f"peer-{number}", "comms", number, 0.1)
    traffic.note("peer-0", "comms", MAX_PEERS, 0.1)
    reported = {peer: nbytes for peer, _, nbytes, _ in traffic.largest()}
    assert len(reported) == MAX_PEERS
    assert reported["peer-0"] == MAX_PEERS
    assert "peer-1" not in reported
