"""The 22 queries step by step and column by column, as users write in notebooks.

Columns are set one by one, lookups are joins with an index, what a groupby returns is joined back by its
index, and rows are filtered when all columns are there. Numbers are computed in the middle.
"""

from __future__ import annotations

from typing import Any

from ..queries import Tables, day


def q1(tables: Tables) -> Any:
    """Compute the pricing summary report."""
    df = tables["lineitem"]
    df["disc_price"] = df["l_extendedprice"] * (1 - df["l_discount"])
    df["charge"] = df["disc_price"] * (1 + df["l_tax"])
    df = df[df["l_shipdate"] <= day("1998-09-02")]
    groups = df.groupby(["l_returnflag", "l_linestatus"])
    result = groups[["l_quantity", "l_extendedprice", "disc_price", "charge"]].sum()
    result.columns = ["sum_qty", "sum_base_price", "sum_disc_price", "sum_charge"]
    means = groups[["l_quantity", "l_extendedprice", "l_discount"]].mean()
    means.columns = ["avg_qty", "avg_price", "avg_disc"]
    result = result.join(means)
    result["count_order"] = groups.size()
    return result.reset_index().sort_values(["l_returnflag", "l_linestatus"])


def q2(tables: Tables) -> Any:
    """Compute the minimum cost supplier."""
    nation = tables["nation"].join(tables["region"].set_index("r_regionkey"), on="n_regionkey")
    supplier = tables["supplier"].join(nation.set_index("n_nationkey"), on="s_nationkey")
    df = tables["partsupp"].merge(supplier, left_on="ps_suppkey", right_on="s_suppkey")
    df = df[df["r_name"] == "EUROPE"]
    df = df.merge(tables["part"], left_on="ps_partkey", right_on="p_partkey")
    df = df[df["p_size"] == 15]
    df = df[df["p_type"].str.endswith("BRASS")]
    least = df.groupby("p_partkey")["ps_supplycost"].min().to_frame("least")
    df = df.merge(least, left_on="p_partkey", right_index=True)
    df = df[df["ps_supplycost"] == df["least"]]
    df = df[["s_acctbal", "s_name", "n_name", "p_partkey", "p_mfgr", "s_address", "s_phone", "s_comment"]]
    order = ["s_acctbal", "n_name", "s_name", "p_partkey"]
    return df.sort_values(order, ascending=[False, True, True, True]).head(100)


def q3(tables: Tables) -> Any:
    """Compute the shipping priority."""
    customer, orders, df = tables["customer"], tables["orders"], tables["lineitem"]
    customer = customer[customer["c_mktsegment"] == "BUILDING"]
    df["revenue"] = df["l_extendedprice"] * (1 - df["l_discount"])
    df = df[df["l_shipdate"] > day("1995-03-15")]
    revenue = df.groupby("l_orderkey")["revenue"].sum().to_frame()
    orders = orders.merge(customer, left_on="o_custkey", right_on="c_custkey")
    orders = orders.merge(revenue, left_on="o_orderkey", right_index=True)
    orders = orders[orders["o_orderdate"] < day("1995-03-15")]
    orders["l_orderkey"] = orders["o_orderkey"]
    result = orders[["l_orderkey", "revenue", "o_orderdate", "o_shippriority"]]
    return result.sort_values(["revenue", "o_orderdate"], ascending=[False, True]).head(10)


def q4(tables: Tables) -> Any:
    """Compute the order priority checking."""
    orders, lineitem = tables["orders"], tables["lineitem"]
    lineitem["late"] = lineitem["l_commitdate"] < lineitem["l_receiptdate"]
    late = lineitem[lineitem["late"]].groupby("l_orderkey").size().to_frame("late_items")
    orders = orders.merge(late, left_on="o_orderkey", right_index=True, how="left")
    orders = orders[~orders["late_items"].isnull()]
    orders = orders[orders["o_orderdate"] >= day("1993-07-01")]
    orders = orders[orders["o_orderdate"] < day("1993-10-01")]
    result = orders.groupby("o_orderpriority").size().to_frame("order_count")
    return result.reset_index().sort_values("o_orderpriority")


