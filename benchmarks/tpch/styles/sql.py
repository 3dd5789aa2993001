"""The 22 queries clause by clause, as users write who translate SQL.

FROM becomes a chain of ``merge``, WHERE comes after it (``query``, masks for strings), SELECT is ``assign``
and ``rename``, GROUP BY is followed by HAVING, and ORDER BY and LIMIT are last. IN and EXISTS are joins with
distinct keys, NOT EXISTS is a left join whose other side is null.
"""

from __future__ import annotations

from typing import Any

from ..queries import Tables, day


def between(frame: Any, column: str, begin: str, end: str) -> Any:
    """Keep rows as ``column >= begin and column < end`` does."""
    times = {"begin": day(begin), "end": day(end)}
    return frame.query(f"{column} >= @begin and {column} < @end", local_dict=times)


def semi(frame: Any, other: Any, left_on: str, right_on: str) -> Any:
    """Keep rows as ``left_on in (select right_on from other)`` does."""
    keys = other[[right_on]].rename(columns={right_on: "semi_key"}).drop_duplicates()
    return frame.merge(keys, left_on=left_on, right_on="semi_key").drop(columns=["semi_key"])


def anti(frame: Any, other: Any, left_on: str, right_on: str) -> Any:
    """Keep rows as ``left_on not in (select right_on from other)`` does."""
    keys = other[[right_on]].rename(columns={right_on: "anti_key"}).drop_duplicates()
    joined = frame.merge(keys, how="left", left_on=left_on, right_on="anti_key")
    return joined[joined["anti_key"].isnull()].drop(columns=["anti_key"])


def nations(tables: Tables, alias: str) -> Any:
    """Return the nations under an alias."""
    names = {
        "n_nationkey": f"{alias}_nationkey",
        "n_name": f"{alias}_name",
        "n_regionkey": f"{alias}_regionkey",
    }
    return tables["nation"].rename(columns=names)[list(names.values())]


def q1(tables: Tables) -> Any:
    """Compute the pricing summary report."""
    rows = tables["lineitem"].query("l_shipdate <= @last", local_dict={"last": day("1998-09-02")})
    rows = rows.assign(
        sum_qty=rows["l_quantity"],
        sum_base_price=rows["l_extendedprice"],
        sum_disc_price=rows["l_extendedprice"] * (1 - rows["l_discount"]),
        sum_charge=rows["l_extendedprice"] * (1 - rows["l_discount"]) * (1 + rows["l_tax"]),
        avg_qty=rows["l_quantity"],
        avg_price=rows["l_extendedprice"],
        avg_disc=rows["l_discount"],
        count_order=1,
    )
    selected = {
        "sum_qty": "sum",
        "sum_base_price": "sum",
        "sum_disc_price": "sum",
        "sum_charge": "sum",
        "avg_qty": "mean",
        "avg_price": "mean",
        "avg_disc": "mean",
        "count_order": "count",
    }
    result = rows.groupby(["l_returnflag", "l_linestatus"]).agg(selected).reset_index()
    return result.sort_values(by=["l_returnflag", "l_linestatus"])


def q2(tables: Tables) -> Any:
    """Compute the minimum cost supplier."""
    # The subquery and the query around it have the same tables.
    european = (
        tables["partsupp"]
        .merge(tables["supplier"], left_on="ps_suppkey", right_on="s_suppkey")
        .merge(tables["nation"], left_on="s_nationkey", right_on="n_nationkey")
        .merge(tables["region"], left_on="n_regionkey", right_on="r_regionkey")
    )
    european = european[european["r_name"] == "EUROPE"]
    least = european.groupby("ps_partkey").agg({"ps_supplycost": "min"}).reset_index()
    least = least.rename(columns={"ps_partkey": "min_partkey", "ps_supplycost": "min_supplycost"})
    rows = tables["part"].merge(european, left_on="p_partkey", right_on="ps_partkey")
    rows = rows.merge(
        least, left_on=["p_partkey", "ps_supplycost"], right_on=["min_partkey", "min_supplycost"]
    )
    rows = rows[(rows["p_size"] == 15) & rows["p_type"].str.endswith("BRASS")]
    rows = rows[["s_acctbal", "s_name", "n_name", "p_partkey", "p_mfgr", "s_address", "s_phone", "s_comment"]]
    rows = rows.sort_values(
        by=["s_acctbal", "n_name", "s_name", "p_partkey"], ascending=[False, True, True, True]
    )
    return rows.head(100)


