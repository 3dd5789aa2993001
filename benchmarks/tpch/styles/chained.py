"""The 22 queries as one chain of methods each, as users of pandas write who have no use for variables.

Tables are joined first and filtered then, columns are added by ``assign`` with functions of the frame,
helpers are passed to ``pipe``, and results are sorted and cut at the end of the chain.
"""

from __future__ import annotations

from typing import Any

from ..queries import Tables, day


def with_revenue(frame: Any) -> Any:
    """Add what was paid for each line item, without tax."""
    return frame.assign(revenue=lambda df: df.l_extendedprice * (1 - df.l_discount))


def within(frame: Any, column: str, begin: str, end: str) -> Any:
    """Keep the rows whose time is in a range, without its end."""
    return frame.loc[lambda df: (df[column] >= day(begin)) & (df[column] < day(end))]


def sum_by(frame: Any, keys: Any, column: str) -> Any:
    """Sum up a column by keys."""
    return frame.groupby(keys)[column].sum().reset_index()


def q1(tables: Tables) -> Any:
    """Compute the pricing summary report."""
    return (
        tables["lineitem"]
        .query("l_shipdate <= @last", local_dict={"last": day("1998-09-02")})
        .assign(
            sum_disc_price=lambda df: df.l_extendedprice * (1 - df.l_discount),
            sum_charge=lambda df: df.sum_disc_price * (1 + df.l_tax),
            avg_qty=lambda df: df.l_quantity,
            avg_price=lambda df: df.l_extendedprice,
        )
        .rename(
            columns={
                "l_quantity": "sum_qty",
                "l_extendedprice": "sum_base_price",
                "l_discount": "avg_disc",
                "l_orderkey": "count_order",
            }
        )
        .groupby(["l_returnflag", "l_linestatus"])
        .agg(
            {
                "sum_qty": "sum",
                "sum_base_price": "sum",
                "sum_disc_price": "sum",
                "sum_charge": "sum",
                "avg_qty": "mean",
                "avg_price": "mean",
                "avg_disc": "mean",
                "count_order": "size",
            }
        )
        .reset_index()
        .sort_values(["l_returnflag", "l_linestatus"])
    )


def q2(tables: Tables) -> Any:
    """Compute the minimum cost supplier."""
    offers = (
        tables["part"]
        .merge(tables["partsupp"], left_on="p_partkey", right_on="ps_partkey")
        .merge(tables["supplier"], left_on="ps_suppkey", right_on="s_suppkey")
        .merge(tables["nation"], left_on="s_nationkey", right_on="n_nationkey")
        .merge(tables["region"], left_on="n_regionkey", right_on="r_regionkey")
        .query("p_size == 15")
        .loc[lambda df: df.p_type.str.endswith("BRASS") & (df.r_name == "EUROPE")]
    )
    return (
        offers.groupby("p_partkey")
        .ps_supplycost.min()
        .reset_index()
        .merge(offers, on=["p_partkey", "ps_supplycost"])
        .sort_values(["s_acctbal", "n_name", "s_name", "p_partkey"], ascending=[False, True, True, True])[
            ["s_acctbal", "s_name", "n_name", "p_partkey", "p_mfgr", "s_address", "s_phone", "s_comment"]
        ]
        .head(100)
    )


def q3(tables: Tables) -> Any:
    """Compute the shipping priority."""
    return (
        tables["customer"]
        .merge(tables["orders"], left_on="c_custkey", right_on="o_custkey")
        .merge(tables["lineitem"], left_on="o_orderkey", right_on="l_orderkey")
        .loc[lambda df: df.c_mktsegment == "BUILDING"]
        .query("o_orderdate < @cut and l_shipdate > @cut", local_dict={"cut": day("1995-03-15")})
        .pipe(with_revenue)
        .pipe(sum_by, ["l_orderkey", "o_orderdate", "o_shippriority"], "revenue")
        .sort_values(["revenue", "o_orderdate"], ascending=[False, True])[
            ["l_orderkey", "revenue", "o_orderdate", "o_shippriority"]
        ]
        .head(10)
    )


