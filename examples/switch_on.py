"""Switch the runtime on by configuration and in code; existing Dask code runs unchanged."""

from __future__ import annotations

import dask
import pandas as pd
from dask.dataframe import from_pandas
from distributed import Client

import dask_gpurt


def count_by_customer() -> pd.DataFrame:
    """Count orders as existing code does, without importing the runtime."""
    orders = pd.DataFrame({"customer": [i % 7 for i in range(1000)], "item": range(1000)})
    frame = from_pandas(orders, npartitions=4).shuffle("customer")
    counts: pd.DataFrame = frame.groupby("customer").count().compute()
    return counts.sort_index()


def by_config() -> pd.DataFrame:
    """Set ``gpurt.enabled`` before making the client; a YAML file or DASK_GPURT__ENABLED=true works too."""
    with (
        dask.config.set({"gpurt.enabled": True}),
        Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client,
    ):
        print("by config:", "on" if dask_gpurt.is_enabled(client) else "off")
        return count_by_customer()


def in_code() -> pd.DataFrame:
    """Switch the runtime on for an existing client, and off again."""
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client:
        dask_gpurt.enable(client)
        counts = count_by_customer()
        rows = dask_gpurt.report(client)["counters"]["shuffle.rows"]
        print(f"in code: {rows:,} rows shuffled by the runtime")
        dask_gpurt.disable(client)
        return counts


if __name__ == "__main__":
    pd.testing.assert_frame_equal(by_config(), in_code())
    print("the same result both ways")