def q3(tables: Tables) -> Any:
    """Compute the shipping priority."""
    rows = (
        tables["customer"]
        .merge(tables["orders"], left_on="c_custkey", right_on="o_custkey")
        .merge(tables["lineitem"], left_on="o_orderkey", right_on="l_orderkey")
    )
    rows = rows[rows["c_mktsegment"] == "BUILDING"]
    rows = rows.query("o_orderdate < @date and l_shipdate > @date", local_dict={"date": day("1995-03-15")})
    rows = rows.assign(revenue=rows["l_extendedprice"] * (1 - rows["l_discount"]))
    result = rows.groupby(["l_orderkey", "o_orderdate", "o_shippriority"]).agg({"revenue": "sum"})
    result = result.reset_index()[["l_orderkey", "revenue", "o_orderdate", "o_shippriority"]]
    return result.sort_values(by=["revenue", "o_orderdate"], ascending=[False, True]).head(10)


def q4(tables: Tables) -> Any:
    """Compute the order priority checking."""
    late = tables["lineitem"].query("l_commitdate < l_receiptdate")
    rows = semi(tables["orders"], late, "o_orderkey", "l_orderkey")
    rows = between(rows, "o_orderdate", "1993-07-01", "1993-10-01")
    result = rows.groupby("o_orderpriority").agg({"o_orderkey": "count"}).reset_index()
    return result.rename(columns={"o_orderkey": "order_count"}).sort_values(by="o_orderpriority")


def q5(tables: Tables) -> Any:
    """Compute the local supplier volume."""
    rows = (
        tables["customer"]
        .merge(tables["orders"], left_on="c_custkey", right_on="o_custkey")
        .merge(tables["lineitem"], left_on="o_orderkey", right_on="l_orderkey")
        .merge(
            tables["supplier"], left_on=["l_suppkey", "c_nationkey"], right_on=["s_suppkey", "s_nationkey"]
        )
        .merge(tables["nation"], left_on="s_nationkey", right_on="n_nationkey")
        .merge(tables["region"], left_on="n_regionkey", right_on="r_regionkey")
    )
    rows = rows[rows["r_name"] == "ASIA"]
    rows = between(rows, "o_orderdate", "1994-01-01", "1995-01-01")
    rows = rows.assign(revenue=rows["l_extendedprice"] * (1 - rows["l_discount"]))
    result = rows.groupby("n_name").agg({"revenue": "sum"}).reset_index()
    return result.sort_values(by="revenue", ascending=False)


def q6(tables: Tables) -> Any:
    """Compute the forecasting revenue change."""
    rows = between(tables["lineitem"], "l_shipdate", "1994-01-01", "1995-01-01")
    rows = rows.query("l_discount >= 0.05 and l_discount <= 0.07 and l_quantity < 24")
    return rows.assign(revenue=rows["l_extendedprice"] * rows["l_discount"])["revenue"].sum()


def q7(tables: Tables) -> Any:
    """Compute the volume shipping."""
    rows = (
        tables["supplier"]
        .merge(tables["lineitem"], left_on="s_suppkey", right_on="l_suppkey")
        .merge(tables["orders"], left_on="l_orderkey", right_on="o_orderkey")
        .merge(tables["customer"], left_on="o_custkey", right_on="c_custkey")
        .merge(nations(tables, "n1"), left_on="s_nationkey", right_on="n1_nationkey")
        .merge(nations(tables, "n2"), left_on="c_nationkey", right_on="n2_nationkey")
    )
    rows = rows[
        ((rows["n1_name"] == "FRANCE") & (rows["n2_name"] == "GERMANY"))
        | ((rows["n1_name"] == "GERMANY") & (rows["n2_name"] == "FRANCE"))
    ]
    rows = between(rows, "l_shipdate", "1995-01-01", "1997-01-01")
    shipping = rows.assign(
        supp_nation=rows["n1_name"],
        cust_nation=rows["n2_name"],
        l_year=rows["l_shipdate"].dt.year,
        volume=rows["l_extendedprice"] * (1 - rows["l_discount"]),
    )[["supp_nation", "cust_nation", "l_year", "volume"]]
    result = shipping.groupby(["supp_nation", "cust_nation", "l_year"]).agg({"volume": "sum"}).reset_index()
    result = result.rename(columns={"volume": "revenue"})
    return result.sort_values(by=["supp_nation", "cust_nation", "l_year"])