def q5(tables: Tables) -> Any:
    """Compute the local supplier volume."""
    nation = tables["nation"].join(tables["region"].set_index("r_regionkey"), on="n_regionkey")
    supplier = tables["supplier"].set_index("s_suppkey")[["s_nationkey"]]
    df = tables["lineitem"].merge(tables["orders"], left_on="l_orderkey", right_on="o_orderkey")
    df = df.merge(tables["customer"], left_on="o_custkey", right_on="c_custkey")
    df = df.join(supplier, on="l_suppkey")
    df = df[df["c_nationkey"] == df["s_nationkey"]]
    df = df.join(nation.set_index("n_nationkey"), on="s_nationkey")
    df["revenue"] = df["l_extendedprice"] * (1 - df["l_discount"])
    df = df[df["r_name"] == "ASIA"]
    df = df[(df["o_orderdate"] >= day("1994-01-01")) & (df["o_orderdate"] < day("1995-01-01"))]
    result = df.groupby("n_name")["revenue"].sum().reset_index()
    return result.sort_values("revenue", ascending=False)


def q6(tables: Tables) -> Any:
    """Compute the forecasting revenue change."""
    df = tables["lineitem"]
    df["revenue"] = df["l_extendedprice"] * df["l_discount"]
    df = df[df["l_shipdate"] >= day("1994-01-01")]
    df = df[df["l_shipdate"] < day("1995-01-01")]
    df = df[(df["l_discount"] >= 0.05) & (df["l_discount"] <= 0.07)]
    df = df[df["l_quantity"] < 24]
    return df["revenue"].sum().compute()


def q7(tables: Tables) -> Any:
    """Compute the volume shipping."""
    names = tables["nation"].set_index("n_nationkey")[["n_name"]]
    supplier = tables["supplier"].join(names, on="s_nationkey")
    supplier = supplier.rename(columns={"n_name": "supp_nation"})
    customer = tables["customer"].join(names, on="c_nationkey")
    customer = customer.rename(columns={"n_name": "cust_nation"})
    df = tables["lineitem"].merge(supplier, left_on="l_suppkey", right_on="s_suppkey")
    df = df.merge(tables["orders"], left_on="l_orderkey", right_on="o_orderkey")
    df = df.merge(customer, left_on="o_custkey", right_on="c_custkey")
    df["l_year"] = df["l_shipdate"].dt.year
    df["revenue"] = df["l_extendedprice"] * (1 - df["l_discount"])
    there = (df["supp_nation"] == "FRANCE") & (df["cust_nation"] == "GERMANY")
    back = (df["supp_nation"] == "GERMANY") & (df["cust_nation"] == "FRANCE")
    df = df[there | back]
    df = df[(df["l_shipdate"] >= day("1995-01-01")) & (df["l_shipdate"] <= day("1996-12-31"))]
    result = df.groupby(["supp_nation", "cust_nation", "l_year"])["revenue"].sum().reset_index()
    return result.sort_values(["supp_nation", "cust_nation", "l_year"])


def q8(tables: Tables) -> Any:
    """Compute the national market share."""
    nation = tables["nation"].join(tables["region"].set_index("r_regionkey"), on="n_regionkey")
    nation = nation.set_index("n_nationkey")
    customer = tables["customer"].join(nation[["r_name"]], on="c_nationkey")
    supplier = tables["supplier"].join(nation[["n_name"]], on="s_nationkey")
    df = tables["lineitem"].merge(tables["part"], left_on="l_partkey", right_on="p_partkey")
    df = df[df["p_type"] == "ECONOMY ANODIZED STEEL"]
    df = df.merge(tables["orders"], left_on="l_orderkey", right_on="o_orderkey")
    df = df.merge(customer, left_on="o_custkey", right_on="c_custkey")
    df = df.join(supplier.set_index("s_suppkey")[["n_name"]], on="l_suppkey")
    df = df[df["r_name"] == "AMERICA"]
    df = df[(df["o_orderdate"] >= day("1995-01-01")) & (df["o_orderdate"] <= day("1996-12-31"))]
    df["o_year"] = df["o_orderdate"].dt.year
    df["volume"] = df["l_extendedprice"] * (1 - df["l_discount"])
    total = df.groupby("o_year")["volume"].sum()
    brazil = df[df["n_name"] == "BRAZIL"].groupby("o_year")["volume"].sum()
    result = (brazil / total).to_frame("mkt_share").reset_index()
    return result.sort_values("o_year")


