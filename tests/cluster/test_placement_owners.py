"""Choose the owners of a shuffle's outputs on clusters."""

from __future__ import annotations

from typing import Any

import dask.dataframe as dd
import pandas as pd
import pytest
from distributed import Client, wait
from distributed.shuffle._core import ShuffleSpec as DaskShuffleSpec

from tests.helpers.clusters import cluster, counters
from tests.helpers.in_process import believed_full


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, str]]:
    """Record the owners of each run that the scheduler, in this process, begins."""
    found: list[dict[int, str]] = []
    create = DaskShuffleSpec.create_new_run

    def create_new_run(self: Any, worker_for: dict[int, str], span_id: Any) -> Any:
        found.append(dict(worker_for))
        return create(self, worker_for, span_id)

    monkeypatch.setattr(DaskShuffleSpec, "create_new_run", create_new_run)
    return found


def fill_up(client: Client, worker: str) -> None:
    local: Any = client.cluster
    believed_full(local.scheduler, worker)


def merged(client: Client) -> Any:
    frame = pd.DataFrame({"key": range(1000), "value": range(1000)})
    left, right = (dd.from_pandas(frame, npartitions=6).persist() for _ in range(2))
    wait([left, right])
    return left.merge(right, on="key", npartitions=9).persist()


def test_both_sides_of_a_merge_share_owners_with_room(runs: list[dict[int, str]]) -> None:
    with cluster(workers=3, placement__enabled=True) as client:
        full, *others = sorted(client.nthreads())
        fill_up(client, full)
        result = merged(client)
        assert len(result.compute()) == 1000
        one, other = runs
        assert one == other
        assert set(one.values()) == set(others)
        assert counters(client)["placement.shuffles"] == 1


def test_off_owners_are_those_of_dask(runs: list[dict[int, str]]) -> None:
    with cluster(workers=3) as client:
        workers = list(client.nthreads())
        fill_up(client, workers[0])
        assert len(merged(client).compute()) == 1000
        for owners in runs:
            first = workers.index(owners[0])
            turned = workers[first:] + workers[:first]
            assert owners == {output: turned[3 * output // len(owners)] for output in owners}
        assert "placement.shuffles" not in counters(client)