def q8(tables: Tables) -> Any:
    """Compute the national market share."""
    rows = (
        tables["part"]
        .merge(tables["lineitem"], left_on="p_partkey", right_on="l_partkey")
        .merge(tables["supplier"], left_on="l_suppkey", right_on="s_suppkey")
        .merge(tables["orders"], left_on="l_orderkey", right_on="o_orderkey")
        .merge(tables["customer"], left_on="o_custkey", right_on="c_custkey")
        .merge(nations(tables, "n1"), left_on="c_nationkey", right_on="n1_nationkey")
        .merge(nations(tables, "n2"), left_on="s_nationkey", right_on="n2_nationkey")
        .merge(tables["region"], left_on="n1_regionkey", right_on="r_regionkey")
    )
    rows = rows[(rows["r_name"] == "AMERICA") & (rows["p_type"] == "ECONOMY ANODIZED STEEL")]
    rows = between(rows, "o_orderdate", "1995-01-01", "1997-01-01")
    all_nations = rows.assign(
        o_year=rows["o_orderdate"].dt.year,
        volume=rows["l_extendedprice"] * (1 - rows["l_discount"]),
        nation=rows["n2_name"],
    )[["o_year", "volume", "nation"]]
    of_brazil = all_nations["volume"].where(all_nations["nation"] == "BRAZIL", 0)
    sums = all_nations.assign(case=of_brazil).groupby("o_year").agg({"case": "sum", "volume": "sum"})
    result = sums.reset_index()
    result = result.assign(mkt_share=result["case"] / result["volume"])
    return result[["o_year", "mkt_share"]].sort_values(by="o_year")


def q9(tables: Tables) -> Any:
    """Compute the product type profit measure."""
    rows = (
        tables["part"]
        .merge(tables["lineitem"], left_on="p_partkey", right_on="l_partkey")
        .merge(tables["supplier"], left_on="l_suppkey", right_on="s_suppkey")
        .merge(tables["partsupp"], left_on=["l_suppkey", "l_partkey"], right_on=["ps_suppkey", "ps_partkey"])
        .merge(tables["orders"], left_on="l_orderkey", right_on="o_orderkey")
        .merge(tables["nation"], left_on="s_nationkey", right_on="n_nationkey")
    )
    rows = rows[rows["p_name"].str.contains("green")]
    profit = rows.assign(
        nation=rows["n_name"],
        o_year=rows["o_orderdate"].dt.year,
        amount=rows["l_extendedprice"] * (1 - rows["l_discount"])
        - rows["ps_supplycost"] * rows["l_quantity"],
    )[["nation", "o_year", "amount"]]
    result = profit.groupby(["nation", "o_year"]).agg({"amount": "sum"}).reset_index()
    result = result.rename(columns={"amount": "sum_profit"})
    return result.sort_values(by=["nation", "o_year"], ascending=[True, False])


def q10(tables: Tables) -> Any:
    """Compute the returned item reporting."""
    rows = (
        tables["customer"]
        .merge(tables["orders"], left_on="c_custkey", right_on="o_custkey")
        .merge(tables["lineitem"], left_on="o_orderkey", right_on="l_orderkey")
        .merge(tables["nation"], left_on="c_nationkey", right_on="n_nationkey")
    )
    rows = between(rows, "o_orderdate", "1993-10-01", "1994-01-01")
    rows = rows[rows["l_returnflag"] == "R"]
    rows = rows.assign(revenue=rows["l_extendedprice"] * (1 - rows["l_discount"]))
    keys = ["c_custkey", "c_name", "c_acctbal", "c_phone", "n_name", "c_address", "c_comment"]
    result = rows.groupby(keys).agg({"revenue": "sum"}).reset_index()
    result = result[
        ["c_custkey", "c_name", "revenue", "c_acctbal", "n_name", "c_address", "c_phone", "c_comment"]
    ]
    return result.sort_values(by="revenue", ascending=False).head(20)


