"""Outputs of shuffles move to other owners once it is known how large they are, and each row stays once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import futures_of, wait

from tests.helpers.in_process import on_cluster

PARTS, ROWS, KEYS, HOT = 32, 20_000, 4096, 7
#: The share of the rows that have the hot key.
SHARE = 0.3


def frame(column: str, share: float, seed: int = 0) -> Any:
    """Return a collection of which one key has a share of the rows."""

    def part(at: int) -> pd.DataFrame:
        chance = np.random.default_rng([seed, at])
        keys = chance.integers(0, KEYS, ROWS)
        keys[chance.random(ROWS) < share] = HOT
        return pd.DataFrame({"key": keys, column: np.arange(at * ROWS, (at + 1) * ROWS)})

    return dd.from_map(part, range(PARTS), meta=part(0)[:0])


def counted(scheduler: Any, name: str) -> float:
    return float(scheduler.extensions["gpurt"].metrics.snapshot()["counters"].get(name, 0))


async def rows_by_worker(client: Any, scheduler: Any, out: Any) -> Counter[str]:
    """Return the rows of the outputs on each worker."""
    found = Counter[str]()
    for future in futures_of(out):
        (holder,) = scheduler.tasks[future.key].who_has
        found[holder.address] += len(await future)
    return found


def events(scheduler: Any) -> list[dict[str, Any]]:
    return [event for _, event in scheduler.get_events("gpurt-shuffle") if event["action"] == "balances"]


@pytest.mark.parametrize(("share", "on"), [(SHARE, True), (0.0, True), (SHARE, False)])
def test_outputs_move_where_one_key_has_many_rows(share: float, on: bool) -> None:
    @on_cluster(workers=4, **{"gpurt.shuffle.balance": on})
    async def run(client: Any, scheduler: Any, *workers: Any) -> None:
        data = frame("row", share)
        with dask.config.set({"dataframe.shuffle.method": "gpurt"}):
            out = client.persist(data.shuffle("key"))
        await wait(out)
        by_worker = await rows_by_worker(client, scheduler, out)
        print(share, on, by_worker, counted(scheduler, "shuffle.outputs.moved"), events(scheduler))
        found, expected = await client.gather(client.compute([out, data]))
        pd.testing.assert_frame_equal(
            found.sort_values("row", ignore_index=True), expected.sort_values("row", ignore_index=True)
        )
        del out

    run()