def q9(tables: Tables) -> Any:
    """Compute the product type profit measure."""
    names = tables["nation"].set_index("n_nationkey")[["n_name"]]
    supplier = tables["supplier"].join(names, on="s_nationkey").set_index("s_suppkey")
    part = tables["part"]
    part["green"] = part["p_name"].str.contains("green")
    df = tables["lineitem"].merge(part, left_on="l_partkey", right_on="p_partkey")
    df = df[df["green"]]
    df = df.merge(
        tables["partsupp"], left_on=["l_partkey", "l_suppkey"], right_on=["ps_partkey", "ps_suppkey"]
    )
    df = df.join(supplier[["n_name"]], on="l_suppkey")
    df = df.merge(tables["orders"], left_on="l_orderkey", right_on="o_orderkey")
    df["nation"] = df["n_name"]
    df["o_year"] = df["o_orderdate"].dt.year
    df["sum_profit"] = df["l_extendedprice"] * (1 - df["l_discount"]) - df["ps_supplycost"] * df["l_quantity"]
    result = df.groupby(["nation", "o_year"])["sum_profit"].sum().reset_index()
    return result.sort_values(["nation", "o_year"], ascending=[True, False])


def q10(tables: Tables) -> Any:
    """Compute the returned item reporting."""
    df = tables["lineitem"].merge(tables["orders"], left_on="l_orderkey", right_on="o_orderkey")
    df["revenue"] = df["l_extendedprice"] * (1 - df["l_discount"])
    df = df[df["l_returnflag"] == "R"]
    df = df[(df["o_orderdate"] >= day("1993-10-01")) & (df["o_orderdate"] < day("1994-01-01"))]
    revenue = df.groupby("o_custkey")["revenue"].sum().to_frame()
    customer = tables["customer"].join(tables["nation"].set_index("n_nationkey"), on="c_nationkey")
    result = customer.merge(revenue, left_on="c_custkey", right_index=True)
    result = result.sort_values("revenue", ascending=False).head(20)
    columns = ["c_custkey", "c_name", "revenue", "c_acctbal", "n_name", "c_address", "c_phone", "c_comment"]
    return result[columns]


def q11(tables: Tables) -> Any:
    """Compute the important stock identification."""
    supplier = tables["supplier"].join(tables["nation"].set_index("n_nationkey"), on="s_nationkey")
    df = tables["partsupp"].join(supplier.set_index("s_suppkey"), on="ps_suppkey")
    df["value"] = df["ps_supplycost"] * df["ps_availqty"]
    df = df[df["n_name"] == "GERMANY"]
    least = df["value"].sum().compute() * 0.0001 / tables.scale
    result = df.groupby("ps_partkey")["value"].sum().reset_index()
    result = result[result["value"] > least]
    return result.sort_values("value", ascending=False)


def q12(tables: Tables) -> Any:
    """Compute the shipping modes and order priority."""

    def is_high(row: Any) -> Any:
        return 1 if row["o_orderpriority"] == "1-URGENT" or row["o_orderpriority"] == "2-HIGH" else 0

    df = tables["lineitem"]
    df = df[(df["l_receiptdate"] >= day("1994-01-01")) & (df["l_receiptdate"] < day("1995-01-01"))]
    df = df[df["l_commitdate"] < df["l_receiptdate"]]
    df = df[df["l_shipdate"] < df["l_commitdate"]]
    df = df.merge(tables["orders"], left_on="l_orderkey", right_on="o_orderkey")
    df = df[(df["l_shipmode"] == "MAIL") | (df["l_shipmode"] == "SHIP")]
    df["high_line_count"] = df.apply(is_high, axis=1, meta=("high_line_count", "int64"))
    df["low_line_count"] = 1 - df["high_line_count"]
    result = df.groupby("l_shipmode")[["high_line_count", "low_line_count"]].sum().reset_index()
    return result.sort_values("l_shipmode")


def q13(tables: Tables) -> Any:
    """Compute the customer distribution."""
    customer, orders = tables["customer"], tables["orders"]
    orders["special"] = orders["o_comment"].str.contains("special.*requests")
    orders = orders[~orders["special"]]
    counts = orders.groupby("o_custkey").size().to_frame("c_count")
    customer = customer.merge(counts, left_on="c_custkey", right_index=True, how="left")
    customer["c_count"] = customer["c_count"].fillna(0).astype("int64")
    result = customer.groupby("c_count").size().to_frame("custdist").reset_index()
    return result.sort_values(["custdist", "c_count"], ascending=[False, False])