def q11(tables: Tables) -> Any:
    """Compute the important stock identification."""
    rows = (
        tables["partsupp"]
        .merge(tables["supplier"], left_on="ps_suppkey", right_on="s_suppkey")
        .merge(tables["nation"], left_on="s_nationkey", right_on="n_nationkey")
    )
    rows = rows[rows["n_name"] == "GERMANY"]
    rows = rows.assign(value=rows["ps_supplycost"] * rows["ps_availqty"])
    total = rows["value"].sum() * (0.0001 / tables.scale)
    result = rows.groupby("ps_partkey").agg({"value": "sum"}).reset_index()
    result = result[result["value"] > total]
    return result.sort_values(by="value", ascending=False)


def q12(tables: Tables) -> Any:
    """Compute the shipping modes and order priority."""
    rows = tables["orders"].merge(tables["lineitem"], left_on="o_orderkey", right_on="l_orderkey")
    rows = rows[rows["l_shipmode"].isin(["MAIL", "SHIP"])]
    rows = rows.query("l_commitdate < l_receiptdate and l_shipdate < l_commitdate")
    rows = between(rows, "l_receiptdate", "1994-01-01", "1995-01-01")
    urgent = rows["o_orderpriority"].isin(["1-URGENT", "2-HIGH"])
    rows = rows.assign(high_line_count=urgent.astype("int64"), low_line_count=(~urgent).astype("int64"))
    result = rows.groupby("l_shipmode").agg({"high_line_count": "sum", "low_line_count": "sum"})
    return result.reset_index().sort_values(by="l_shipmode")


def q13(tables: Tables) -> Any:
    """Compute the customer distribution."""
    orders = tables["orders"]
    orders = orders[~orders["o_comment"].str.contains("special.*requests")]
    rows = tables["customer"].merge(orders, how="left", left_on="c_custkey", right_on="o_custkey")
    c_orders = rows.groupby("c_custkey").agg({"o_orderkey": "count"}).reset_index()
    c_orders = c_orders.rename(columns={"o_orderkey": "c_count"})
    result = c_orders.groupby("c_count").agg({"c_custkey": "count"}).reset_index()
    result = result.rename(columns={"c_custkey": "custdist"})
    return result.sort_values(by=["custdist", "c_count"], ascending=[False, False])


def q14(tables: Tables) -> Any:
    """Compute the promotion effect."""
    rows = tables["lineitem"].merge(tables["part"], left_on="l_partkey", right_on="p_partkey")
    rows = between(rows, "l_shipdate", "1995-09-01", "1995-10-01")
    rows = rows.assign(revenue=rows["l_extendedprice"] * (1 - rows["l_discount"]))
    rows = rows.assign(case=rows["revenue"].where(rows["p_type"].str.startswith("PROMO"), 0))
    return 100.0 * rows["case"].sum() / rows["revenue"].sum()


def q15(tables: Tables) -> Any:
    """Compute the top supplier."""
    rows = between(tables["lineitem"], "l_shipdate", "1996-01-01", "1996-04-01")
    rows = rows.assign(total_revenue=rows["l_extendedprice"] * (1 - rows["l_discount"]))
    revenue = rows.groupby("l_suppkey").agg({"total_revenue": "sum"}).reset_index()
    revenue = revenue.rename(columns={"l_suppkey": "supplier_no"})
    result = tables["supplier"].merge(revenue, left_on="s_suppkey", right_on="supplier_no")
    result = result[result["total_revenue"] == revenue["total_revenue"].max()]
    result = result[["s_suppkey", "s_name", "s_address", "s_phone", "total_revenue"]]
    return result.sort_values(by="s_suppkey")


