"""Send results to the client from copies in host memory, as on a GPU, while their keys change."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from distributed import wait
from distributed.utils_comm import gather_from_workers

from dask_gpurt.memory.ledger import Tier
from dask_gpurt.worker.data import RESULT_BYTES
from tests.helpers.in_process import on_cluster, until


def as_on_gpu(worker: Any, before_copy: Callable[[], None] = lambda: None) -> list[list[str]]:
    """Have a worker consider its objects to be on a GPU; return the keys of each copy."""
    data, copied = worker.data, []
    data._table.host_tiers = frozenset({Tier.HOST})
    original = data.device_messages

    def device_messages(objects: Any) -> Any:
        copied.append(sorted(map(str, objects)))
        before_copy()
        return original(objects)

    data.device_messages = device_messages
    return copied


def make(size: int) -> pd.DataFrame:
    return pd.DataFrame({"x": np.arange(size)})


@on_cluster()
async def test_small_results_are_copied_for_the_client_only(
    client: Any, scheduler: Any, a: Any, b: Any
) -> None:
    copied = as_on_gpu(a)
    small = client.submit(make, 10, key="small", workers=[a.address])
    large = client.submit(make, RESULT_BYTES, key="large", workers=[a.address])
    await wait([small, large])
    found = await client.gather([small, large])
    pd.testing.assert_frame_equal(found[0], make(10))
    assert len(found[1]) == RESULT_BYTES
    assert copied == [["small"]]
    assert await client.submit(len, small, workers=[b.address]) == 10
    assert copied == [["small"]]


@on_cluster()
async def test_a_result_is_released_and_computed_again_while_it_is_copied(
    client: Any, scheduler: Any, a: Any, b: Any
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        begun.set()
        assert go_on.wait(30)

    copied = as_on_gpu(a, pause)
    made = client.submit(make, 10, key="x", workers=[a.address])
    await wait(made)
    # As a client fetches that asks workers directly.
    asked = asyncio.create_task(gather_from_workers({"x": [a.address]}, rpc=b.rpc))
    await until(begun.is_set)
    a.data.discard("x")  # as Dask does if the key is released
    a.data["x"] = make(10)
    go_on.set()
    (found, *_) = await asked
    pd.testing.assert_frame_equal(found["x"], make(10))
    assert copied == [["x"]]


@on_cluster()
async def test_what_cannot_be_copied_is_sent_by_dask(client: Any, scheduler: Any, a: Any, b: Any) -> None:
    copied = as_on_gpu(a)
    made = client.submit(lambda: memoryview(b"bytes"), key="view", workers=[a.address])
    await wait(made)
    assert bytes(await made) == b"bytes"
    assert copied == [["view"]]