def q14(tables: Tables) -> Any:
    """Compute the promotion effect."""
    df = tables["lineitem"].merge(tables["part"], left_on="l_partkey", right_on="p_partkey")
    df["revenue"] = df["l_extendedprice"] * (1 - df["l_discount"])
    df["promo"] = df["p_type"].str.startswith("PROMO")
    df = df[(df["l_shipdate"] >= day("1995-09-01")) & (df["l_shipdate"] < day("1995-10-01"))]
    promo = df[df["promo"]]["revenue"].sum().compute()
    return 100 * promo / df["revenue"].sum().compute()


def q15(tables: Tables) -> Any:
    """Compute the top supplier."""
    df = tables["lineitem"]
    df["total_revenue"] = df["l_extendedprice"] * (1 - df["l_discount"])
    df = df[(df["l_shipdate"] >= day("1996-01-01")) & (df["l_shipdate"] < day("1996-04-01"))]
    revenue = df.groupby("l_suppkey")["total_revenue"].sum().to_frame().persist()
    best = revenue["total_revenue"].max().compute()
    result = tables["supplier"].merge(revenue, left_on="s_suppkey", right_index=True)
    result = result[result["total_revenue"] == best]
    result = result[["s_suppkey", "s_name", "s_address", "s_phone", "total_revenue"]]
    return result.sort_values("s_suppkey")


def q16(tables: Tables) -> Any:
    """Compute the parts and suppliers."""
    part, supplier = tables["part"], tables["supplier"]
    complaints = supplier[supplier["s_comment"].str.contains("Customer.*Complaints")]
    complaints = complaints["s_suppkey"].compute()
    df = tables["partsupp"].merge(part, left_on="ps_partkey", right_on="p_partkey")
    df = df[df["p_brand"] != "Brand#45"]
    df = df[~df["p_type"].str.startswith("MEDIUM POLISHED")]
    df = df[df["p_size"].isin([49, 14, 23, 45, 19, 3, 36, 9])]
    df = df[~df["ps_suppkey"].isin(complaints.to_numpy().tolist())]
    df = df.drop_duplicates(subset=["p_brand", "p_type", "p_size", "ps_suppkey"])
    result = df.groupby(["p_brand", "p_type", "p_size"]).size().to_frame("supplier_cnt").reset_index()
    order = ["supplier_cnt", "p_brand", "p_type", "p_size"]
    return result.sort_values(order, ascending=[False, True, True, True])


def q17(tables: Tables) -> Any:
    """Compute the small-quantity-order revenue."""
    df = tables["lineitem"]
    mean = df.groupby("l_partkey")["l_quantity"].mean().to_frame("mean_quantity")
    df = df.merge(mean, left_on="l_partkey", right_index=True)
    df = df[df["l_quantity"] < 0.2 * df["mean_quantity"]]
    df = df.merge(tables["part"], left_on="l_partkey", right_on="p_partkey")
    df = df[df["p_brand"] == "Brand#23"]
    df = df[df["p_container"] == "MED BOX"]
    return df["l_extendedprice"].sum() / 7.0


def q18(tables: Tables) -> Any:
    """Compute the large volume customer."""
    quantity = tables["lineitem"].groupby("l_orderkey")["l_quantity"].sum().to_frame("sum_quantity")
    df = tables["orders"].merge(quantity, left_on="o_orderkey", right_index=True)
    df = df.merge(tables["customer"], left_on="o_custkey", right_on="c_custkey")
    df = df[df["sum_quantity"] > 300]
    df = df[["c_name", "c_custkey", "o_orderkey", "o_orderdate", "o_totalprice", "sum_quantity"]]
    return df.sort_values(["o_totalprice", "o_orderdate"], ascending=[False, True]).head(100)


def q19(tables: Tables) -> Any:
    """Compute the discounted revenue."""
    df = tables["lineitem"].merge(tables["part"], left_on="l_partkey", right_on="p_partkey")
    df["revenue"] = df["l_extendedprice"] * (1 - df["l_discount"])
    df = df[df["l_shipmode"].isin(["AIR", "AIR REG"])]
    df = df[df["l_shipinstruct"] == "DELIVER IN PERSON"]
    small = df[df["p_brand"] == "Brand#12"]
    small = small[small["p_container"].isin(["SM CASE", "SM BOX", "SM PACK", "SM PKG"])]
    small = small[(small["l_quantity"] >= 1) & (small["l_quantity"] <= 11)]
    small = small[(small["p_size"] >= 1) & (small["p_size"] <= 5)]
    medium = df[df["p_brand"] == "Brand#23"]
    medium = medium[medium["p_container"].isin(["MED BAG", "MED BOX", "MED PKG", "MED PACK"])]
    medium = medium[(medium["l_quantity"] >= 10) & (medium["l_quantity"] <= 20)]
    medium = medium[(medium["p_size"] >= 1) & (medium["p_size"] <= 10)]
    large = df[df["p_brand"] == "Brand#34"]
    large = large[large["p_container"].isin(["LG CASE", "LG BOX", "LG PACK", "LG PKG"])]
    large = large[(large["l_quantity"] >= 20) & (large["l_quantity"] <= 30)]
    large = large[(large["p_size"] >= 1) & (large["p_size"] <= 15)]
    return small["revenue"].sum() + medium["revenue"].sum() + large["revenue"].sum()