def q4(tables: Tables) -> Any:
    """Compute the order priority checking."""
    late = tables["lineitem"].loc[lambda df: df.l_commitdate < df.l_receiptdate]
    return (
        tables["orders"]
        .pipe(within, "o_orderdate", "1993-07-01", "1993-10-01")
        .merge(late[["l_orderkey"]].drop_duplicates(), left_on="o_orderkey", right_on="l_orderkey")
        .groupby("o_orderpriority")
        .size()
        .rename("order_count")
        .reset_index()
        .sort_values("o_orderpriority")
    )


def q5(tables: Tables) -> Any:
    """Compute the local supplier volume."""
    return (
        tables["lineitem"]
        .merge(tables["orders"], left_on="l_orderkey", right_on="o_orderkey")
        .merge(tables["customer"], left_on="o_custkey", right_on="c_custkey")
        .merge(tables["supplier"], left_on="l_suppkey", right_on="s_suppkey")
        .merge(tables["nation"], left_on="s_nationkey", right_on="n_nationkey")
        .merge(tables["region"], left_on="n_regionkey", right_on="r_regionkey")
        .query("c_nationkey == s_nationkey")
        .loc[lambda df: df.r_name == "ASIA"]
        .pipe(within, "o_orderdate", "1994-01-01", "1995-01-01")
        .pipe(with_revenue)
        .pipe(sum_by, "n_name", "revenue")
        .sort_values("revenue", ascending=False)
    )


def q6(tables: Tables) -> Any:
    """Compute the forecasting revenue change."""
    return (
        tables["lineitem"]
        .pipe(within, "l_shipdate", "1994-01-01", "1995-01-01")
        .query("0.05 <= l_discount <= 0.07 and l_quantity < 24")
        .assign(revenue=lambda df: df.l_extendedprice * df.l_discount)
        .revenue.sum()
    )


def q7(tables: Tables) -> Any:
    """Compute the volume shipping."""
    nations = tables["nation"][["n_nationkey", "n_name"]]
    return (
        tables["lineitem"]
        .merge(tables["supplier"], left_on="l_suppkey", right_on="s_suppkey")
        .merge(tables["orders"], left_on="l_orderkey", right_on="o_orderkey")
        .merge(tables["customer"], left_on="o_custkey", right_on="c_custkey")
        .merge(nations.add_prefix("supp_"), left_on="s_nationkey", right_on="supp_n_nationkey")
        .merge(nations.add_prefix("cust_"), left_on="c_nationkey", right_on="cust_n_nationkey")
        .rename(columns={"supp_n_name": "supp_nation", "cust_n_name": "cust_nation"})
        .loc[
            lambda df: (
                ((df.supp_nation == "FRANCE") & (df.cust_nation == "GERMANY"))
                | ((df.supp_nation == "GERMANY") & (df.cust_nation == "FRANCE"))
            )
        ]
        .pipe(within, "l_shipdate", "1995-01-01", "1997-01-01")
        .assign(l_year=lambda df: df.l_shipdate.dt.year)
        .pipe(with_revenue)
        .pipe(sum_by, ["supp_nation", "cust_nation", "l_year"], "revenue")
        .sort_values(["supp_nation", "cust_nation", "l_year"])
    )


def q8(tables: Tables) -> Any:
    """Compute the national market share."""
    nations = tables["nation"]
    return (
        tables["part"]
        .loc[lambda df: df.p_type == "ECONOMY ANODIZED STEEL"]
        .merge(tables["lineitem"], left_on="p_partkey", right_on="l_partkey")
        .merge(tables["supplier"], left_on="l_suppkey", right_on="s_suppkey")
        .merge(tables["orders"], left_on="l_orderkey", right_on="o_orderkey")
        .merge(tables["customer"], left_on="o_custkey", right_on="c_custkey")
        .merge(
            nations[["n_nationkey", "n_regionkey"]].merge(
                tables["region"], left_on="n_regionkey", right_on="r_regionkey"
            ),
            left_on="c_nationkey",
            right_on="n_nationkey",
        )
        .loc[lambda df: df.r_name == "AMERICA"]
        .merge(
            nations[["n_nationkey", "n_name"]],
            left_on="s_nationkey",
            right_on="n_nationkey",
            suffixes=("_customer", "_supplier"),
        )
        .pipe(within, "o_orderdate", "1995-01-01", "1997-01-01")
        .pipe(with_revenue)
        .assign(
            o_year=lambda df: df.o_orderdate.dt.year,
            of_brazil=lambda df: df.revenue.where(df.n_name == "BRAZIL", 0.0),
        )
        .groupby("o_year")[["of_brazil", "revenue"]]
        .sum()
        .assign(mkt_share=lambda df: df.of_brazil / df.revenue)
        .reset_index()[["o_year", "mkt_share"]]
        .sort_values("o_year")
    )


