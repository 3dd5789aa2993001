"""Define the queries of the bench: four shapes of TPC-H, over the tables that the bench makes.

They are written as a user of Dask would write them, without a hint for any shuffle. All queries of TPC-H, on
its own tables, are in ``benchmarks/tpch``; the figures of these can not be compared with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dask_gpurt.bench.tables import Tables

day = pd.Timestamp


@dataclass(frozen=True)
class Query:
    """Define a query of the bench.

    Parameters
    ----------
    name
        With the number of the query of TPC-H that it is like.
    build
        Makes it of the tables.
    order
        The columns that tell the rows of the result apart.
    """

    name: str
    build: Callable[[Tables], Any]
    order: tuple[str, ...]

    def collected(self, result: Any) -> pd.DataFrame:
        """Return a result as a frame of pandas, its rows in order."""
        frame: pd.DataFrame = result if isinstance(result, pd.DataFrame) else result.to_pandas()
        return frame.sort_values(list(self.order), ignore_index=True)


def revenue(items: Any) -> Any:
    """Return what was paid for each item, without tax, in hundredths of a cent."""
    return items.l_extendedprice * (100 - items.l_discount)


def summary(tables: Tables) -> Any:
    """Sum up all items in four groups: reading and computing, next to nothing to move."""
    items = tables["lineitem"]
    items = items[items.l_shipdate <= day("1998-09-02")]
    paid = revenue(items)
    items = items.assign(paid=paid, charged=paid * (100 + items.l_tax), count=1)
    sums = {name: "sum" for name in ("l_quantity", "l_extendedprice", "paid", "charged", "count")}
    return items.groupby(["l_returnflag", "l_linestatus"]).agg(sums).reset_index()


def priority(tables: Tables) -> Any:
    """Find the ten open orders of most revenue: two joins, and a groupby of many groups."""
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
    """Count customers by how many orders they have: a join that keeps all, and two groupbys."""
    found = tables["customer"].merge(tables["orders"], how="left", left_on="c_custkey", right_on="o_custkey")
    counts = found.groupby("c_custkey").agg({"o_orderkey": "count"}).reset_index()
    counts = counts.rename(columns={"o_orderkey": "orders", "c_custkey": "customers"})
    return counts.groupby("orders").agg({"customers": "count"}).reset_index()


def large_orders(tables: Tables) -> Any:
    """Find the orders of most items: a groupby by order, and joins of what is left with larger tables."""
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
