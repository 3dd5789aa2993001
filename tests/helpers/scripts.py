"""Draw scripts of dask.dataframe as people write them.

Each statement is drawn by what pandas gave for those before it, so that scripts are mostly valid and pandas'
answer is known. Parts between «» are for Dask only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

# ---- tables of files that differ, as those of the days of a job ------------------------------------
#
# Some have nulls, no rows, other categories, or keys that touch those of the next file.

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


MOST_ROWS, MOST_COLUMNS = 1_500, 20
NUMBERS, NAMED = "iuf", "iufObM"

# ---- scripts -------------------------------------------------------------------------------------------


@dataclass
class Script:
    """Hold the statements of a script, the name of its result, and pandas' answer."""

    statements: list[str] = field(default_factory=list)
    result: str = ""
    is_sorted: bool = False
    keeps_unmatched: bool = False
    expected: Any = None

    def run(self, tables: Mapping[str, Any]) -> Any:
        """Build the result from tables of Dask."""
        names = {"dd": dd, "pd": pd, "Timestamp": pd.Timestamp, "concat": dd.concat, **tables}
        for statement in self.statements:
            exec(re.sub("[«»]", "", statement), names)
        return names[self.result]


class Writer:
    """Draw one script."""

    def __init__(self, seed: str, tables: Mapping[str, Table]):
        self.rng = Random(seed)
        self.script = Script()
        self.names: dict[str, Any] = {"pd": pd, "Timestamp": pd.Timestamp, "concat": pd.concat}
        self.names |= {name: table.rows for name, table in tables.items()}
        self.tables = list(tables)
        self.made: list[str] = []

    def write(self, steps: int) -> Script:
        """Return a script of some steps, each of several statements."""
        kinds = [self.choose, self.join, self.join, self.group, self.group, self.assign, self.select]
        kinds += [self.drop_duplicates, self.take_first, self.place, self.join_groups, self.without_match]
        last = [self.group, self.join_groups, self.join, self.choose]
        while steps:
            try:
                self.rng.choice(last if steps == 1 else kinds)()
                steps -= 1
            except (LookupError, TypeError, ValueError, AttributeError, NotImplementedError):
                continue  # pandas refuses it, or there is no such column
        self.script.result = self.made[-1]
        self.script.expected = self.names[self.made[-1]]
        return self.script

    # ---- what statements are made of ----

    def frame(self) -> str:
        if self.made and self.rng.random() < 0.8:
            return self.made[-1]
        return self.rng.choice(self.tables)

    def column(self, name: str, kinds: str = NAMED) -> Any:
        frame = self.names[name]
        return self.rng.choice([column for column in frame if _letter(frame[column]) in kinds])

    def value(self, name: str, column: Any) -> str:
        found = self.rng.choice(list(self.names[name][column].dropna()))
        return repr(found.item() if isinstance(found, np.generic) else found)

    def condition(self, name: str) -> str:
        column = self.column(name)
        of = f"{name}[{column!r}]"
        ways = [f"{of}.notnull()", f"{of}.isin([{self.value(name, column)}, {self.value(name, column)}])"]
        kind = _letter(self.names[name][column])
        if kind in "iufM":
            ways += [f"{of} {sign} {self.value(name, column)}" for sign in (">", "<", "==", "!=")]
        if kind in "iuf":
            ways += [f"{of} > {of}.mean()", f"{of} % 2 == 1", f"{of} == {of}.max()"]
        if kind == "O":
            ways += [f"{of} == {self.value(name, column)}", f"{of}.isnull()"]
        return self.rng.choice(ways)

    def expression(self, name: str) -> str:
        first, second = (f"{name}[{self.column(name, NUMBERS)!r}]" for _ in range(2))
        ways = [f"{first} {sign} {second}" for sign in "+-*"] + [f"{first} {sign} 3" for sign in ("//", "%")]
        ways += [f"{first}.where({self.condition(name)})", f"{first}.mask({self.condition(name)}, 0)"]
        ways += [f"{first}.fillna(0)", f"{first}.clip(0, 5)", f"{first}.astype('float64')"]
        return self.rng.choice([*ways, f"{first}.isnull()", f"{first}.apply(abs«, meta={first}._meta»)"])

    def run(self, source: str, name: str | None = None) -> str:
        """Add a statement that makes a frame, unless pandas refuses it or the frame is too large."""
        made = name or f"df{len(self.script.statements)}"
        found = eval(re.sub("«.*?»", "", source), self.names)
        if len(found) > MOST_ROWS or not 0 < len(found.columns) <= MOST_COLUMNS:
            raise LookupError
        self.names[made] = found
        self.script.statements.append(f"{made} = {source}")
        self.made.append(made)
        self.script.is_sorted = False
        return made

    # ---- steps ----

    def choose(self) -> None:
        name = self.frame()
        self.run(f"{name}[{self.condition(name)}]")

    def select(self) -> None:
        name = self.frame()
        columns = list(self.names[name])
        kept = self.rng.sample(columns, self.rng.randrange(1, len(columns) + 1))
        new = self.rng.choice(["renamed", "a.b", "id", 'q"', columns[0]])
        self.run(self.rng.choice([f"{name}[{kept!r}]", f"{name}.rename(columns={{{kept[0]!r}: {new!r}}})"]))

    def assign(self) -> None:
        name = self.frame()
        for new in self.rng.sample(["new", "v2", "tot.al"], self.rng.choice([1, 2])):
            name = self.run(f"{name}.assign(**{{{new!r}: {self.expression(name)}}})")

    def join(self) -> None:
        left, right = self.frame(), self.rng.choice([*self.tables, self.frame()])
        how = self.rng.choice(["inner", "inner", "inner", "left", "outer"])
        kinds = self.rng.choice(["i", "i", "iufObM"])
        one = self.column(left, kinds)
        other = self.column(right, _letter(self.names[left][one]))
        self.script.keeps_unmatched |= how != "inner"
        suffixes = self.rng.choice(["", ", suffixes=('', '_right')"])
        self.run(f"{left}.merge({right}, left_on={one!r}, right_on={other!r}, how={how!r}{suffixes})")

    def without_match(self) -> None:
        left, right = self.frame(), self.rng.choice(self.tables)
        on, other = self.column(left, "i"), self.column(right, "i")
        keys = f"{right}.assign(hit=1)[[{other!r}, 'hit']].drop_duplicates()"
        joined = self.run(f"{left}.merge({keys}, left_on={on!r}, right_on={other!r}, how='left')")
        self.script.keeps_unmatched = True
        self.run(f"{joined}[{joined}['hit'].isnull()]")

    def group(self) -> str:
        name = self.frame()
        frame = self.names[name]
        by = self.rng.sample([self.column(name, "i"), self.column(name)], self.rng.choice([1, 1, 2]))
        value, function = self.column(name, NUMBERS), self.rng.choice(["sum", "mean", "min", "nunique"])
        if value in by or (by[0] == by[-1] and len(by) > 1):
            raise LookupError
        is_category = any(isinstance(frame[key].dtype, pd.CategoricalDtype) for key in by)
        options = self.rng.choice([", observed=True", ", observed=False"]) * is_category
        grouped = f"{name}.groupby({by!r}{options})"
        sums = [f"[[{value!r}]].sum()", f"[{value!r}].{function}().to_frame('n')", ".size().to_frame('n')"]
        sums += [f".agg({{{value!r}: {function!r}}})", f"[[{value!r}]].sum().assign(size={grouped}.size())"]
        made = self.run(grouped + self.rng.choice(sums))
        made = self.run(f"{made}.reset_index()")
        if self.rng.random() < 0.5:
            made = self.run(f"{made}[{self.condition(made)}]")
        return made

    def join_groups(self) -> None:
        """Join some groups by their key, as of orders with several suppliers."""
        made, other = self.group(), self.rng.choice(self.tables)
        key, on = self.names[made].columns[0], self.column(other, "i")
        if self.rng.random() < 0.5:
            self.run(f"{other}.merge({made}, left_on={on!r}, right_on={key!r})")
        else:
            self.run(f"{other}.merge({made}.set_index({key!r}), left_on={on!r}, right_index=True)")

    def drop_duplicates(self) -> None:
        name = self.frame()
        columns = list(dict.fromkeys(self.column(name) for _ in range(2)))
        self.run(f"{name}[{columns!r}].drop_duplicates({self.rng.choice(['', '«split_out=True»'])})")

    def take_first(self) -> None:
        name = self.frame()
        column = self.column(name, "iufM")
        if not self.names[name][column].is_unique:
            raise LookupError
        descending = self.rng.choice(["", ", ascending=False"])
        head = self.rng.choice(["", ".head(5«, npartitions=-1, compute=False»)"])
        self.run(f"{name}.sort_values({column!r}{descending}){head}")
        self.script.is_sorted = True

    def place(self) -> None:
        name = self.frame()
        other = self.rng.choice([f"concat([{name}, {name}])", f"{name}«.repartition(npartitions=2)»"])
        # Dask loses partitions of a persisted read by Arrow's file system without an operation on each row.
        self.run(self.rng.choice([f"{name}.assign(kept=1)«.persist()»", other]))