def q9(tables: Tables) -> Any:
    """Compute the product type profit measure."""
    return (
        tables["lineitem"]
        .merge(tables["part"], left_on="l_partkey", right_on="p_partkey")
        .loc[lambda df: df.p_name.str.contains("green")]
        .merge(
            tables["partsupp"],
            left_on=["l_partkey", "l_suppkey"],
            right_on=["ps_partkey", "ps_suppkey"],
        )
        .merge(tables["supplier"], left_on="l_suppkey", right_on="s_suppkey")
        .merge(tables["nation"], left_on="s_nationkey", right_on="n_nationkey")
        .merge(tables["orders"], left_on="l_orderkey", right_on="o_orderkey")
        .pipe(with_revenue)
        .assign(
            o_year=lambda df: df.o_orderdate.dt.year,
            sum_profit=lambda df: df.revenue - df.ps_supplycost * df.l_quantity,
        )
        .rename(columns={"n_name": "nation"})
        .pipe(sum_by, ["nation", "o_year"], "sum_profit")
        .sort_values(["nation", "o_year"], ascending=[True, False])
    )


def q10(tables: Tables) -> Any:
    """Compute the returned item reporting."""
    return (
        tables["customer"]
        .merge(tables["orders"], left_on="c_custkey", right_on="o_custkey")
        .merge(tables["lineitem"], left_on="o_orderkey", right_on="l_orderkey")
        .merge(tables["nation"], left_on="c_nationkey", right_on="n_nationkey")
        .pipe(within, "o_orderdate", "1993-10-01", "1994-01-01")
        .loc[lambda df: df.l_returnflag == "R"]
        .pipe(with_revenue)
        .pipe(
            sum_by,
            ["c_custkey", "c_name", "c_acctbal", "c_phone", "n_name", "c_address", "c_comment"],
            "revenue",
        )
        .sort_values("revenue", ascending=False)
        .head(20)[
            ["c_custkey", "c_name", "revenue", "c_acctbal", "n_name", "c_address", "c_phone", "c_comment"]
        ]
    )


def q11(tables: Tables) -> Any:
    """Compute the important stock identification."""
    fraction = 0.0001 / tables.scale
    stock = (
        tables["partsupp"]
        .merge(tables["supplier"], left_on="ps_suppkey", right_on="s_suppkey")
        .merge(tables["nation"], left_on="s_nationkey", right_on="n_nationkey")
        .loc[lambda df: df.n_name == "GERMANY"]
        .assign(value=lambda df: df.ps_supplycost * df.ps_availqty)
    )
    return (
        stock.pipe(sum_by, "ps_partkey", "value")
        .loc[lambda df: df.value > stock.value.sum() * fraction]
        .sort_values("value", ascending=False)
    )


def q12(tables: Tables) -> Any:
    """Compute the shipping modes and order priority."""
    return (
        tables["orders"]
        .merge(tables["lineitem"], left_on="o_orderkey", right_on="l_orderkey")
        .loc[lambda df: df.l_shipmode.isin(["MAIL", "SHIP"])]
        .query("l_commitdate < l_receiptdate and l_shipdate < l_commitdate")
        .pipe(within, "l_receiptdate", "1994-01-01", "1995-01-01")
        .assign(
            high_line_count=lambda df: df.o_orderpriority.isin(["1-URGENT", "2-HIGH"]).astype(int),
            low_line_count=lambda df: (~df.o_orderpriority.isin(["1-URGENT", "2-HIGH"])).astype(int),
        )
        .groupby("l_shipmode")[["high_line_count", "low_line_count"]]
        .sum()
        .reset_index()
        .sort_values("l_shipmode")
    )


