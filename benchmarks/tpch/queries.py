"""The 22 queries of TPC-H in dask.dataframe, with the parameters that the specification validates with.

They are written as a user of Dask would write them: filters first, small tables joined before large ones,
no hint for any shuffle, nothing that differs between pandas and cudf. A result of many rows of which only
some are asked for is cut on the cluster (``sort_values(...).head(n)``). Whole results are small, so they are
sorted where they are collected, as Dask's best practices say: ``QUERIES[n].order`` has the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pandas as pd

day = pd.Timestamp


class Tables(Protocol):
    """The tables of one scale factor, read lazily by name."""

    scale: float

    def __getitem__(self, name: str) -> Any:
        """Return the dask.dataframe of a table."""


@dataclass(frozen=True)
class Query:
    """A query: how it is built, the order of its result, and how many rows are asked for.

    ``order`` maps columns to whether they ascend. A result without an order is one number, of that name.
    """

    number: int
    build: Callable[[Tables], Any]
    order: dict[str, bool]
    limit: int | None
    scalar: str | None


QUERIES: dict[int, Query] = {}


def query(
    order: Sequence[str] = (), limit: int | None = None, scalar: str | None = None
) -> Callable[[Callable[[Tables], Any]], Callable[[Tables], Any]]:
    """Register a query; a column of ``order`` that begins with ``-`` descends."""

    def register(build: Callable[[Tables], Any]) -> Callable[[Tables], Any]:
        number = int(build.__name__.removeprefix("q"))
        columns = {name.removeprefix("-"): not name.startswith("-") for name in order}
        QUERIES[number] = Query(number, build, columns, limit, scalar)
        return build

    return register


def top(frame: Any, number: int) -> Any:
    """Return the first rows of a frame in the order of a query."""
    columns = QUERIES[number].order
    ordered = frame.sort_values(list(columns), ascending=list(columns.values()))
    return ordered.head(QUERIES[number].limit, compute=False)


def discounted(lineitem: Any) -> Any:
    """Return what was paid for each line item, without tax."""
    return lineitem.l_extendedprice * (1 - lineitem.l_discount)


@query(order=["l_returnflag", "l_linestatus"])
def q1(tables: Tables) -> Any:
    """Compute the pricing summary report."""
    lineitem = tables["lineitem"]
    shipped = lineitem[lineitem.l_shipdate <= day("1998-09-02")]
    price = discounted(shipped)
    shipped = shipped.assign(
        sum_qty=shipped.l_quantity,
        sum_base_price=shipped.l_extendedprice,
        sum_disc_price=price,
        sum_charge=price * (1 + shipped.l_tax),
        avg_qty=shipped.l_quantity,
        avg_price=shipped.l_extendedprice,
        avg_disc=shipped.l_discount,
        count_order=shipped.l_orderkey,
    )
    wanted = {
        "sum_qty": "sum",
        "sum_base_price": "sum",
        "sum_disc_price": "sum",
        "sum_charge": "sum",
        "avg_qty": "mean",
        "avg_price": "mean",
        "avg_disc": "mean",
        "count_order": "count",
    }
    return shipped.groupby(["l_returnflag", "l_linestatus"]).agg(wanted).reset_index()


@query(order=["-s_acctbal", "n_name", "s_name", "p_partkey"], limit=100)
def q2(tables: Tables) -> Any:
    """Compute the minimum cost supplier."""
    part, region = tables["part"], tables["region"]
    part = part[(part.p_size == 15) & part.p_type.str.endswith("BRASS")]
    offers = (
        region[region.r_name == "EUROPE"]
        .merge(tables["nation"], left_on="r_regionkey", right_on="n_regionkey")
        .merge(tables["supplier"], left_on="n_nationkey", right_on="s_nationkey")
        .merge(tables["partsupp"], left_on="s_suppkey", right_on="ps_suppkey")
        .merge(part, left_on="ps_partkey", right_on="p_partkey")
    )
    least = offers.groupby("p_partkey").agg({"ps_supplycost": "min"}).reset_index()
    cheapest = offers.merge(least, on=["p_partkey", "ps_supplycost"])
    columns = ["s_acctbal", "s_name", "n_name", "p_partkey", "p_mfgr", "s_address", "s_phone", "s_comment"]
    return top(cheapest[columns], 2)


@query(order=["-revenue", "o_orderdate"], limit=10)
def q3(tables: Tables) -> Any:
    """Compute the shipping priority."""
    customer, orders, lineitem = tables["customer"], tables["orders"], tables["lineitem"]
    customer = customer[customer.c_mktsegment == "BUILDING"]
    orders = orders[orders.o_orderdate < day("1995-03-15")]
    lineitem = lineitem[lineitem.l_shipdate > day("1995-03-15")]
    sold = customer.merge(orders, left_on="c_custkey", right_on="o_custkey").merge(
        lineitem, left_on="o_orderkey", right_on="l_orderkey"
    )
    sold = sold.assign(revenue=discounted(sold))
    by_order = sold.groupby(["l_orderkey", "o_orderdate", "o_shippriority"]).agg({"revenue": "sum"})
    return top(by_order.reset_index()[["l_orderkey", "revenue", "o_orderdate", "o_shippriority"]], 3)


@query(order=["o_orderpriority"])
def q4(tables: Tables) -> Any:
    """Compute the order priority checking."""
    orders, lineitem = tables["orders"], tables["lineitem"]
    orders = orders[(orders.o_orderdate >= day("1993-07-01")) & (orders.o_orderdate < day("1993-10-01"))]
    late = lineitem[lineitem.l_commitdate < lineitem.l_receiptdate]
    found = orders.merge(late, how="leftsemi", left_on="o_orderkey", right_on="l_orderkey")
    counts = found.groupby("o_orderpriority").agg({"o_orderkey": "count"}).reset_index()
    return counts.rename(columns={"o_orderkey": "order_count"})


@query(order=["-revenue"])
def q5(tables: Tables) -> Any:
    """Compute the local supplier volume."""
    region, orders = tables["region"], tables["orders"]
    orders = orders[(orders.o_orderdate >= day("1994-01-01")) & (orders.o_orderdate < day("1995-01-01"))]
    sold = (
        region[region.r_name == "ASIA"]
        .merge(tables["nation"], left_on="r_regionkey", right_on="n_regionkey")
        .merge(tables["customer"], left_on="n_nationkey", right_on="c_nationkey")
        .merge(orders, left_on="c_custkey", right_on="o_custkey")
        .merge(tables["lineitem"], left_on="o_orderkey", right_on="l_orderkey")
        .merge(
            tables["supplier"], left_on=["l_suppkey", "n_nationkey"], right_on=["s_suppkey", "s_nationkey"]
        )
    )
    sold = sold.assign(revenue=discounted(sold))
    return sold.groupby("n_name").agg({"revenue": "sum"}).reset_index()


@query(scalar="revenue")
def q6(tables: Tables) -> Any:
    """Compute the forecasting revenue change."""
    lineitem = tables["lineitem"]
    kept = lineitem[
        (lineitem.l_shipdate >= day("1994-01-01"))
        & (lineitem.l_shipdate < day("1995-01-01"))
        & (lineitem.l_discount >= 0.05)
        & (lineitem.l_discount <= 0.07)
        & (lineitem.l_quantity < 24)
    ]
    return (kept.l_extendedprice * kept.l_discount).sum()


@query(order=["supp_nation", "cust_nation", "l_year"])
def q7(tables: Tables) -> Any:
    """Compute the volume shipping."""
    nation, lineitem = tables["nation"], tables["lineitem"]
    nation = nation[nation.n_name.isin(["FRANCE", "GERMANY"])][["n_nationkey", "n_name"]]
    lineitem = lineitem[
        (lineitem.l_shipdate >= day("1995-01-01")) & (lineitem.l_shipdate <= day("1996-12-31"))
    ]
    suppliers = (
        tables["supplier"]
        .merge(nation, left_on="s_nationkey", right_on="n_nationkey")
        .rename(columns={"n_name": "supp_nation"})[["s_suppkey", "supp_nation"]]
    )
    bought = (
        tables["customer"]
        .merge(nation, left_on="c_nationkey", right_on="n_nationkey")
        .rename(columns={"n_name": "cust_nation"})
        .merge(tables["orders"], left_on="c_custkey", right_on="o_custkey")[["o_orderkey", "cust_nation"]]
    )
    shipped = suppliers.merge(lineitem, left_on="s_suppkey", right_on="l_suppkey").merge(
        bought, left_on="l_orderkey", right_on="o_orderkey"
    )
    shipped = shipped[shipped.supp_nation != shipped.cust_nation]
    shipped = shipped.assign(l_year=shipped.l_shipdate.dt.year, revenue=discounted(shipped))
    return shipped.groupby(["supp_nation", "cust_nation", "l_year"]).agg({"revenue": "sum"}).reset_index()


@query(order=["o_year"])
def q8(tables: Tables) -> Any:
    """Compute the national market share."""
    part, region, nation, orders = (tables[name] for name in ("part", "region", "nation", "orders"))
    part = part[part.p_type == "ECONOMY ANODIZED STEEL"]
    orders = orders[(orders.o_orderdate >= day("1995-01-01")) & (orders.o_orderdate <= day("1996-12-31"))]
    customers = (
        region[region.r_name == "AMERICA"]
        .merge(nation, left_on="r_regionkey", right_on="n_regionkey")
        .merge(tables["customer"], left_on="n_nationkey", right_on="c_nationkey")[["c_custkey"]]
    )
    suppliers = nation.merge(tables["supplier"], left_on="n_nationkey", right_on="s_nationkey")
    sold = (
        part.merge(tables["lineitem"], left_on="p_partkey", right_on="l_partkey")
        .merge(orders, left_on="l_orderkey", right_on="o_orderkey")
        .merge(customers, left_on="o_custkey", right_on="c_custkey")
        .merge(suppliers[["s_suppkey", "n_name"]], left_on="l_suppkey", right_on="s_suppkey")
    )
    volume = discounted(sold)
    sold = sold.assign(
        o_year=sold.o_orderdate.dt.year, volume=volume, brazil=volume.where(sold.n_name == "BRAZIL", 0.0)
    )
    by_year = sold.groupby("o_year").agg({"brazil": "sum", "volume": "sum"}).reset_index()
    return by_year.assign(mkt_share=by_year.brazil / by_year.volume)[["o_year", "mkt_share"]]


@query(order=["nation", "-o_year"])
def q9(tables: Tables) -> Any:
    """Compute the product type profit measure."""
    part = tables["part"]
    part = part[part.p_name.str.contains("green")][["p_partkey"]]
    suppliers = tables["nation"].merge(tables["supplier"], left_on="n_nationkey", right_on="s_nationkey")
    sold = (
        part.merge(tables["partsupp"], left_on="p_partkey", right_on="ps_partkey")
        .merge(tables["lineitem"], left_on=["ps_partkey", "ps_suppkey"], right_on=["l_partkey", "l_suppkey"])
        .merge(suppliers[["s_suppkey", "n_name"]], left_on="l_suppkey", right_on="s_suppkey")
        .merge(tables["orders"], left_on="l_orderkey", right_on="o_orderkey")
    )
    sold = sold.assign(
        o_year=sold.o_orderdate.dt.year, sum_profit=discounted(sold) - sold.ps_supplycost * sold.l_quantity
    ).rename(columns={"n_name": "nation"})
    return sold.groupby(["nation", "o_year"]).agg({"sum_profit": "sum"}).reset_index()


@query(order=["-revenue"], limit=20)
def q10(tables: Tables) -> Any:
    """Compute the returned item reporting."""
    orders, lineitem = tables["orders"], tables["lineitem"]
    orders = orders[(orders.o_orderdate >= day("1993-10-01")) & (orders.o_orderdate < day("1994-01-01"))]
    returned = (
        tables["customer"]
        .merge(orders, left_on="c_custkey", right_on="o_custkey")
        .merge(lineitem[lineitem.l_returnflag == "R"], left_on="o_orderkey", right_on="l_orderkey")
        .merge(tables["nation"], left_on="c_nationkey", right_on="n_nationkey")
    )
    returned = returned.assign(revenue=discounted(returned))
    keys = ["c_custkey", "c_name", "c_acctbal", "c_phone", "n_name", "c_address", "c_comment"]
    by_customer = returned.groupby(keys).agg({"revenue": "sum"}).reset_index()
    columns = ["c_custkey", "c_name", "revenue", "c_acctbal", "n_name", "c_address", "c_phone", "c_comment"]
    return top(by_customer[columns], 10)


@query(order=["-value"])
def q11(tables: Tables) -> Any:
    """Compute the important stock identification."""
    nation, partsupp = tables["nation"], tables["partsupp"]
    stock = (
        nation[nation.n_name == "GERMANY"]
        .merge(tables["supplier"], left_on="n_nationkey", right_on="s_nationkey")
        .merge(partsupp, left_on="s_suppkey", right_on="ps_suppkey")
    )
    stock = stock.assign(value=stock.ps_supplycost * stock.ps_availqty)
    by_part = stock.groupby("ps_partkey").agg({"value": "sum"}).reset_index()
    return by_part[by_part.value > stock.value.sum() * (0.0001 / tables.scale)]


@query(order=["l_shipmode"])
def q12(tables: Tables) -> Any:
    """Compute the shipping modes and order priority."""
    lineitem = tables["lineitem"]
    late = lineitem[
        lineitem.l_shipmode.isin(["MAIL", "SHIP"])
        & (lineitem.l_commitdate < lineitem.l_receiptdate)
        & (lineitem.l_shipdate < lineitem.l_commitdate)
        & (lineitem.l_receiptdate >= day("1994-01-01"))
        & (lineitem.l_receiptdate < day("1995-01-01"))
    ]
    found = late.merge(tables["orders"], left_on="l_orderkey", right_on="o_orderkey")
    high = found.o_orderpriority.isin(["1-URGENT", "2-HIGH"]).astype("int64")
    found = found.assign(high_line_count=high, low_line_count=1 - high)
    counts = found.groupby("l_shipmode").agg({"high_line_count": "sum", "low_line_count": "sum"})
    return counts.reset_index()


@query(order=["-custdist", "-c_count"])
def q13(tables: Tables) -> Any:
    """Compute the customer distribution."""
    orders = tables["orders"]
    orders = orders[~orders.o_comment.str.contains("special.*requests")]
    found = tables["customer"].merge(orders, how="left", left_on="c_custkey", right_on="o_custkey")
    counts = found.groupby("c_custkey").agg({"o_orderkey": "count"}).reset_index()
    counts = counts.rename(columns={"o_orderkey": "c_count", "c_custkey": "custdist"})
    return counts.groupby("c_count").agg({"custdist": "count"}).reset_index()


@query(scalar="promo_revenue")
def q14(tables: Tables) -> Any:
    """Compute the promotion effect."""
    lineitem = tables["lineitem"]
    sold = lineitem[
        (lineitem.l_shipdate >= day("1995-09-01")) & (lineitem.l_shipdate < day("1995-10-01"))
    ].merge(tables["part"], left_on="l_partkey", right_on="p_partkey")
    revenue = discounted(sold)
    promoted = revenue.where(sold.p_type.str.startswith("PROMO"), 0.0)
    return 100 * promoted.sum() / revenue.sum()


@query(order=["s_suppkey"])
def q15(tables: Tables) -> Any:
    """Compute the top supplier."""
    lineitem = tables["lineitem"]
    shipped = lineitem[(lineitem.l_shipdate >= day("1996-01-01")) & (lineitem.l_shipdate < day("1996-04-01"))]
    shipped = shipped.assign(total_revenue=discounted(shipped))
    revenue = shipped.groupby("l_suppkey").agg({"total_revenue": "sum"}).reset_index()
    best = revenue[revenue.total_revenue == revenue.total_revenue.max()]
    suppliers = tables["supplier"].merge(best, left_on="s_suppkey", right_on="l_suppkey")
    return suppliers[["s_suppkey", "s_name", "s_address", "s_phone", "total_revenue"]]


@query(order=["-supplier_cnt", "p_brand", "p_type", "p_size"])
def q16(tables: Tables) -> Any:
    """Compute the parts and suppliers."""
    part, supplier = tables["part"], tables["supplier"]
    part = part[
        (part.p_brand != "Brand#45")
        & ~part.p_type.str.startswith("MEDIUM POLISHED")
        & part.p_size.isin([49, 14, 23, 45, 19, 3, 36, 9])
    ]
    trusted = supplier[~supplier.s_comment.str.contains("Customer.*Complaints")]
    offers = part.merge(tables["partsupp"], left_on="p_partkey", right_on="ps_partkey").merge(
        trusted[["s_suppkey"]], how="leftsemi", left_on="ps_suppkey", right_on="s_suppkey"
    )
    keys = ["p_brand", "p_type", "p_size"]
    distinct = offers[[*keys, "ps_suppkey"]].drop_duplicates()
    counts = distinct.groupby(keys).agg({"ps_suppkey": "count"}).reset_index()
    return counts.rename(columns={"ps_suppkey": "supplier_cnt"})


@query(scalar="avg_yearly")
def q17(tables: Tables) -> Any:
    """Compute the small-quantity-order revenue."""
    part = tables["part"]
    part = part[(part.p_brand == "Brand#23") & (part.p_container == "MED BOX")][["p_partkey"]]
    sold = part.merge(tables["lineitem"], left_on="p_partkey", right_on="l_partkey")
    mean = sold.groupby("p_partkey").agg({"l_quantity": "mean"}).reset_index()
    sold = sold.merge(mean.rename(columns={"l_quantity": "mean_quantity"}), on="p_partkey")
    small = sold[sold.l_quantity < 0.2 * sold.mean_quantity]
    return small.l_extendedprice.sum() / 7.0


@query(order=["-o_totalprice", "o_orderdate"], limit=100)
def q18(tables: Tables) -> Any:
    """Compute the large volume customer."""
    lineitem = tables["lineitem"]
    quantities = lineitem.groupby("l_orderkey").agg({"l_quantity": "sum"}).reset_index()
    large = quantities[quantities.l_quantity > 300].rename(columns={"l_quantity": "sum_quantity"})
    found = (
        tables["orders"]
        .merge(large, left_on="o_orderkey", right_on="l_orderkey")
        .merge(tables["customer"], left_on="o_custkey", right_on="c_custkey")
    )
    # The quantities of an order have been summed up already, and it has one customer.
    columns = ["c_name", "c_custkey", "o_orderkey", "o_orderdate", "o_totalprice", "sum_quantity"]
    return top(found[columns], 18)


@query(scalar="revenue")
def q19(tables: Tables) -> Any:
    """Compute the discounted revenue."""
    lineitem = tables["lineitem"]
    delivered = lineitem[
        lineitem.l_shipmode.isin(["AIR", "AIR REG"]) & (lineitem.l_shipinstruct == "DELIVER IN PERSON")
    ]
    sold = delivered.merge(tables["part"], left_on="l_partkey", right_on="p_partkey")

    def offer(brand: str, size: int, containers: str, least: int) -> Any:
        return (
            (sold.p_brand == brand)
            & sold.p_container.isin([f"{size_of} {kind}" for size_of, kind in _pairs(containers)])
            & (sold.l_quantity >= least)
            & (sold.l_quantity <= least + 10)
            & (sold.p_size >= 1)
            & (sold.p_size <= size)
        )

    kept = sold[
        offer("Brand#12", 5, "SM: CASE BOX PACK PKG", 1)
        | offer("Brand#23", 10, "MED: BAG BOX PKG PACK", 10)
        | offer("Brand#34", 15, "LG: CASE BOX PACK PKG", 20)
    ]
    return discounted(kept).sum()


def _pairs(containers: str) -> list[tuple[str, str]]:
    size, _, kinds = containers.partition(": ")
    return [(size, kind) for kind in kinds.split()]


@query(order=["s_name"])
def q20(tables: Tables) -> Any:
    """Compute the potential part promotion."""
    part, lineitem, nation = tables["part"], tables["lineitem"], tables["nation"]
    forest = part[part.p_name.str.startswith("forest")][["p_partkey"]]
    shipped = lineitem[(lineitem.l_shipdate >= day("1994-01-01")) & (lineitem.l_shipdate < day("1995-01-01"))]
    stock = tables["partsupp"].merge(forest, how="leftsemi", left_on="ps_partkey", right_on="p_partkey")
    shipped = shipped.groupby(["l_partkey", "l_suppkey"]).agg({"l_quantity": "sum"}).reset_index()
    stock = stock.merge(shipped, left_on=["ps_partkey", "ps_suppkey"], right_on=["l_partkey", "l_suppkey"])
    plenty = stock[stock.ps_availqty > 0.5 * stock.l_quantity][["ps_suppkey"]]
    suppliers = (
        tables["supplier"]
        .merge(nation[nation.n_name == "CANADA"], left_on="s_nationkey", right_on="n_nationkey")
        .merge(plenty, how="leftsemi", left_on="s_suppkey", right_on="ps_suppkey")
    )
    return suppliers[["s_name", "s_address"]]


@query(order=["-numwait", "s_name"], limit=100)
def q21(tables: Tables) -> Any:
    """Compute the suppliers who kept orders waiting."""
    lineitem, orders, nation = tables["lineitem"], tables["orders"], tables["nation"]
    late = lineitem[lineitem.l_receiptdate > lineitem.l_commitdate][["l_orderkey", "l_suppkey"]]

    def suppliers_of_orders(items: Any) -> Any:
        pairs = items[["l_orderkey", "l_suppkey"]].drop_duplicates()
        counts = pairs.groupby("l_orderkey").agg({"l_suppkey": "count"}).reset_index()
        return counts.rename(columns={"l_suppkey": "suppliers"})

    of_all, of_late = suppliers_of_orders(lineitem), suppliers_of_orders(late)
    suppliers = tables["supplier"].merge(
        nation[nation.n_name == "SAUDI ARABIA"], left_on="s_nationkey", right_on="n_nationkey"
    )
    waited = (
        late.merge(suppliers[["s_suppkey", "s_name"]], left_on="l_suppkey", right_on="s_suppkey")
        .merge(orders[orders.o_orderstatus == "F"], left_on="l_orderkey", right_on="o_orderkey")
        .merge(of_all[of_all.suppliers > 1], how="leftsemi", on="l_orderkey")
        .merge(of_late[of_late.suppliers == 1], how="leftsemi", on="l_orderkey")
    )
    counts = waited.groupby("s_name").agg({"l_orderkey": "count"}).reset_index()
    return top(counts.rename(columns={"l_orderkey": "numwait"}), 21)


@query(order=["cntrycode"])
def q22(tables: Tables) -> Any:
    """Compute the global sales opportunity."""
    customer, orders = tables["customer"], tables["orders"]
    customer = customer.assign(cntrycode=customer.c_phone.str.slice(0, 2))
    customer = customer[customer.cntrycode.isin(["13", "31", "23", "29", "30", "18", "17"])]
    mean = customer[customer.c_acctbal > 0].c_acctbal.mean()
    rich = customer[customer.c_acctbal > mean]
    buyers = orders[["o_custkey"]].drop_duplicates()
    buyers = buyers.assign(orders=1)
    found = rich.merge(buyers, how="left", left_on="c_custkey", right_on="o_custkey")
    idle = found[found.orders.isnull()]
    idle = idle.assign(numcust=idle.c_custkey, totacctbal=idle.c_acctbal)
    return idle.groupby("cntrycode").agg({"numcust": "count", "totacctbal": "sum"}).reset_index()
