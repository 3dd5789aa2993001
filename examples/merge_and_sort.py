"""Join two frames, group and sort the result: plain dask.dataframe, shuffled by the runtime."""

from __future__ import annotations

import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client

import dask_gpurt


def make_orders(part: int, rows: int = 20_000) -> pd.DataFrame:
    """Make orders; a few customers order far more often than the rest."""
    random = np.random.default_rng(part)
    customer = np.minimum(random.zipf(1.5, rows), 999)
    return pd.DataFrame({"customer": customer, "amount": random.integers(1, 500, rows)})


def make_customers(part: int, rows: int = 250) -> pd.DataFrame:
    """Make ``rows`` customers, numbered from ``part * rows``."""
    number = np.arange(part * rows, (part + 1) * rows)
    return pd.DataFrame({"customer": number, "city": np.array(["Oslo", "Lima", "Pune"])[number % 3]})


def main() -> None:
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client:
        dask_gpurt.enable(client)
        orders = dd.from_map(make_orders, range(8))
        customers = dd.from_map(make_customers, range(4))

        joined = orders.merge(customers, on="customer", broadcast=False)
        by_city = joined.groupby("city")["amount"].agg(["count", "sum"])
        print(by_city.compute().sort_index(), end="\n\n")

        largest = joined.sort_values("amount", ascending=False).persist()
        print(largest.head(5), end="\n\n")

        for counter, value in sorted(dask_gpurt.report(client)["counters"].items()):
            if counter.startswith(("exchange.bytes.", "shuffle.r")):
                print(f"{counter:<32} {value:>14,.0f}")


if __name__ == "__main__":
    main()