def q13(tables: Tables) -> Any:
    """Compute the customer distribution."""
    return (
        tables["customer"]
        .merge(
            tables["orders"].loc[lambda df: ~df.o_comment.str.contains("special.*requests")],
            left_on="c_custkey",
            right_on="o_custkey",
            how="left",
        )
        .groupby("c_custkey")
        .o_orderkey.count()
        .reset_index()
        .rename(columns={"o_orderkey": "c_count"})
        .groupby("c_count")
        .size()
        .rename("custdist")
        .reset_index()
        .sort_values(["custdist", "c_count"], ascending=False)
    )


def q14(tables: Tables) -> Any:
    """Compute the promotion effect."""
    return (
        tables["lineitem"]
        .merge(tables["part"], left_on="l_partkey", right_on="p_partkey")
        .pipe(within, "l_shipdate", "1995-09-01", "1995-10-01")
        .pipe(with_revenue)
        .assign(promo=lambda df: df.revenue.where(df.p_type.str.startswith("PROMO"), 0.0))
        .pipe(lambda df: 100 * df.promo.sum() / df.revenue.sum())
    )


def q15(tables: Tables) -> Any:
    """Compute the top supplier."""
    return (
        tables["lineitem"]
        .pipe(within, "l_shipdate", "1996-01-01", "1996-04-01")
        .pipe(with_revenue)
        .pipe(sum_by, "l_suppkey", "revenue")
        .rename(columns={"revenue": "total_revenue"})
        .loc[lambda df: df.total_revenue == df.total_revenue.max()]
        .merge(tables["supplier"], left_on="l_suppkey", right_on="s_suppkey")
        .sort_values("s_suppkey")[["s_suppkey", "s_name", "s_address", "s_phone", "total_revenue"]]
    )


def q16(tables: Tables) -> Any:
    """Compute the parts and suppliers."""
    complaints = tables["supplier"].loc[lambda df: df.s_comment.str.contains("Customer.*Complaints")]
    return (
        tables["partsupp"]
        .merge(tables["part"], left_on="ps_partkey", right_on="p_partkey")
        .loc[lambda df: df.p_brand != "Brand#45"]
        .loc[lambda df: ~df.p_type.str.startswith("MEDIUM POLISHED")]
        .loc[lambda df: df.p_size.isin([49, 14, 23, 45, 19, 3, 36, 9])]
        .merge(complaints[["s_suppkey"]], left_on="ps_suppkey", right_on="s_suppkey", how="left")
        .loc[lambda df: df.s_suppkey.isnull()]
        .groupby(["p_brand", "p_type", "p_size"])
        .ps_suppkey.nunique()
        .rename("supplier_cnt")
        .reset_index()
        .sort_values(["supplier_cnt", "p_brand", "p_type", "p_size"], ascending=[False, True, True, True])
    )


def q17(tables: Tables) -> Any:
    """Compute the small-quantity-order revenue."""
    return (
        tables["lineitem"]
        .merge(
            tables["lineitem"].groupby("l_partkey").l_quantity.mean().rename("avg_quantity").reset_index(),
            on="l_partkey",
        )
        .merge(tables["part"], left_on="l_partkey", right_on="p_partkey")
        .loc[lambda df: (df.p_brand == "Brand#23") & (df.p_container == "MED BOX")]
        .query("l_quantity < 0.2 * avg_quantity")
        .pipe(lambda df: df.l_extendedprice.sum() / 7.0)
    )


def q18(tables: Tables) -> Any:
    """Compute the large volume customer."""
    return (
        tables["lineitem"]
        .pipe(sum_by, "l_orderkey", "l_quantity")
        .query("l_quantity > 300")
        .rename(columns={"l_quantity": "sum_quantity"})
        .merge(tables["orders"], left_on="l_orderkey", right_on="o_orderkey")
        .merge(tables["customer"], left_on="o_custkey", right_on="c_custkey")
        .sort_values(["o_totalprice", "o_orderdate"], ascending=[False, True])
        .head(100)[["c_name", "c_custkey", "o_orderkey", "o_orderdate", "o_totalprice", "sum_quantity"]]
    )