def q20(tables: Tables) -> Any:
    """Compute the potential part promotion."""
    part, lineitem, partsupp = tables["part"], tables["lineitem"], tables["partsupp"]
    forest = part[part["p_name"].str.startswith("forest")].set_index("p_partkey")
    lineitem = lineitem[lineitem["l_shipdate"] >= day("1994-01-01")]
    lineitem = lineitem[lineitem["l_shipdate"] < day("1995-01-01")]
    shipped = lineitem.groupby(["l_partkey", "l_suppkey"])["l_quantity"].sum().reset_index()
    partsupp = partsupp.merge(forest[["p_name"]], left_on="ps_partkey", right_index=True)
    partsupp = partsupp.merge(
        shipped, left_on=["ps_partkey", "ps_suppkey"], right_on=["l_partkey", "l_suppkey"], how="left"
    )
    partsupp["least"] = 0.5 * partsupp["l_quantity"]
    partsupp = partsupp[partsupp["ps_availqty"] > partsupp["least"]]
    wanted = partsupp.groupby("ps_suppkey").size().to_frame("parts")
    result = tables["supplier"].merge(wanted, left_on="s_suppkey", right_index=True)
    result = result.join(tables["nation"].set_index("n_nationkey"), on="s_nationkey")
    result = result[result["n_name"] == "CANADA"]
    return result[["s_name", "s_address"]].sort_values("s_name")


def q21(tables: Tables) -> Any:
    """Compute the suppliers who kept orders waiting."""
    df, orders = tables["lineitem"], tables["orders"]
    df["late"] = df["l_receiptdate"] > df["l_commitdate"]
    late = df[df["late"]]
    first, last = df.groupby("l_orderkey")["l_suppkey"].min(), df.groupby("l_orderkey")["l_suppkey"].max()
    late = late.merge(first.to_frame("first"), left_on="l_orderkey", right_index=True)
    late = late.merge(last.to_frame("last"), left_on="l_orderkey", right_index=True)
    late = late[late["first"] != late["last"]]
    suppliers = late.groupby("l_orderkey")["l_suppkey"].nunique().to_frame("late_suppliers")
    late = late.merge(suppliers, left_on="l_orderkey", right_index=True)
    late = late[late["late_suppliers"] == 1]
    late = late.merge(orders[["o_orderkey", "o_orderstatus"]], left_on="l_orderkey", right_on="o_orderkey")
    late = late[late["o_orderstatus"] == "F"]
    supplier = tables["supplier"].join(tables["nation"].set_index("n_nationkey"), on="s_nationkey")
    late = late.merge(supplier, left_on="l_suppkey", right_on="s_suppkey")
    late = late[late["n_name"] == "SAUDI ARABIA"]
    result = late.groupby("s_name").size().to_frame("numwait").reset_index()
    return result.sort_values(["numwait", "s_name"], ascending=[False, True]).head(100)


def q22(tables: Tables) -> Any:
    """Compute the global sales opportunity."""
    df = tables["customer"]
    df["cntrycode"] = df["c_phone"].str.slice(0, 2)
    df = df[df["cntrycode"].isin(["13", "31", "23", "29", "30", "18", "17"])]
    mean = df[df["c_acctbal"] > 0]["c_acctbal"].mean().compute()
    df = df[df["c_acctbal"] > mean]
    counts = tables["orders"].groupby("o_custkey").size().to_frame("orders")
    df = df.merge(counts, left_on="c_custkey", right_index=True, how="left")
    df = df[df["orders"].isnull()]
    groups = df.groupby("cntrycode")
    result = groups.size().to_frame("numcust")
    result["totacctbal"] = groups["c_acctbal"].sum()
    return result.reset_index().sort_values("cntrycode")