def _letter(series: Any) -> str:
    """Return the kind of a column: i, u, f, b, M as of numpy; O of strings and categories."""
    kind = getattr(series.dtype, "kind", "O")
    found = series.dropna()
    if kind == "O" and not isinstance(series.dtype, pd.CategoricalDtype):
        return "O" if all(isinstance(value, str) for value in found) else "?"
    return "i" if kind == "i" else str(kind)


# ---- results -------------------------------------------------------------------------------------------


def computed(script: Script, tables: Mapping[str, Any]) -> Any:
    """Return the result of a script, or the type of the error that it raises."""
    try:
        return dask.compute(script.run(tables))[0]
    except Exception as error:
        return type(error)


def are_equal(one: Any, other: Any, script: Script, *, dtypes: bool = True) -> bool:
    """Return whether two results are equal, in any order of rows unless they are sorted."""
    if isinstance(one, type) or isinstance(other, type):
        return one is other
    if list(one.columns) != list(other.columns) or len(one) != len(other):
        return False
    if dtypes and len(one) and not script.keeps_unmatched and _dtypes(one) != _dtypes(other):
        return False
    first, second = _rows(one), _rows(other)
    return first == second if script.is_sorted else sorted(first) == sorted(second)


def _dtypes(frame: pd.DataFrame) -> list[Any]:
    return [
        sorted(map(str, dtype.categories)) if isinstance(dtype, pd.CategoricalDtype) else dtype
        for dtype in frame.dtypes
    ]


def _rows(frame: pd.DataFrame) -> list[tuple[str, ...]]:
    columns = [list(map(_plain, frame.iloc[:, at].astype(object))) for at in range(len(frame.columns))]
    return list(zip(*columns, strict=True))


def _plain(value: Any) -> str:
    if pd.isna(value):
        return "null"
    if isinstance(value, (bool, int, np.bool_, np.integer)):
        return str(int(value))
    if isinstance(value, (float, np.floating, Decimal)):
        return str(int(value)) if value == int(value) else f"{value:.8g}"
    return str(value)
