"""Programs of many kinds, by which the estimate is judged.

Each is a function of a folder with the tables of TPC-H as Parquet files. None is tuned: the queries are those
of :mod:`benchmarks.tpch.styles`, the others are what Dask's users do with tables, arrays, bags and functions,
some of which cannot gain anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd

from benchmarks.tpch.reference import computed
from benchmarks.tpch.styles import STYLES
from benchmarks.tpch.tables import ParquetTables

Program = Callable[[Path], Any]

ROWS = 1_000_000


def query(style: str, number: int, folder: Path) -> Any:
    """Compute a query of TPC-H in the style of a user."""
    return computed(STYLES[style][number].build(ParquetTables(folder)))


def _table(folder: Path, name: str) -> Any:
    return dd.read_parquet(folder / name)


def _made(number: int, rows: int = ROWS // 8) -> pd.DataFrame:
    random = np.random.default_rng(number)
    columns = {f"x{at}": random.random(rows) for at in range(4)}
    return pd.DataFrame(
        {"key": random.integers(0, ROWS, rows), "group": random.integers(0, 50, rows), **columns}
    )


def _frame(begin: int = 0) -> Any:
    return dd.from_map(_made, range(begin, begin + 8))


def merge_large(folder: Path) -> Any:
    """Join two frames of random rows."""
    return len(_frame().merge(_frame(8), on="key"))


def sort_rows(folder: Path) -> Any:
    """Sort lines, and take the middle of each partition."""
    lines = _table(folder, "lineitem")[["l_orderkey", "l_shipdate", "l_extendedprice"]]
    return (
        lines.sort_values("l_shipdate").map_partitions(lambda part: part.iloc[len(part) // 2 :][:1]).compute()
    )


def distinct_pairs(folder: Path) -> Any:
    """Find distinct pairs of parts and suppliers."""
    return len(_table(folder, "lineitem")[["l_partkey", "l_suppkey"]].drop_duplicates(split_out=8))


def few_groups(folder: Path) -> Any:
    """Aggregate random rows by a few keys."""
    return _frame().groupby("group")[["x0", "x1"]].mean().compute()


def function_of_groups(folder: Path) -> Any:
    """Apply a function to each group."""
    frame = _frame()[["group", "x0", "x1"]]
    return frame.groupby("group").apply(lambda rows: rows.x0.corr(rows.x1), meta=("r", float)).compute()


def explore(folder: Path) -> Any:
    """Look at a table step by step, as in a notebook, with a computation for each."""
    parts = _table(folder, "part")
    count, kinds = len(parts), parts.p_type.nunique().compute()
    dear = parts[parts.p_retailprice > parts.p_retailprice.mean().compute()]
    return count, kinds, dear.p_brand.value_counts().compute(), dear.head()


def persisted(folder: Path) -> Any:
    """Keep a join in memory, and use it twice."""
    lines, orders = _table(folder, "lineitem"), _table(folder, "orders")[["o_orderkey", "o_orderdate"]]
    joined = (
        lines[["l_orderkey", "l_tax"]].merge(orders, left_on="l_orderkey", right_on="o_orderkey").persist()
    )
    return joined.l_tax.sum().compute(), joined.o_orderdate.max().compute()


def rechunk_array(folder: Path) -> Any:
    """Change the chunks of an array from rows to columns."""
    array = da.random.default_rng(1).random((4000, 4000), chunks=(500, 4000))
    return array.rechunk((4000, 500)).sum(axis=0).max().compute()


def mean_of_arrays(folder: Path) -> Any:
    """Standardise columns of an array."""
    array = da.random.default_rng(2).random((4_000_000, 8), chunks=(250_000, 8))
    return ((array - array.mean(axis=0)) / array.std(axis=0)).max().compute()


def words_of_bags(folder: Path) -> Any:
    """Count words of texts in a bag."""
    texts = db.from_sequence([f"{n % 97} {n % 13} {n % 7}" for n in range(40_000)], npartitions=16)
    return texts.str.split().flatten().frequencies().topk(3, key=1).compute()


def futures(folder: Path) -> Any:
    """Submit functions one by one, and gather their results."""
    from distributed import get_client

    def wait_for(number: int) -> int:
        time.sleep(0.01)
        return number

    client = get_client()
    return client.gather(client.map(wait_for, range(200)))


def _queries(style: str, *numbers: int) -> dict[str, Program]:
    return {f"{style} q{number}": partial(query, style, number) for number in numbers}


def _named(*programs: Program) -> dict[str, Program]:
    return {program.__name__.replace("_", " "): program for program in programs}  # type: ignore[attr-defined]


#: All programs by name.
PROGRAMS: Mapping[str, Program] = {
    **_queries("chained", 3, 9),
    **_queries("columns", 5, 8, 17),
    **_queries("sql", 6, 11, 16, 19),
    **_named(merge_large, sort_rows, distinct_pairs, few_groups, function_of_groups, explore, persisted),
    **_named(mean_of_arrays, rechunk_array, words_of_bags, futures),
}
