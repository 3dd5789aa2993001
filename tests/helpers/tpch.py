"""Generate small TPC-H tables for which every query returns rows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from benchmarks.tpch.tables import ParquetTables, write_tables

#: For query 11: a part counts if it has at least 1% of the total value.
SCALE = 0.01
SUPPLIERS, PARTS, CUSTOMERS, ORDERS = 30, 120, 90, 900
NATIONS = {
    "ASIA": ("INDIA", "JAPAN"),
    "EUROPE": ("FRANCE", "GERMANY"),
    "AMERICA": ("BRAZIL", "CANADA"),
    "MIDDLE EAST": ("SAUDI ARABIA", "IRAN"),
}
#: Values that queries filter by, among others.
BRANDS = ("Brand#12", "Brand#23", "Brand#34", "Brand#45", "Brand#11")
CONTAINERS = ("MED BOX", "SM CASE", "LG PKG", "JUMBO JAR")
TYPES = ("LARGE BRASS", "ECONOMY ANODIZED STEEL", "PROMO PLATED TIN", "MEDIUM POLISHED COPPER")
NAMES = ("forest green", "green rose", "blush thistle", "forest lace")


def day(first: str, after: int) -> pd.Timestamp:
    return pd.Timestamp(first) + pd.Timedelta(days=after)


def rows_of_tables() -> dict[str, pd.DataFrame]:
    """Generate tables in which the values that queries filter by are more frequent than in TPC-H."""
    rng = random.Random(18)
    nations = [(name, region) for region, names in enumerate(NATIONS.values()) for name in names]
    region = pd.DataFrame({"r_regionkey": range(len(NATIONS)), "r_name": list(NATIONS)})
    nation = pd.DataFrame(
        {
            "n_nationkey": range(len(nations)),
            "n_name": [name for name, _ in nations],
            "n_regionkey": [region for _, region in nations],
        }
    )
    supplier = pd.DataFrame(
        {
            "s_suppkey": key,
            "s_name": f"Supplier#{key:09}",
            "s_address": f"address {key}",
            "s_nationkey": key % len(nations),
            "s_phone": f"{key:02}-100",
            "s_acctbal": rng.randrange(-99999, 999999) / 100,
            "s_comment": "sly Customer has Complaints" if key % 7 == 0 else "quiet",
        }
        for key in range(1, SUPPLIERS + 1)
    )
    customer = pd.DataFrame(
        {
            "c_custkey": key,
            "c_name": f"Customer#{key:09}",
            "c_address": f"address {key}",
            "c_nationkey": rng.randrange(len(nations)),
            "c_phone": f"{rng.choice([13, 31, 23, 29, 11])}-{key}",
            "c_acctbal": rng.randrange(-99999, 999999) / 100,
            "c_mktsegment": rng.choice(["BUILDING", "MACHINERY"]),
            "c_comment": f"comment {key}",
        }
        for key in range(1, CUSTOMERS + 1)
    )
    part = pd.DataFrame(
        {
            "p_partkey": key,
            "p_name": rng.choice(NAMES),
            "p_mfgr": "Manufacturer#1",
            "p_brand": rng.choice(BRANDS),
            "p_type": rng.choice(TYPES),
            "p_size": rng.choice([3, 9, 14, 15]),
            "p_container": rng.choice(CONTAINERS),
        }
        for key in range(1, PARTS + 1)
    )
    offers = [(key, (key + i * 7) % SUPPLIERS + 1) for key in range(1, PARTS + 1) for i in range(4)]
    partsupp = pd.DataFrame(
        {
            "ps_partkey": of_part,
            "ps_suppkey": by,
            "ps_availqty": rng.randrange(1, 200),
            "ps_supplycost": rng.randrange(100, 100000) / 100,
        }
        for of_part, by in offers
    )
    orders, lineitem = orders_and_items(rng, offers)
    return {
        "region": region,
        "nation": nation,
        "supplier": supplier,
        "customer": customer,
        "part": part,
        "partsupp": partsupp,
        "orders": orders,
        "lineitem": lineitem,
    }


def orders_and_items(
    rng: random.Random, offers: Sequence[tuple[int, int]]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    orders, items = [], []
    for key in range(1, ORDERS + 1):
        ordered = day("1993-01-01", rng.randrange(4 * 365))
        orders.append(
            {
                "o_orderkey": key,
                "o_custkey": rng.randrange(1, CUSTOMERS // 2),  # half of the customers have no orders
                "o_orderstatus": rng.choice("FO"),
                "o_totalprice": rng.randrange(10**4, 10**8) / 100,
                "o_orderdate": ordered,
                "o_orderpriority": rng.choice(["1-URGENT", "2-HIGH", "3-MEDIUM", "5-LOW"]),
                "o_shippriority": 0,
                "o_comment": rng.choice(["no special deposits or requests", "requests special", "none"]),
            }
        )
        # Query 18 needs orders of more than 300 parts in total.
        least = 45 if key % 50 == 0 else 1
        for number, (of_part, by) in enumerate(rng.sample(offers, 8 if least > 1 else rng.randrange(1, 6))):
            shipped = ordered + pd.Timedelta(days=rng.randrange(1, 60))
            items.append(
                {
                    "l_orderkey": key,
                    "l_partkey": of_part,
                    "l_suppkey": by,
                    "l_linenumber": number,
                    "l_quantity": float(rng.randrange(least, 51)),
                    "l_extendedprice": rng.randrange(10**4, 10**7) / 100,
                    "l_discount": rng.randrange(11) / 100,
                    "l_tax": rng.randrange(9) / 100,
                    "l_returnflag": rng.choice("ANR"),
                    "l_linestatus": rng.choice("FO"),
                    "l_shipdate": shipped,
                    "l_commitdate": ordered + pd.Timedelta(days=rng.randrange(20, 60)),
                    "l_receiptdate": shipped + pd.Timedelta(days=rng.randrange(1, 20)),
                    "l_shipinstruct": rng.choice(["DELIVER IN PERSON", "NONE"]),
                    "l_shipmode": rng.choice(["MAIL", "SHIP", "AIR", "AIR REG"]),
                }
            )
    return pd.DataFrame(orders), pd.DataFrame(items)


def cut(frame: pd.DataFrame, pieces: int) -> Iterator[pd.DataFrame]:
    ends = [len(frame) * i // pieces for i in range(pieces + 1)]
    for begin, end in itertools.pairwise(ends):
        yield frame.iloc[begin:end]


def small_tables(directory: Path, parts: int) -> ParquetTables:
    """Write tables; the larger ones are split into several parts."""
    pieces = {"region": 1, "nation": 1}
    frames = {name: list(cut(frame, pieces.get(name, parts))) for name, frame in rows_of_tables().items()}
    return write_tables(directory, frames, SCALE)
