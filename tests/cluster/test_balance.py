"""Move outputs of shuffles to other owners once their sizes are known; each row arrives exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import futures_of, wait

from tests.helpers.in_process import on_cluster
from tests.helpers.nightly import nightly

PARTS, ROWS, KEYS, HOT = 32, 20_000, 4096, 7
#: Share of rows with the hot key, which all go to one output.
SHARE = 0.3
MOVED = "shuffle.outputs.moved"


def left_part(at: int, share: float) -> pd.DataFrame:
    chance = np.random.default_rng(at)
    keys = chance.integers(0, KEYS, ROWS)
    keys[chance.random(ROWS) < share] = HOT
    return pd.DataFrame({"key": keys, "row": np.arange(at * ROWS, (at + 1) * ROWS)})


def left(share: float = SHARE, parts: int = PARTS) -> Any:
    """Return a collection in which one key has a share of the rows."""
    return dd.from_map(left_part, range(parts), share=share, meta=left_part(0, share)[:0])


def right_part(at: int) -> pd.DataFrame:
    keys = np.arange(at, KEYS, PARTS)
    return pd.DataFrame({"key": keys, "other": keys * 3})


def right() -> Any:
    """Return a collection with each key once."""
    return dd.from_map(right_part, range(PARTS), meta=right_part(0)[:0])


def local(share: float = SHARE, parts: int = PARTS) -> pd.DataFrame:
    return pd.concat([left_part(at, share) for at in range(parts)])


def joined() -> pd.DataFrame:
    return local().merge(pd.concat(map(right_part, range(PARTS))), on="key")


def assert_same(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    found, expected = (each.sort_values("row", ignore_index=True) for each in (found, expected))
    pd.testing.assert_frame_equal(found, expected)


def persisted(client: Any, collection: Callable[[], Any]) -> Any:
    with dask.config.set({"dataframe.shuffle.method": "gpurt"}):
        return client.persist(collection())


def counted(scheduler: Any, name: str) -> float:
    return float(scheduler.extensions["gpurt"].metrics.snapshot()["counters"].get(name, 0))


def told(scheduler: Any) -> list[dict[str, Any]]:
    """Return the events of outputs that moved."""
    return [event for _, event in scheduler.get_events("gpurt-shuffle") if event["action"] == "balances"]


async def rows_by_worker(scheduler: Any, out: Any) -> Counter[str]:
    """Return the rows of the outputs on each worker."""
    found = Counter[str]()
    for future in futures_of(out):
        (holder,) = scheduler.tasks[future.key].who_has
        found[holder.address] += len(await future)
    return found


# ---- skew ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "on", "moves"),
    [
        (SHARE, True, 7),
        nightly(0.0, True, 0),
        nightly(SHARE, False, 0),
    ],
)
def test_outputs_move_where_one_key_has_many_rows(share: float, on: bool, moves: int) -> None:
    @on_cluster(workers=4, **{"gpurt.shuffle.balance": on})
    async def run(client: Any, scheduler: Any, *workers: Any) -> None:
        out = persisted(client, lambda: left(share).shuffle("key"))
        await wait(out)
        assert counted(scheduler, MOVED) == moves
        assert [event["outputs"] for event in told(scheduler)] == [moves] * (moves > 0)
        assert not counted(scheduler, "shuffle.runs.recovered")
        rows = await rows_by_worker(scheduler, out)
        hottest = max(rows.values()) / sum(rows.values())
        assert hottest == pytest.approx({0: 0.25, 7: 0.32}[moves] if on else 0.48, abs=0.02)
        assert_same(await client.compute(out), local(share))
        del out

    run()


@on_cluster(workers=4)
async def test_both_sides_of_a_join_move_together(client: Any, scheduler: Any, *workers: Any) -> None:
    out = persisted(client, lambda: left().merge(right(), on="key"))
    await wait(out)
    assert counted(scheduler, MOVED) == 7
    assert [event["outputs"] for event in told(scheduler)] == [7, 7]
    rows = await rows_by_worker(scheduler, out)
    assert max(rows.values()) < 0.34 * sum(rows.values())
    assert_same(await client.compute(out), joined())
    del out


# ---- where outputs stay ----------------------------------------------------------------


@on_cluster(workers=4)
async def test_outputs_stay_whose_shards_are_gone(
    client: Any, scheduler: Any, *workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moving them would mean to transfer all inputs again."""
    for worker in workers:
        box = worker.plugins["gpurt"].exchange.pools.known("host")
        monkeypatch.setattr(box, "has_all", lambda run: False)
    out = persisted(client, lambda: left().shuffle("key"))
    await wait(out)
    assert not counted(scheduler, MOVED)
    del out
