"""Write small tables of Parquet files whose files differ, as those of the days of a job.

Some have nulls, no rows, other categories, or keys that touch those of the next file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

WORDS = ["pear", "apple", "fig", "Élan", "", "nan"]
LEVELS = ["low", "mid", "high"]
#: The usual name of each kind of column.
NAMES = {"key": "order", "large": "account", "small": "qty", "word": "name", "flag": "paid", "when": "day"}
#: An odd one.
ODD = {"key": "a.id", "uid": 'u"id"', "large": "b.", "small": "it's", "ratio": "x.y.z", "word": ""}
ODD |= {"kind": "Größe", "level": ".c", "count": "x y", "flag": "ключ", "when": "when.utc"}


@dataclass(frozen=True)
class Table:
    """Hold the folder of a table, how it is read, and its rows in pandas."""

    path: Path
    options: Mapping[str, Any]
    rows: pd.DataFrame

    def read(self) -> Any:
        """Read the table with Dask."""
        return dd.read_parquet(self.path, **self.options)


def write_tables(seed: int, folder: Path) -> dict[str, Table]:
    """Write two large tables and two small ones."""
    rng = Random(f"tables {seed}")
    return {f"t{at}": _write(rng, folder / f"t{at}", is_large=at < 2) for at in range(4)}


def _write(rng: Random, path: Path, *, is_large: bool) -> Table:
    path.mkdir(parents=True)
    is_odd = rng.random() < 0.4
    kinds = ["key", "uid", *rng.sample([kind for kind in ODD if kind not in ("key", "uid")], 5)]
    names = [ODD[kind] if is_odd and rng.random() < 0.6 else NAMES.get(kind, kind) for kind in kinds]
    files = rng.choice([2, 3, 5] if is_large else [1, 2, 3])
    has_nulls = {kind: rng.random() < (0.1 if kind in ("large", "flag") else 0.5) for kind in kinds}
    facts = {"span": rng.choice([3, 6]), "apart": rng.random() < 0.5, "unit": rng.choice(["ns", "us", "ms"])}
    is_of_pandas = rng.random() < 0.4 or "level" in kinds
    facts["words"] = [WORDS if rng.random() < 0.5 else rng.sample(WORDS, 4) for _ in range(files)]
    parts = []
    for at in range(files):
        is_empty = rng.random() < 0.1 and "level" not in kinds  # Arrow drops that categories are ordered
        rows = 0 if is_empty else rng.randrange(20, 50) if is_large else rng.randrange(1, 9)
        made = [_column(rng, kind, rows, at, has_nulls[kind], facts) for kind in kinds]
        table = pa.Table.from_pandas(pd.DataFrame(dict(zip(names, made, strict=True))), preserve_index=False)
        # Others than pandas write no dtypes of pandas: integers with nulls are floats there.
        table = table if is_of_pandas else table.replace_schema_metadata()
        pq.write_table(table, path / f"part.{at}.parquet")
        parts.append(pd.read_parquet(path / f"part.{at}.parquet"))
    options = {"filesystem": "arrow"} if rng.random() < 0.5 else {}
    return Table(path, options, _put_together(parts))


def _column(rng: Random, kind: str, rows: int, at: int, has_nulls: bool, facts: Mapping[str, Any]) -> Any:
    if kind == "uid":
        return pd.Series(range(at * 100, at * 100 + rows), dtype="int64")
    if kind == "key":
        low = at * facts["span"] if facts["apart"] else 0
        return pd.Series([low + rng.randrange(facts["span"]) for _ in range(rows)], dtype="int64")
    values: Mapping[str, Callable[[], Any]] = {
        "large": lambda: 2**53 + rng.randrange(3),
        "small": lambda: rng.randrange(9),
        "ratio": lambda: rng.randrange(-40, 60) / 4,
        "word": lambda: rng.choice(WORDS),
        "kind": lambda: rng.choice(facts["words"][at]),
        "level": lambda: rng.choice(LEVELS),
        "count": lambda: rng.randrange(12),
        "flag": lambda: rng.random() < 0.5,
        "when": lambda: pd.Timestamp("2023-11-20") + pd.Timedelta(days=rng.randrange(0, 400, 7)),
    }
    drawn = [values[kind]() for _ in range(rows)]
    has_nulls = has_nulls and kind != "small"
    is_null = np.array([has_nulls and at % 2 == 1 and rng.random() < 0.25 for _ in range(rows)], dtype=bool)
    if kind in ("kind", "level"):
        categories = facts["words"][at] if kind == "kind" else LEVELS
        return pd.Series(pd.Categorical(drawn, categories, ordered=kind == "level")).mask(is_null)
    dtypes = {"small": "int8", "large": "int64", "ratio": "float64", "word": "str", "count": "Int64"}
    series = pd.Series(drawn, dtype=dtypes.get(kind, "boolean" if kind == "flag" else f"M8[{facts['unit']}]"))
    return series.astype("Int64").mask(is_null) if kind == "large" and is_null.any() else series.mask(is_null)


def _put_together(parts: list[pd.DataFrame]) -> pd.DataFrame:
    whole = pd.concat(parts)
    for name, column in parts[0].items():
        if isinstance(column.dtype, pd.CategoricalDtype) and not column.cat.ordered:
            categories = list(dict.fromkeys(each for part in parts for each in part[name].cat.categories))
            whole[name] = whole[name].astype(pd.CategoricalDtype(categories))
    return whole
