"""Put results together in the client: the same as by Dask's last task, whatever happens on the way."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client, get_client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal, assert_index_equal, assert_series_equal

import dask_gpurt
from dask_gpurt.client import results
from dask_gpurt.client.session import SESSIONS
from dask_gpurt.dask_hooks import computing
from dask_gpurt.observe import Fallback
from tests.helpers.clusters import cluster

PARTS, ROWS = 6, 50
#: By name, what makes the values of a column of one partition.
COLUMNS: dict[str, Callable[[int, np.ndarray], Any]] = {
    "numbers": lambda part, rows: rows,
    "missing": lambda part, rows: np.where(rows % 3, rows, np.nan),
    "integers": lambda part, rows: pd.array(np.where(rows % 2, rows, None), "Int64"),
    "strings": lambda part, rows: pd.array([f"x{row}" if row % 4 else None for row in rows], "str"),
    "objects": lambda part, rows: pd.Series([(int(row), part) for row in rows], dtype=object).array,
    "categories": lambda part, rows: pd.Categorical.from_codes(rows % 2, [f"of {part}", "of all"]),
    "same categories": lambda part, rows: pd.Categorical.from_codes(rows % 2, ["a", "b"], ordered=True),
    "times": lambda part, rows: pd.to_datetime(rows, unit="D", utc=True).tz_convert("Asia/Tokyo"),
}
INDEXES: dict[str, Callable[[int, np.ndarray], Any]] = {
    "numbered": lambda part, rows: pd.RangeIndex(len(rows)),
    "named": lambda part, rows: pd.Index(rows[::-1], name="row"),
    "levels": lambda part, rows: pd.MultiIndex.from_arrays([rows, rows % 2], names=["row", None]),
    "times": lambda part, rows: pd.DatetimeIndex(pd.to_datetime(rows, unit="h"), name="at"),
    "categories": lambda part, rows: pd.CategoricalIndex(pd.Categorical.from_codes(rows % 2, ["a", "b"])),
}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with cluster("pandas") as client:
        yield client


def put_together() -> int:
    """Return how many partitions of results clients have put together."""
    return int(SESSIONS.metrics.total("results.partitions").get((), 0))


def same(part: Any) -> Any:
    return part


def of_parts(parts: list[Any]) -> Any:
    with dask.config.set({"dataframe.convert-string": False}):
        return dd.from_map(same, parts, meta=parts[0].iloc[:0], enforce_metadata=False)


def made(part: int, rows: int, columns: list[str], index: str) -> pd.DataFrame:
    numbers = np.arange(part, part + rows)
    frame = pd.concat([pd.Series(COLUMNS[each](part, numbers)) for each in columns], axis=1)
    frame.columns = pd.Index(columns)
    frame.index = INDEXES[index](part, numbers)
    return frame


def numbers() -> Any:
    """Return a collection whose partitions are put together in the client."""
    frame = pd.DataFrame({"x": np.arange(PARTS * ROWS), "y": np.arange(PARTS * ROWS) % 7})
    return dd.from_pandas(frame, npartitions=PARTS)


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, pd.Index):
        assert_index_equal(found, expected, exact=True)
        return
    (assert_frame_equal if isinstance(expected, pd.DataFrame) else assert_series_equal)(found, expected)
    assert type(found.index) is type(expected.index)


@given(
    sizes=st.lists(st.integers(0, 5), min_size=2, max_size=5),
    columns=st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=4, unique=True),
    index=st.sampled_from(sorted(INDEXES)),
    what=st.sampled_from(["frame", "column", "index"]),
)
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_results_are_as_dask_puts_them_together(
    client: Client, sizes: list[int], columns: list[str], index: str, what: str
) -> None:
    collection = of_parts([made(part, rows, columns, index) for part, rows in enumerate(sizes)])
    if what == "index":
        collection = collection.index
    elif what == "column":
        collection = collection[columns[0]]
    before = put_together()
    found = collection.compute()
    assert put_together() == before + len(sizes)
    assert_same(found, collection.compute(direct=False))
    assert put_together() == before + len(sizes)


def test_several_results_at_once(client: Client) -> None:
    frame = numbers()
    joined = frame.merge(frame.rename(columns={"x": "z"}), on="y")
    whole, total, column, rows = dask.compute(frame, frame.x.sum(), frame.y, joined)
    expected = dask.compute(frame, frame.x.sum(), frame.y, joined, direct=False)
    assert total == expected[1]
    assert_same(whole, expected[0])
    assert_same(column, expected[2])
    order = ["x", "y", "z"]
    assert_same(rows.sort_values(order, ignore_index=True), expected[3].sort_values(order, ignore_index=True))


def test_futures_local_schedulers_and_tasks_are_left_to_dask(client: Client) -> None:
    frame, before = numbers(), put_together()
    expected = frame.compute(direct=False)
    assert_same(client.compute(frame).result(), expected)
    assert_same(frame.compute(scheduler="threads"), expected)

    def in_task() -> int:
        with get_client():
            return len(numbers().compute())

    assert client.submit(in_task, pure=False).result() == len(expected)
    assert put_together() == before


def test_many_small_partitions_are_put_together_by_a_task(client: Client) -> None:
    many = results.FEW_PARTITIONS + 1
    frame = dd.from_pandas(pd.DataFrame({"x": np.arange(many)}), npartitions=many)
    before = put_together()
    assert_same(frame.compute(), frame.compute(direct=False))
    assert put_together() == before


def test_an_error_is_that_of_the_task_and_nothing_stays(client: Client) -> None:
    def divide(part: pd.DataFrame) -> pd.DataFrame:
        return part // 0 if part.x.iloc[0] else part.assign(x=1 // 0)

    with pytest.raises(ZeroDivisionError):
        numbers().map_partitions(divide, meta={"x": "i8", "y": "i8"}).compute()
    client.sync(asyncio.sleep, 0)  # futures are released by earlier callbacks of this loop
    assert not client.futures


def test_several_clients_and_threads(client: Client) -> None:
    expected = numbers().compute(direct=False)
    with Client(client.scheduler.address, set_as_default=False) as other:
        dask_gpurt.enable(other)
        before = put_together()
        with ThreadPoolExecutor(4) as threads:
            for found in threads.map(
                lambda at: numbers().compute(scheduler=(client, other)[at % 2]), range(8)
            ):
                assert_same(found, expected)
        assert put_together() == before + 8 * PARTS


def test_workers_out_of_reach(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    connect, workers = client.rpc.connect, list(client.ncores())

    async def only_to_scheduler(address: str) -> Any:
        if address in workers:
            raise OSError("no route to host")
        return await connect(address)

    def fallbacks() -> int:
        counted = SESSIONS.metrics.snapshot()["fallbacks"].get(Fallback.RESULTS_THROUGH_SCHEDULER.id)
        return counted["count"] if counted else 0

    expected, before = numbers().compute(direct=False), fallbacks()
    monkeypatch.setattr(SESSIONS.results, "_unreachable", type(SESSIONS.results._unreachable)())
    monkeypatch.setattr(client.rpc, "connect", only_to_scheduler)
    for _ in range(2):
        assert_same(numbers().compute(), expected)
    assert fallbacks() == before + 2  # once for each worker, not for each result


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_worker_is_killed_before_its_partitions_are_fetched(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    original = computing.where_are if when == "before" else computing.fetch

    with cluster("pandas") as client:
        victim = next(iter(client.run(os.getpid).values()))

        async def kill_first(*args: Any) -> Any:
            found = await original(*args) if when == "before" else None
            if not asked.is_set():
                asked.set()
                os.kill(victim, signal.SIGKILL)
            return found if when == "before" else await original(*args)

        monkeypatch.setattr(computing, "where_are" if when == "before" else "fetch", kill_first)
        collection = dd.from_map(lambda part: pd.DataFrame({"x": np.arange(ROWS) + part}), range(PARTS))
        found = collection.compute()
        assert asked.is_set()
        assert_same(found, collection.compute(scheduler="sync"))
