"""Generate tables modelled on three of TPC-H's, deterministically, on the workers.

Each partition is generated from its own seed, so nothing is downloaded and all workers generate the same
rows. Money is in integers (prices in cents, discounts and taxes in percent): sums do not depend on the order
of addition, so results can be compared exactly. Keys and their frequencies are as in TPC-H; text columns are
left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd

from dask_gpurt.tools.bench.reads import reading

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

    Parameters
    ----------
    scale
        The scale; 1 has 6 million items, as in TPC-H.
    partitions
        Number of partitions of orders, and of items.
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

    Parameters
    ----------
    part
        The number of the partition.
    name
        The name of the table.
    scale, partitions
        See :class:`TableSize`.
    columns
        The columns to keep; all by default.
    """
    columns_of = {"customer": _customers, "orders": _orders, "lineitem": _items}[name]
    with reading():
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

    Parameters
    ----------
    size
        The size of the tables.
    backend
        ``pandas`` or ``cudf``.
    folder
        The folder in which they have a subfolder; without it each query generates them.
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
