"""Define the queries of the bench: four modelled on TPC-H, over generated tables.

They are written as a user of Dask would write them, without hints for shuffles. ``benchmarks/tpch`` has all
queries of TPC-H on its own tables; its figures cannot be compared with those of these queries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dask_gpurt.tools.bench.tables import Tables

day = pd.Timestamp


@dataclass(frozen=True)
class Query:
    """Define a query of the bench.

    Parameters
    ----------
    name
        Its name, with the number of the TPC-H query that it is modelled on.
    build
        Builds it from the tables.
    order
        The columns that identify a row of the result.
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
    items = items[items.l_shipdate <= day("1998-09-02")]
    paid = revenue(items)
    items = items.assign(paid=paid, charged=paid * (100 + items.l_tax), count=1)
    sums = {name: "sum" for name in ("l_quantity", "l_extendedprice", "paid", "charged", "count")}
    return items.groupby(["l_returnflag", "l_linestatus"]).agg(sums).reset_index()


def priority(tables: Tables) -> Any:
    """Find the ten open orders with the highest revenue: two joins, and a groupby with many groups."""
    customer, orders, items = (tables[name] for name in ("customer", "orders", "lineitem"))
    found = (
        customer[customer.c_mktsegment == "BUILDING"]
        .merge(orders[orders.o_orderdate < day("1995-03-15")], left_on="c_custkey", right_on="o_custkey")
        .merge(items[items.l_shipdate > day("1995-03-15")], left_on="o_orderkey", right_on="l_orderkey")
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
