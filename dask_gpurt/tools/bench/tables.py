"""Generate tables modelled on three of TPC-H's, deterministically, on the workers, and query them.

Each partition is generated from its own seed, so nothing is downloaded and all workers generate the same
rows. Money is in integers (prices in cents, discounts and taxes in percent): sums do not depend on the order
of addition, so results can be compared exactly. Keys and their frequencies are as in TPC-H; text columns are
left out. Queries are written as a user of Dask would write them, without hints for shuffles.
``benchmarks/tpch`` has all queries of TPC-H on its own tables; its
figures cannot be compared with those of these queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd

#: Number of rows at scale 1. An order has one to seven items, four on average.
CUSTOMERS, ORDERS = 150_000, 1_500_000
MAX_ITEMS = 7
SEGMENTS = ("AUTOMOBILE", "BUILDING", "FURNITURE", "HOUSEHOLD", "MACHINERY")
FIRST_DAY, DAYS = np.datetime64("1992-01-01", "us"), 2406
#: Items shipped later than this are open, and have not been returned.
LAST_DAY = np.datetime64("1995-06-17", "us")
ONE_DAY = np.timedelta64(1, "D")
TABLES = ("customer", "orders", "lineitem")
#: The subfolder of the user's folder, which may have tables with the same names.
SUBFOLDER = "gpurt-bench"


@dataclass(frozen=True)
class TableSize:
    """Set the size of the tables.

    ``scale``: the scale; 1 has 6 million items, as in TPC-H.
    ``partitions``: number of partitions of orders, and of items.
    """

    scale: float
    partitions: int

    @cached_property
    def rows(self) -> dict[str, int]:
        """Return the numbers of rows of customer and orders."""
        return {
            "customer": max(3, round(CUSTOMERS * self.scale)),
            "orders": max(self.partitions, round(ORDERS * self.scale)),
        }

    def partitions_of(self, name: str) -> int:
        """Return the number of partitions of a table."""
        return max(1, self.partitions // 4) if name == "customer" else self.partitions


def make(
    part: int, name: str, scale: float, partitions: int, columns: Sequence[str] | None = None
) -> pd.DataFrame:
    """Generate a partition of a table.

    ``scale``, ``partitions``: see :class:`TableSize`.
    ``columns``: the columns to keep; all by default.
    """
    columns_of = {"customer": _customers, "orders": _orders, "lineitem": _items}[name]
    made = pd.DataFrame(columns_of(part, TableSize(scale, partitions)))
    return made if columns is None else made[list(columns)]


def _keys(part: int, name: str, size: TableSize) -> Any:
    rows, parts = size.rows[name], size.partitions_of(name)
    return np.arange(rows * part // parts, rows * (part + 1) // parts, dtype="int64")


def _strings(values: Sequence[str], codes: Any) -> Any:
    return pd.array(np.array(list(values), dtype=object)[codes], dtype="string[pyarrow]")


def _customers(part: int, size: TableSize) -> dict[str, Any]:
    keys = _keys(part, "customer", size)
    rng = np.random.default_rng([0, part])
    return {
        "c_custkey": keys,
        "c_mktsegment": _strings(SEGMENTS, rng.integers(0, len(SEGMENTS), len(keys))),
    }


def _orders(part: int, size: TableSize) -> dict[str, Any]:
    keys = _keys(part, "orders", size)
    rng = np.random.default_rng([1, part])
    dates = FIRST_DAY + rng.integers(0, DAYS, len(keys)) * ONE_DAY
    # A third of the customers have no orders.
    customers = rng.integers(0, size.rows["customer"], len(keys))
    customers -= customers % 3 == 0
    return {
        "o_orderkey": keys,
        "o_custkey": np.abs(customers),
        "o_orderdate": dates.astype("datetime64[us]"),
        "o_totalprice": rng.integers(90_000, 50_000_000, len(keys)),
    }


def _items(part: int, size: TableSize) -> dict[str, Any]:
    orders = _orders(part, size)
    rng = np.random.default_rng([2, part])
    items = rng.integers(1, MAX_ITEMS + 1, len(orders["o_orderkey"]))
    ordered, rows = np.repeat(orders["o_orderdate"], items), int(items.sum())
    shipped = ordered + rng.integers(1, 122, rows) * ONE_DAY
    quantity = rng.integers(1, 51, rows)
    is_open = shipped > LAST_DAY
    return {
        "l_orderkey": np.repeat(orders["o_orderkey"], items),
        "l_quantity": quantity,
        "l_extendedprice": quantity * rng.integers(90_000, 210_000, rows),
        "l_discount": rng.integers(0, 11, rows),
        "l_tax": rng.integers(0, 9, rows),
        "l_returnflag": _strings("NRA", np.where(is_open, 0, rng.integers(1, 3, rows))),
        "l_linestatus": _strings("FO", is_open.astype("int64")),
        "l_shipdate": shipped,
    }


class Tables:
    """Read the tables lazily, by name.

    ``folder``: the folder in which they have a subfolder; without it each query generates them.
    """

    def __init__(self, size: TableSize, backend: str = "pandas", folder: str | None = None) -> None:
        self.size = size
        self.folder = None if folder is None else f"{folder.rstrip('/')}/{SUBFOLDER}"
        self._backend = backend

    def write(self) -> None:
        """Have the workers write the tables to the folder, as Parquet."""
        for name in TABLES:
            self._made(name).to_parquet(f"{self.folder}/{name}", write_index=False, overwrite=True)

    def __getitem__(self, name: str) -> Any:
        """Return the dask.dataframe of a table."""
        if self.folder is not None:
            return dd.read_parquet(f"{self.folder}/{name}", backend=self._backend)
        made = self._made(name)
        return made if self._backend == "pandas" else made.to_backend(self._backend)

    def _made(self, name: str) -> Any:
        return dd.from_map(
            make,
            range(self.size.partitions_of(name)),
            name=name,
            scale=self.size.scale,
            partitions=self.size.partitions,
            meta=make(0, name, 0, 1).iloc[:0],
        )

    def __repr__(self) -> str:
        where = "made by each query" if self.folder is None else f"Parquet in {self.folder}"
        return f"scale {self.size.scale:g}, {self.size.partitions} partitions, {where}"


# ---- queries ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Query:
    """Define a query of the bench.

    ``name``: its name, with the number of the TPC-H query that it is modelled on.
    ``order``: the columns that identify a row of the result.
    """

    name: str
    build: Callable[[Tables], Any]
    order: tuple[str, ...]

    def collected(self, result: Any) -> pd.DataFrame:
        """Return a result as a sorted pandas frame."""
        frame: pd.DataFrame = result if isinstance(result, pd.DataFrame) else result.to_pandas()
        return frame.sort_values(list(self.order), ignore_index=True)


def revenue(items: Any) -> Any:
    """Return the price paid for each item, without tax, in hundredths of a cent."""
    return items.l_extendedprice * (100 - items.l_discount)


def summary(tables: Tables) -> Any:
    """Sum all items in four groups: reading and computing, with almost nothing to move."""
    items = tables["lineitem"]
    items = items[items.l_shipdate <= pd.Timestamp("1998-09-02")]
    paid = revenue(items)
    items = items.assign(paid=paid, charged=paid * (100 + items.l_tax), count=1)
    sums = {name: "sum" for name in ("l_quantity", "l_extendedprice", "paid", "charged", "count")}
    return items.groupby(["l_returnflag", "l_linestatus"]).agg(sums).reset_index()


def priority(tables: Tables) -> Any:
    """Find the ten open orders with the highest revenue: two joins, and a groupby with many groups."""
    customer, orders, items = (tables[name] for name in ("customer", "orders", "lineitem"))
    day = pd.Timestamp("1995-03-15")
    found = (
        customer[customer.c_mktsegment == "BUILDING"]
        .merge(orders[orders.o_orderdate < day], left_on="c_custkey", right_on="o_custkey")
        .merge(items[items.l_shipdate > day], left_on="o_orderkey", right_on="l_orderkey")
    )
    found = found.assign(revenue=revenue(found))
    by_order = found.groupby(["l_orderkey", "o_orderdate"]).agg({"revenue": "sum"}).reset_index()
    return by_order.sort_values(["revenue", "l_orderkey"], ascending=[False, True]).head(10, compute=False)


def distribution(tables: Tables) -> Any:
    """Count customers by their number of orders: a left join, and two groupbys."""
    found = tables["customer"].merge(tables["orders"], how="left", left_on="c_custkey", right_on="o_custkey")
    counts = found.groupby("c_custkey").agg({"o_orderkey": "count"}).reset_index()
    counts = counts.rename(columns={"o_orderkey": "orders", "c_custkey": "customers"})
    return counts.groupby("orders").agg({"customers": "count"}).reset_index()


def large_orders(tables: Tables) -> Any:
    """Find the orders with the most items: a groupby by order, and joins of its result with larger tables."""
    quantities = tables["lineitem"].groupby("l_orderkey").agg({"l_quantity": "sum"}).reset_index()
    large = quantities[quantities.l_quantity > 270].rename(columns={"l_quantity": "quantity"})
    found = (
        tables["orders"]
        .merge(large, left_on="o_orderkey", right_on="l_orderkey")
        .merge(tables["customer"], left_on="o_custkey", right_on="c_custkey")
    )
    return found[["o_orderkey", "c_custkey", "c_mktsegment", "o_orderdate", "o_totalprice", "quantity"]]


QUERIES = (
    Query("Q1 summary", summary, ("l_returnflag", "l_linestatus")),
    Query("Q3 priority", priority, ("l_orderkey",)),
    Query("Q13 customers", distribution, ("orders",)),
    Query("Q18 large orders", large_orders, ("o_orderkey",)),
)
