"""Detect memory that changes hands before all operations on it have been waited for."""

from __future__ import annotations

from typing import Any

import dask
import numpy as np
import pandas as pd
import pytest

import dask_gpurt
from tests.helpers.clusters import (
    Library,
    assert_same_partitions,
    cluster,
    counters,
    partitions,
    told_too_early,
)
from tests.helpers.instruments import HandoverChecker

# ---- clusters ------------------------------------------------------------------------


def frames() -> list[pd.DataFrame]:
    random = np.random.default_rng(0)
    return [
        pd.DataFrame(
            {"key": random.integers(0, 999, 20_000), "text": random.integers(0, 9, 20_000).astype(str)}
        )
        for _ in range(8)
    ]


@pytest.mark.slow
def test_nothing_is_too_early_in_shuffles_that_spill(library: Library) -> None:
    small = {"memory__device": 2**20, "memory__pinned": 2**20, "exchange__pool": 2**20}
    with cluster(library.name, handovers=True, **small) as client:
        collection = library.collection(frames())
        ours = partitions(collection.shuffle("key"))
        with dask.config.set({"dataframe.shuffle.method": "tasks", "gpurt.takeover": False}):
            theirs = partitions(collection.shuffle("key"))
        assert_same_partitions(ours, theirs, in_order=False)
        assert told_too_early(client) == []
        assert counters(client)["overlap.handovers"] > 0


def forget_to_settle() -> None:
    """Make producers publish blocks that may not have been written yet."""
    from tests.helpers import instruments

    watch_table = instruments.watch_table

    def forgetful(table: Any, checker: HandoverChecker) -> Any:
        settle = table.settle
        watch_table(table, checker).settle = settle
        return table

    instruments.watch_table = forgetful


@pytest.mark.slow
def test_the_doctor_tells_what_is_too_early(library: Library) -> None:
    with cluster(library.name, handovers=True) as client:
        client.run(forget_to_settle)
        partitions(library.collection(frames()).shuffle("key"))
        assert len(told_too_early(client)) == 2
        for found in told_too_early(client):
            assert "before packing has been waited for" in str(found)
        dask_gpurt.disable(client)  # the counts are meant to be non-zero, so skip the check at the end
