"""Generate random programs of dask.dataframe, and record the metadata of all their expressions."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from dask.core import flatten
from hypothesis import strategies as st
from pyarrow.fs import LocalFileSystem

from dask_gpurt.client.planning import PlanningCache
from dask_gpurt.client.planning.rules import Facts, PartitionSizes
from dask_gpurt.client.planning.rules.partition_size import PartitionSize
from dask_gpurt.client.planning.store import Store
from dask_gpurt.observe import MethodChoice, Metrics
from dask_gpurt.observe.counting import Choices

#: Columns of :func:`tables`; every frame has all of them, in its own order.
COLUMNS = ("key", "small", "ratio", "name", "kind", "when", "count", "flag", "text")


class Planner:
    """Hold a planning cache that tests can switch on and off, and what it counts and tells."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        self.id = "client"
        self.usable = False
        self.kept: Store | None = None
        self.sizes: PartitionSizes | None = None
        self.choices: list[tuple[str, MethodChoice]] = []
        self.tell = Choices(lambda *choice: self.choices.append(choice))
        self.metrics = metrics or Metrics()
        self.cache = PlanningCache(lambda: self if self.usable else None, self.metrics, self.tell)

    def partition_sizes(self) -> PartitionSizes | None:
        """Return what the number of partitions of reads depends on, if a test has set it."""
        return self.sizes

    def store(self) -> Store | None:
        """Return the store that a test has set."""
        return self.kept

    def tell_plan(self, plan: Mapping[str, Any]) -> None:
        """Keep how the last plan came about."""
        self.told = plan

    def begin_again(self, path: Path) -> None:
        """Save what was planned, and go on as another process would, with nothing but the file."""
        if self.kept is not None:
            self.kept.save()
        self.cache.clear()
        self.kept = Store(path, self.metrics)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Use the cache inside the context."""
        self.usable = True
        try:
            yield
        finally:
            self.usable, self.kept = False, None

    def count(self, what: str) -> float:
        """Return the counter ``planning.<what>``."""
        return float(self.metrics.snapshot()["counters"].get(f"planning.{what}", 0))


def by_size(tuned: Any, facts: Facts) -> Any:
    """Return a tuned plan that the rule which goes by size has changed."""
    return PartitionSize().apply(tuned, facts)


def value_of(plan: Any) -> Any:
    """Compute a lowered plan that has one key."""
    (key,) = flatten(plan.__dask_keys__())
    return dask.get(plan.__dask_graph__(), key)


def tables(rows: int = 12) -> list[pd.DataFrame]:
    """Return frames of many dtypes, with indexes of several kinds."""
    number = np.arange(rows)
    frame = pd.DataFrame(
        {
            "key": number % 5,
            "small": (number % 3).astype("int8"),
            "ratio": number / 3,
            "name": pd.Series([f"n{i % 4}" for i in number]),
            "kind": pd.Categorical([["ant", "bee"][i % 2] for i in number], categories=["bee", "ant", "cat"]),
            "when": pd.Timestamp("2013-01-01") + pd.to_timedelta(number % 7, "D"),
            "count": pd.array([None if i % 4 == 0 else i for i in number], dtype="Int64"),
            "flag": number % 2 == 0,
            "text": pd.array([f"t{i % 3}" for i in number], dtype="string[pyarrow]"),
        }
    )
    other = frame[[*COLUMNS[::-1]]].assign(kind=frame.kind.cat.reorder_categories(["ant", "bee", "cat"]))
    other = other.astype({"key": "int32", "ratio": "float32"})
    return [
        frame,
        other.set_index(pd.Index(number * 10, name="number")),
        frame.set_index(pd.Index([f"i{i:03}" for i in number], name="label")),
        other.set_index(pd.date_range("2020-01-01", periods=rows, freq="D", name="day")),
    ]


def written(folder: Path, library: str) -> list[Callable[[], Any]]:
    """Write the tables, and return functions that read each of them: from files, and from memory.

    One way to name the files of a table differs from those of the others.
    """
    readers: list[Callable[[], Any]] = []
    ways: list[Callable[[str], dict[str, Any]]] = [
        lambda folder: {"path": folder},
        lambda folder: {"path": f"{folder}/*.parquet"},
        lambda folder: {"path": folder, "filesystem": "arrow"},
        lambda folder: {"path": folder, "filesystem": LocalFileSystem()},
    ]
    for number, table in enumerate(tables()):
        path = folder / f"table-{number}"
        # dask_cudf reads no file whose schema has a dictionary type.
        stored = table if library == "pandas" else table.astype({"kind": "string[pyarrow]"})
        dd.from_pandas(stored, npartitions=2).to_parquet(path)
        readers.append(_reader(library, **ways[number](str(path))))
        readers.append(_from_memory(table, library))
    return readers


def _reader(library: str, **arguments: Any) -> Callable[[], Any]:
    def read() -> Any:
        with dask.config.set({"dataframe.backend": library}):
            return dd.read_parquet(**arguments)

    return read


def _from_memory(table: pd.DataFrame, library: str) -> Callable[[], Any]:
    return lambda: dd.from_pandas(table, npartitions=2).to_backend(library)


# ---- programs -------------------------------------------------------------------------------------

#: One operation on a pool of frames: its name and its operands.
Step = tuple[str, int, int, Mapping[str, Any]]

_columns = st.sampled_from(COLUMNS)
_how = st.sampled_from(["inner", "left", "right", "outer", "leftsemi"])
_suffixes = st.sampled_from([("_x", "_y"), ("", "_right"), ("_left", "")])
_choices = st.fixed_dictionaries(
    {
        "columns": st.lists(_columns, min_size=1, max_size=4, unique=True),
        "column": _columns,
        "other": _columns,
        "how": _how,
        "suffixes": _suffixes,
        "sides": st.sampled_from(["on", "on-two", "left-right", "index", "left-index", "right-index"]),
        "indicator": st.booleans(),
        "function": st.sampled_from(["sum", "mean", "count", "min", "nunique", "size", "median"]),
        "drop": st.booleans(),
    }
)
_kinds = st.sampled_from(
    [
        "project",
        "series",
        "filter",
        "isin",
        "assign",
        "arithmetic",
        "rename",
        "merge",
        "merge",
        "merge",
        "group",
    ]
    + ["aggregate", "reset", "distinct", "cast", "concat"]
)
_steps = st.tuples(_kinds, st.integers(0, 7), st.integers(0, 7), _choices)
#: A program: its steps, each on the results of earlier steps.
programs = st.lists(_steps, min_size=1, max_size=7)


def run(readers: list[Callable[[], Any]], program: list[Step]) -> tuple[Any, list[str]]:
    """Build a program's last result, and return the errors of steps that were invalid.

    A frame is read on first use, since reading takes longer than most steps.
    """
    pool: list[Callable[[], Any]] = [functools.cache(read) for read in readers]
    errors = []
    for kind, first, second, chosen in program:
        # The latest result is the likeliest operand.
        left, right = pool[-1 - first % len(pool)](), pool[-1 - second % len(pool)]()
        try:
            result = _OPERATIONS[kind](left, right, chosen)
        except Exception as error:
            errors.append(f"{kind}: {type(error).__name__}")
        else:
            pool.append(functools.partial(_given, result))
    return pool[-1](), errors


def _given(result: Any) -> Any:
    return result


def _merge(left: Any, right: Any, chosen: Mapping[str, Any]) -> Any:
    on, other = chosen["column"], chosen["other"]
    keys = {
        "on": {"on": on},
        "on-two": {"on": [on, other]},
        "left-right": {"left_on": on, "right_on": other},
        "index": {"left_index": True, "right_index": True},
        "left-index": {"left_index": True, "right_on": other},
        "right-index": {"left_on": on, "right_index": True},
    }[chosen["sides"]]
    return left.merge(
        right, how=chosen["how"], suffixes=chosen["suffixes"], indicator=chosen["indicator"], **keys
    )


_OPERATIONS: Mapping[str, Callable[[Any, Any, Mapping[str, Any]], Any]] = {
    "project": lambda left, _, chosen: left[chosen["columns"]],
    "series": lambda left, _, chosen: left[chosen["column"]],
    "filter": lambda left, _, chosen: left[left[chosen["column"]] > left[chosen["other"]].min()],
    "isin": lambda left, _, chosen: left[left[chosen["column"]].isin([1, 2])],
    "assign": lambda left, _, chosen: left.assign(**{chosen["column"]: left[chosen["other"]]}),
    "arithmetic": lambda left, _, chosen: left.assign(new=left[chosen["column"]] * 2 + left[chosen["other"]]),
    "rename": lambda left, _, chosen: left.rename(columns={chosen["column"]: "renamed"}),
    "merge": _merge,
    "group": lambda left, _, chosen: getattr(
        left.groupby(chosen["column"], observed=chosen["drop"])[chosen["other"]], chosen["function"]
    )(),
    "aggregate": lambda left, _, chosen: left.groupby(chosen["columns"], observed=True).agg(
        {chosen["other"]: [chosen["function"], "max"]}
    ),
    "reset": lambda left, _, chosen: left.reset_index(drop=chosen["drop"]),
    "distinct": lambda left, _, chosen: left[chosen["columns"]].drop_duplicates(),
    "cast": lambda left, _, chosen: left.astype({chosen["column"]: "category"}),
    "concat": lambda left, right, chosen: dd.concat([left, right[chosen["columns"]]]),
}


# ---- metadata --------------------------------------------------------------------------------------


def planned(readers: list[Callable[[], Any]], program: list[Step]) -> dict[str, Any]:
    """Return a client's whole plan of a program: operations, metadata of each expression, keys, errors.

    Tokens are left out: where metadata are an operand, they depend on how the library holds an empty frame.
    """
    result, errors = run(readers, program)
    found = {"errors": errors, "built": _described(result.expr)}
    try:
        optimised = result.optimize(fuse=True)
    except Exception as error:
        return found | {"optimised": type(error).__name__}
    return found | {
        "optimised": _described(optimised.expr),
        "keys": sorted(_TOKEN.sub("", str(key)) for key in optimised.__dask_graph__()),
    }


def computed(readers: list[Callable[[], Any]], program: list[Step]) -> Any:
    """Return the result of a program as a pandas frame or series, or the error that it raised."""
    result, _ = run(readers, program)
    try:
        found = result.compute()
    except Exception as error:
        return type(error).__name__, str(error)
    return found.to_pandas() if hasattr(found, "to_pandas") else found


def _described(root: Any) -> list[Any]:
    distinct = {expr._name: expr for expr in root.walk()}
    return sorted(((_TOKEN.sub("", name), _metadata_of(expr)) for name, expr in distinct.items()), key=str)


_TOKEN = re.compile("[0-9a-f]{32}")


def _metadata_of(expr: Any) -> Any:
    try:
        frame = expr._meta
    except Exception as error:
        return type(error).__name__
    return described(frame)


def described(frame: Any) -> Any:
    """Describe an empty frame of pandas or cudf by everything that an operation on it may depend on."""
    kind = type(frame)
    if kind.__name__ == "DataFrame":
        columns = frame.columns
        return (
            kind,
            [(type(column), column) for column in columns],
            (type(columns), str(columns.dtype), list(columns.names)),
            [(list(level), _dtype(level.dtype)) for level in getattr(columns, "levels", ())],
            [_dtype(frame.iloc[:, at].dtype) for at in range(len(columns))],
            _index(frame.index),
            len(frame),
            dict(getattr(frame, "attrs", {})),
        )
    if kind.__name__ == "Series":
        return (kind, frame.name, _dtype(frame.dtype), _index(frame.index), len(frame))
    if hasattr(frame, "names"):
        return _index(frame)
    return (kind, str(frame))


def _index(index: Any) -> Any:
    if hasattr(index, "levels"):
        return (type(index), list(index.names), [_dtype(level.dtype) for level in index.levels])
    bounds = (index.start, index.stop, index.step) if type(index).__name__ == "RangeIndex" else ()
    return (type(index), index.name, _dtype(index.dtype), str(getattr(index, "freq", None)), bounds)


def _dtype(dtype: Any) -> Any:
    if hasattr(dtype, "categories"):
        categories = dtype.categories
        values = categories.to_pandas() if hasattr(categories, "to_pandas") else categories
        return (type(dtype), None if values is None else (list(values), str(values.dtype)), dtype.ordered)
    return (type(dtype), str(dtype), str(getattr(dtype, "na_value", "")), getattr(dtype, "storage", None))
