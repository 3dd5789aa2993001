"""Make the graph of a dataframe before it is known what computes it: the client, or a local scheduler."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from pandas.testing import assert_frame_equal

from tests.helpers.clusters import cluster, counters

ROWS = 1_000
FRAME = pd.DataFrame({"key": np.arange(ROWS) % 17, "row": np.arange(ROWS)})
SIDE = pd.DataFrame({"key": np.arange(17), "name": list("abcdefghijklmnopq")})


def joined() -> Any:
    sides = dd.from_pandas(FRAME, npartitions=4), dd.from_pandas(SIDE, npartitions=3)
    return sides[0].merge(sides[1], on="key", broadcast=False)


def in_order(parts: Any) -> pd.DataFrame:
    return pd.concat(parts).sort_values("row", ignore_index=True)


def compute_here(parts: bytes) -> pd.DataFrame:
    """Compute partitions in the thread of this task."""
    return in_order(dask.compute(*pickle.loads(parts), scheduler="sync"))


def test_a_graph_is_computed_by_the_client_and_by_local_schedulers() -> None:
    expected = FRAME.merge(SIDE, on="key").sort_values("row", ignore_index=True)
    with cluster(workers=2) as client:
        parts = joined().to_delayed()
        assert_frame_equal(in_order(dask.compute(*parts)), expected, check_dtype=False)
        moved = counters(client)["shuffle.rows"]
        assert moved == ROWS + len(SIDE), "it did not go through the runtime"
        for local in ("threads", "sync"):
            assert_frame_equal(in_order(dask.compute(*parts, scheduler=local)), expected, check_dtype=False)
        there = client.submit(compute_here, cloudpickle.dumps(parts))
        assert_frame_equal(there.result(), expected, check_dtype=False)
        found = joined().compute(scheduler="threads")
        assert_frame_equal(in_order([found]), expected, check_dtype=False)
        assert counters(client)["shuffle.rows"] == moved