def q16(tables: Tables) -> Any:
    """Compute the parts and suppliers."""
    supplier = tables["supplier"]
    complaints = supplier[supplier["s_comment"].str.contains("Customer.*Complaints")]
    rows = tables["partsupp"].merge(tables["part"], left_on="ps_partkey", right_on="p_partkey")
    rows = rows[(rows["p_brand"] != "Brand#45") & ~rows["p_type"].str.startswith("MEDIUM POLISHED")]
    rows = rows[rows["p_size"].isin([49, 14, 23, 45, 19, 3, 36, 9])]
    rows = anti(rows, complaints, "ps_suppkey", "s_suppkey")
    distinct = rows[["p_brand", "p_type", "p_size", "ps_suppkey"]].drop_duplicates()
    result = distinct.groupby(["p_brand", "p_type", "p_size"]).agg({"ps_suppkey": "count"}).reset_index()
    result = result.rename(columns={"ps_suppkey": "supplier_cnt"})
    return result.sort_values(
        by=["supplier_cnt", "p_brand", "p_type", "p_size"], ascending=[False, True, True, True]
    )


def q17(tables: Tables) -> Any:
    """Compute the small-quantity-order revenue."""
    means = tables["lineitem"].groupby("l_partkey").agg({"l_quantity": "mean"}).reset_index()
    means = means.rename(columns={"l_partkey": "mean_partkey", "l_quantity": "mean_quantity"})
    rows = tables["lineitem"].merge(tables["part"], left_on="l_partkey", right_on="p_partkey")
    rows = rows.merge(means, left_on="p_partkey", right_on="mean_partkey")
    rows = rows[(rows["p_brand"] == "Brand#23") & (rows["p_container"] == "MED BOX")]
    rows = rows.query("l_quantity < 0.2 * mean_quantity")
    return rows["l_extendedprice"].sum() / 7.0


def q18(tables: Tables) -> Any:
    """Compute the large volume customer."""
    large = tables["lineitem"].groupby("l_orderkey").agg({"l_quantity": "sum"}).reset_index()
    large = large.query("l_quantity > 300")
    rows = (
        tables["customer"]
        .merge(tables["orders"], left_on="c_custkey", right_on="o_custkey")
        .merge(tables["lineitem"], left_on="o_orderkey", right_on="l_orderkey")
    )
    rows = semi(rows, large, "o_orderkey", "l_orderkey")
    keys = ["c_name", "c_custkey", "o_orderkey", "o_orderdate", "o_totalprice"]
    result = rows.groupby(keys).agg({"l_quantity": "sum"}).reset_index()
    result = result.rename(columns={"l_quantity": "sum_quantity"})
    return result.sort_values(by=["o_totalprice", "o_orderdate"], ascending=[False, True]).head(100)


def q19(tables: Tables) -> Any:
    """Compute the discounted revenue."""
    rows = tables["lineitem"].merge(tables["part"], left_on="l_partkey", right_on="p_partkey")
    rows = rows[rows["l_shipmode"].isin(["AIR", "AIR REG"])]
    rows = rows[rows["l_shipinstruct"] == "DELIVER IN PERSON"]
    rows = rows[
        (
            (rows["p_brand"] == "Brand#12")
            & rows["p_container"].isin(["SM CASE", "SM BOX", "SM PACK", "SM PKG"])
            & (rows["l_quantity"] >= 1)
            & (rows["l_quantity"] <= 11)
            & (rows["p_size"] >= 1)
            & (rows["p_size"] <= 5)
        )
        | (
            (rows["p_brand"] == "Brand#23")
            & rows["p_container"].isin(["MED BAG", "MED BOX", "MED PKG", "MED PACK"])
            & (rows["l_quantity"] >= 10)
            & (rows["l_quantity"] <= 20)
            & (rows["p_size"] >= 1)
            & (rows["p_size"] <= 10)
        )
        | (
            (rows["p_brand"] == "Brand#34")
            & rows["p_container"].isin(["LG CASE", "LG BOX", "LG PACK", "LG PKG"])
            & (rows["l_quantity"] >= 20)
            & (rows["l_quantity"] <= 30)
            & (rows["p_size"] >= 1)
            & (rows["p_size"] <= 15)
        )
    ]
    return rows.assign(revenue=rows["l_extendedprice"] * (1 - rows["l_discount"]))["revenue"].sum()


