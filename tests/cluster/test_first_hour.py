"""The first hour of a new user: a first job in a script, and what is printed about it."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.commands import answer

FIRST_JOB = """
import json, sys
import numpy as np, pandas as pd
import dask.dataframe as dd
from dask.distributed import Client, LocalCluster
import dask_gpurt

if __name__ == "__main__":
    cluster = LocalCluster(n_workers=1, processes=False, dashboard_address=":0")
    with cluster, Client(cluster) as client:
        dask_gpurt.enable(client)
        left = pd.DataFrame({"k": np.arange(4_000) % 100, "x": np.arange(4_000)[::-1]})
        right = pd.DataFrame({"k": np.arange(100), "y": np.arange(100)})
        joined = dd.from_pandas(left, npartitions=4).merge(dd.from_pandas(right, npartitions=2), on="k")
        joined.sort_values("x").to_parquet(sys.argv[1])
        print(json.dumps(dd.read_parquet(sys.argv[1]).x.compute().tolist()))
"""


def test_a_join_and_a_sort_end_where_client_and_scheduler_share_a_process(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(FIRST_JOB)
    # With Python 3.11 Dask's own does not end: see dask_hooks/properties.py.
    assert answer(script, str(tmp_path / "sorted")) == list(range(4_000))
