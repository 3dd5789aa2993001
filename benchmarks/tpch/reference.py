"""Compute reference results with DuckDB on the same files, and compare results with them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from dask.base import is_dask_collection

from .queries import QUERIES, Query
from .tables import TABLES

if TYPE_CHECKING:
    from .tables import ParquetTables

#: Relative tolerance, as sums of doubles depend on the order of additions.
TOLERANCE = 1e-9


class WrongResultError(ValueError):
    """Raised if a result differs from the reference."""


def sql(number: int, scale: float) -> str:
    """Return a query in SQL, for a scale factor."""
    text = Path(__file__).with_name("queries.sql").read_text()
    parts = re.split(r"^-- query (\d+)\n", text, flags=re.MULTILINE)
    queries = dict(zip(map(int, parts[1::2]), parts[2::2], strict=True))
    return queries[number].replace("{scale}", f"{scale:g}")


def expected(tables: ParquetTables, numbers: Iterable[int]) -> dict[int, pd.DataFrame]:
    """Return DuckDB's results, cached beside the tables."""
    found: dict[int, pd.DataFrame] = {}
    database: Any = None
    for number in numbers:
        file = tables.directory / "expected" / f"q{number}.parquet"
        if not file.exists():
            database = database or _connect(tables)
            result = database.sql(sql(number, tables.scale)).df()
            file.parent.mkdir(exist_ok=True)
            result.to_parquet(file, index=False)
        found[number] = pd.read_parquet(file)
    return found


def _connect(tables: ParquetTables) -> Any:
    import duckdb

    database = duckdb.connect()
    for name in TABLES:
        database.sql(f"create view {name} as from read_parquet('{tables.directory / name}/*.parquet')")
    return database


def check(query: Query, found: pd.DataFrame, wanted: pd.DataFrame) -> None:
    """Raise unless a result has the columns, rows and order of the reference.

    Rows that tie in the query's order may come in any order. Doubles are compared with a relative tolerance
    of 1e-9, everything else exactly.

    Raises
    ------
    WrongResultError
        With the query and the difference.
    """
    if list(found.columns) != list(wanted.columns):
        raise WrongResultError(
            f"query {query.number}: columns {list(found.columns)}, not {list(wanted.columns)}"
        )
    if len(found) != len(wanted):
        raise WrongResultError(f"query {query.number}: {len(found)} rows, not {len(wanted)}")
    for name in query.order:
        _compare(query, f"order by {name}", found[name], wanted[name])
    # Align rows by the columns that are not doubles, which identify them.
    keys = [name for name in wanted.columns if wanted[name].dtype.kind != "f"]
    ours, theirs = (frame.sort_values(keys) if keys else frame for frame in (found, wanted))
    for name in wanted.columns:
        _compare(query, name, ours[name], theirs[name])


def _compare(query: Query, name: str, found: pd.Series[Any], wanted: pd.Series[Any]) -> None:
    if wanted.dtype.kind in "fiu":
        one, other = (np.asarray(column, "float64") for column in (found, wanted))
        same = np.isclose(one, other, rtol=TOLERANCE, atol=0.0, equal_nan=True)
    else:
        same = np.array([one == other for one, other in zip(found, wanted, strict=True)], bool)
    if not same.all():
        row = int(np.flatnonzero(~same)[0])
        raise WrongResultError(
            f"query {query.number}, {name}: {int((~same).sum())} of {len(same)} rows differ, the first is "
            f"{found.iloc[row]!r}, not {wanted.iloc[row]!r}"
        )


def computed(result: Any) -> Any:
    """Return the rows of a query, which may have computed them itself, as ``head`` does."""
    return result.compute() if is_dask_collection(result) else result


def collected(query: Query, result: Any) -> pd.DataFrame:
    """Convert a computed result to a pandas frame in the order of the query."""
    if query.scalar is not None:
        return pd.DataFrame({query.scalar: [float(result)]})
    frame: pd.DataFrame = result if isinstance(result, pd.DataFrame) else result.to_pandas()
    ascending = list(query.order.values())
    return frame.sort_values(list(query.order), ascending=ascending, ignore_index=True)


def numbers_of(text: str) -> list[int]:
    """Parse a list of queries: ``all``, or numbers and ranges such as ``1,3,7-9``."""
    if text == "all":
        return list(QUERIES)
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    if unknown := set(found) - set(QUERIES):
        raise ValueError(f"there are no queries {sorted(unknown)}")
    return found