def q20(tables: Tables) -> Any:
    """Compute the potential part promotion."""
    forest = tables["part"]
    forest = forest[forest["p_name"].str.startswith("forest")]
    items = between(tables["lineitem"], "l_shipdate", "1994-01-01", "1995-01-01")
    items = items.groupby(["l_partkey", "l_suppkey"]).agg({"l_quantity": "sum"}).reset_index()
    items = items.assign(half=0.5 * items["l_quantity"])
    stock = semi(tables["partsupp"], forest, "ps_partkey", "p_partkey")
    stock = stock.merge(items, left_on=["ps_partkey", "ps_suppkey"], right_on=["l_partkey", "l_suppkey"])
    stock = stock.query("ps_availqty > half")
    rows = tables["supplier"].merge(tables["nation"], left_on="s_nationkey", right_on="n_nationkey")
    rows = semi(rows, stock, "s_suppkey", "ps_suppkey")
    rows = rows[rows["n_name"] == "CANADA"]
    return rows[["s_name", "s_address"]].sort_values(by="s_name")


def q21(tables: Tables) -> Any:
    """Compute the suppliers who kept orders waiting."""
    l1 = tables["lineitem"].query("l_receiptdate > l_commitdate")
    l1 = l1[["l_orderkey", "l_suppkey"]].reset_index(drop=True)
    rows = (
        tables["supplier"]
        .merge(l1, left_on="s_suppkey", right_on="l_suppkey")
        .merge(tables["orders"], left_on="l_orderkey", right_on="o_orderkey")
        .merge(tables["nation"], left_on="s_nationkey", right_on="n_nationkey")
    )
    rows = rows[(rows["o_orderstatus"] == "F") & (rows["n_name"] == "SAUDI ARABIA")]
    # EXISTS and NOT EXISTS with another supplier: pairs of the order's items, of which suppliers differ.
    wanted = rows[["l_orderkey", "l_suppkey"]].drop_duplicates()
    names = {"l_orderkey": "l2_orderkey", "l_suppkey": "l2_suppkey"}
    l2 = tables["lineitem"][["l_orderkey", "l_suppkey"]].rename(columns=names)
    others = wanted.merge(l2, left_on="l_orderkey", right_on="l2_orderkey").query("l2_suppkey != l_suppkey")
    l3 = l1.rename(columns=names)
    late = wanted.merge(l3, left_on="l_orderkey", right_on="l2_orderkey").query("l2_suppkey != l_suppkey")
    keys = ["l_orderkey", "l_suppkey"]
    rows = rows.merge(others[keys].drop_duplicates(), on=keys)
    rows = rows.merge(late[keys].drop_duplicates().assign(found=1), how="left", on=keys)
    rows = rows[rows["found"].isnull()]
    result = rows.groupby("s_name").agg({"l_orderkey": "count"}).reset_index()
    result = result.rename(columns={"l_orderkey": "numwait"})
    return result.sort_values(by=["numwait", "s_name"], ascending=[False, True]).head(100)


def q22(tables: Tables) -> Any:
    """Compute the global sales opportunity."""
    customer = tables["customer"]
    customer = customer.assign(cntrycode=customer["c_phone"].str.slice(0, 2))
    customer = customer[customer["cntrycode"].isin(["13", "31", "23", "29", "30", "18", "17"])]
    mean = customer.query("c_acctbal > 0")["c_acctbal"].mean()
    rows = customer[customer["c_acctbal"] > mean]
    custsale = anti(rows, tables["orders"], "c_custkey", "o_custkey")
    custsale = custsale.assign(numcust=custsale["c_acctbal"], totacctbal=custsale["c_acctbal"])
    result = custsale.groupby("cntrycode").agg({"numcust": "count", "totacctbal": "sum"}).reset_index()
    return result.sort_values(by="cntrycode")