def q19(tables: Tables) -> Any:
    """Compute the discounted revenue."""
    return (
        tables["lineitem"]
        .merge(tables["part"], left_on="l_partkey", right_on="p_partkey")
        .loc[lambda df: df.l_shipmode.isin(["AIR", "AIR REG"])]
        .loc[lambda df: df.l_shipinstruct == "DELIVER IN PERSON"]
        .loc[
            lambda df: (
                (
                    (df.p_brand == "Brand#12")
                    & df.p_container.isin(["SM CASE", "SM BOX", "SM PACK", "SM PKG"])
                    & df.l_quantity.between(1, 11)
                    & df.p_size.between(1, 5)
                )
                | (
                    (df.p_brand == "Brand#23")
                    & df.p_container.isin(["MED BAG", "MED BOX", "MED PKG", "MED PACK"])
                    & df.l_quantity.between(10, 20)
                    & df.p_size.between(1, 10)
                )
                | (
                    (df.p_brand == "Brand#34")
                    & df.p_container.isin(["LG CASE", "LG BOX", "LG PACK", "LG PKG"])
                    & df.l_quantity.between(20, 30)
                    & df.p_size.between(1, 15)
                )
            )
        ]
        .pipe(with_revenue)
        .revenue.sum()
    )


def q20(tables: Tables) -> Any:
    """Compute the potential part promotion."""
    enough = (
        tables["lineitem"]
        .pipe(within, "l_shipdate", "1994-01-01", "1995-01-01")
        .pipe(sum_by, ["l_partkey", "l_suppkey"], "l_quantity")
        .merge(tables["partsupp"], left_on=["l_partkey", "l_suppkey"], right_on=["ps_partkey", "ps_suppkey"])
        .query("ps_availqty > 0.5 * l_quantity")
        .merge(tables["part"], left_on="ps_partkey", right_on="p_partkey")
        .loc[lambda df: df.p_name.str.startswith("forest")]
    )
    return (
        tables["supplier"]
        .merge(tables["nation"], left_on="s_nationkey", right_on="n_nationkey")
        .loc[lambda df: df.n_name == "CANADA"]
        .merge(enough[["ps_suppkey"]].drop_duplicates(), left_on="s_suppkey", right_on="ps_suppkey")
        .sort_values("s_name")[["s_name", "s_address"]]
    )


def q21(tables: Tables) -> Any:
    """Compute the suppliers who kept orders waiting."""
    late = tables["lineitem"].loc[lambda df: df.l_receiptdate > df.l_commitdate]
    return (
        late.merge(
            tables["lineitem"].groupby("l_orderkey").l_suppkey.nunique().rename("suppliers").reset_index(),
            on="l_orderkey",
        )
        .merge(
            late.groupby("l_orderkey").l_suppkey.nunique().rename("late_suppliers").reset_index(),
            on="l_orderkey",
        )
        .query("suppliers > 1 and late_suppliers == 1")
        .merge(tables["orders"], left_on="l_orderkey", right_on="o_orderkey")
        .merge(tables["supplier"], left_on="l_suppkey", right_on="s_suppkey")
        .merge(tables["nation"], left_on="s_nationkey", right_on="n_nationkey")
        .loc[lambda df: (df.o_orderstatus == "F") & (df.n_name == "SAUDI ARABIA")]
        .groupby("s_name")
        .size()
        .rename("numwait")
        .reset_index()
        .sort_values(["numwait", "s_name"], ascending=[False, True])
        .head(100)
    )


def q22(tables: Tables) -> Any:
    """Compute the global sales opportunity."""
    customer = (
        tables["customer"]
        .assign(cntrycode=lambda df: df.c_phone.str[:2])
        .loc[lambda df: df.cntrycode.isin(["13", "31", "23", "29", "30", "18", "17"])]
    )
    return (
        customer.loc[lambda df: df.c_acctbal > df.query("c_acctbal > 0").c_acctbal.mean()]
        .merge(tables["orders"][["o_custkey"]], left_on="c_custkey", right_on="o_custkey", how="left")
        .loc[lambda df: df.o_custkey.isnull()]
        .groupby("cntrycode")
        .agg({"c_custkey": "size", "c_acctbal": "sum"})
        .rename(columns={"c_custkey": "numcust", "c_acctbal": "totacctbal"})
        .reset_index()
        .sort_values("cntrycode")
    )
