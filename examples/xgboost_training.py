"""Train XGBoost on a shuffled frame without extra copies: plain dask.dataframe and xgboost.dask.

A shuffle brings all rows of a customer into one partition, where features of that customer can be computed.
Training needs ``pip install xgboost`` or ``xgboost-cpu``.
"""

from __future__ import annotations

import argparse
import importlib
import resource
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client, wait

import dask_gpurt

FEATURES = [f"x{number}" for number in range(20)]
COLUMNS = ["customer", *FEATURES, "mean", "label"]


def make_orders(part: int, rows: int = 20_000) -> pd.DataFrame:
    """Make orders whose label depends on the customer."""
    random = np.random.default_rng(part)
    frame = pd.DataFrame(random.random((rows, len(FEATURES)), np.float32), columns=FEATURES)
    customer = random.integers(0, 1000, rows).astype(np.float32)
    noise = random.normal(0, 0.1, rows).astype(np.float32)
    return frame.assign(customer=customer, label=frame.x0 + (customer % 7) / 7 + noise)


def with_mean(orders: Any) -> Any:
    """Add each customer's mean of ``x1``; all orders of a customer lie in this partition."""
    mean = orders.groupby("customer")["x1"].mean().rename("mean").astype("float32").reset_index()
    return orders.merge(mean, on="customer")[COLUMNS]


def features_of(orders: Any) -> Any:
    """Return all columns but the last as a view: a slice of adjacent columns copies nothing."""
    return orders.iloc[:, :-1]


def label_of(orders: Any) -> Any:
    """Return the last column as a view."""
    return orders.iloc[:, -1]


def training_frame(parts: int, rows: int) -> Any:
    """Build the frame to train on, lazily, in the library that ``dataframe.backend`` names."""
    orders = dd.from_map(make_orders, range(parts), rows=rows)
    orders = orders.to_backend(dask.config.get("dataframe.backend", "pandas"))
    meta = orders._meta.assign(mean=np.float32(0))[COLUMNS]
    return orders.shuffle("customer").map_partitions(with_mean, meta=meta)


def train(client: Client, frame: Any, rounds: int = 20, *, copies: bool = False) -> Any:
    """Train on a frame with a label in its last column.

    Parameters
    ----------
    client
        A client of the cluster.
    frame
        A dask.dataframe.
    rounds
        Number of trees.
    copies
        Train in the obvious but costly way: select columns by name, which pandas copies, and build a
        ``DaskDMatrix``, for which each worker concatenates its partitions once more.

    Returns
    -------
    dict
        What ``xgboost.dask.train`` returns: ``"booster"`` and ``"history"``.
    """
    from xgboost import dask as dxgb

    # Without this, features and label would each compute a shuffle of their own.
    frame = frame.persist()
    wait(frame)
    if copies:
        features, label, matrix = frame[COLUMNS[:-1]], frame["label"], dxgb.DaskDMatrix
    else:
        features = frame.map_partitions(features_of, meta=features_of(frame._meta))
        label = frame.map_partitions(label_of, meta=label_of(frame._meta))
        matrix = dxgb.DaskQuantileDMatrix
    device = "cuda" if dask.config.get("dataframe.backend", "pandas") == "cudf" else "cpu"
    options = {"device": device, "tree_method": "hist", "max_depth": 6}
    data = matrix(client, features, label)
    return dxgb.train(
        client, options, data, num_boost_round=rounds, evals=[(data, "train")], verbose_eval=False
    )


def peak_memory() -> int:
    """Return the peak resident memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rows", type=int, default=20_000, help="orders in each of 16 partitions")
    arguments.add_argument("--copies", action="store_true", help="train with avoidable copies")
    arguments.add_argument("--off", action="store_true", help="run without the runtime")
    given = arguments.parse_args()
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client:
        if not given.off:
            dask_gpurt.enable(client)
        client.run(importlib.import_module, "xgboost")
        before = client.run(peak_memory)
        found = train(client, training_frame(16, given.rows), copies=given.copies)
        print(f"error {found['history']['train']['rmse'][-1]:.4f}")
        nbytes = 16 * given.rows * len(COLUMNS) * 4 / len(before)
        for worker, peak in client.run(peak_memory).items():
            grown = peak - before[worker]
            print(f"{worker}: at most {grown / 2**20:,.0f} MiB more, {grown / nbytes:.1f} times its data")


if __name__ == "__main__":
    main()
