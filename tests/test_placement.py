"""Placement on a running cluster: switched on and off, explained, and with workers that come and go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from clusters import cluster, counters
from distributed import Client, wait

import dask_gpurt


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with cluster(workers=2, placement__enabled=True) as client:
        yield client


def add(*numbers: int) -> int:
    return sum(numbers)


def test_a_choice_is_explained_with_its_terms(client: Client) -> None:
    first = client.submit(add, 1, 2, key="first")
    second = client.submit(add, first, 3, key="second")
    assert second.result() == 6
    frame = dask_gpurt.explain(client, "second")
    (where,) = client.who_has(second)["second"]
    assert frame[frame.chosen].worker.tolist() == [where]
    terms = frame[["waiting", "running", "moving", "room"]].sum(axis=1)
    assert frame.seconds.tolist() == pytest.approx(terms.tolist())
    assert frame.fits.all()
    assert dask_gpurt.explain(client, "never heard of").empty
    assert counters(client)["placement.decisions"] >= 2


def test_the_scheduler_chooses_on_after_a_restart(client: Client) -> None:
    client.restart()
    futures = client.map(add, range(50))
    assert client.submit(sum, futures).result() == sum(range(50))
    assert not _fallbacks(client)


def test_workers_come_and_go_under_load(client: Client) -> None:
    import time

    def slow(i: int) -> int:
        time.sleep(0.02)
        return i

    local: Any = client.cluster
    futures = client.map(slow, range(300))
    total = client.submit(sum, futures)
    local.scale(3)
    client.wait_for_workers(3, timeout=60)
    local.scale(2)
    assert total.result(timeout=120) == sum(range(300))
    local.scale(2)
    client.wait_for_workers(2, timeout=60)
    assert not _fallbacks(client)


def test_a_shuffle_runs_under_our_choices(client: Client) -> None:
    import dask.dataframe as dd
    import pandas as pd

    frame = pd.DataFrame({"key": range(1000), "value": range(1000)})
    left, right = (dd.from_pandas(frame, npartitions=8) for _ in range(2))
    assert len(left.merge(right, on="key").compute()) == 1000
    assert not _fallbacks(client)


def test_switched_off_there_are_no_reasons(client: Client) -> None:
    dask_gpurt.disable(client)
    try:
        overridden = client.run_on_scheduler(lambda dask_scheduler: "is_rootish" in dask_scheduler.__dict__)
        assert not overridden
        with pytest.raises(RuntimeError, match=r"gpurt\.placement\.enabled"):
            dask_gpurt.explain(client, "second")
        future = client.submit(add, 1, 2, pure=False)
        wait(future)
    finally:
        dask_gpurt.enable(client)


def _fallbacks(client: Client) -> dict[str, Any]:
    found = dask_gpurt.report(client)["fallbacks"]
    return {what: known for what, known in found.items() if what.startswith("placement")}
