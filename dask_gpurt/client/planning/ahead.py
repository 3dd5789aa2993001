"""Ask a library on a GPU about what programs do most often, before a program does it.

What an operation returns, the library is asked once for each dtype (:mod:`.catalogue`), by kernels: a tenth
to a quarter of the time that a first plan takes on cudf. A thread asks as soon as the runtime is on for a
client that has imported such a library, while the user's program goes on.

Decisions and their figures: ``docs/decisions/planning.md``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import dask
import pandas as pd
from dask.dataframe.backends import dataframe_creation_dispatch

from dask_gpurt.client.planning.catalogue.asking import stand_in
from dask_gpurt.client.planning.catalogue.schema import schema_of
from dask_gpurt.dask_hooks.planning import collection_of
from dask_gpurt.frames import first_uses

#: What a read of Parquet files has for its most frequent types, by the names of columns.
DTYPES = {
    "i": "int64", "j": "int64", "k": "int32", "f": "float64", "g": "float64", "s": "str", "r": "str",
    "t": "datetime64[us]", "n": "datetime64[ns]", "b": "bool",
}  # fmt: skip

COMPARISONS = (operator.gt, operator.ge, operator.lt, operator.le, operator.eq, operator.ne)

#: Converts an empty frame of pandas by the function of a library, as files are described.
Convert = Callable[[Any, Callable[[Any], Any]], Any]


def begin(convert: Convert, is_wanted: Callable[[], bool]) -> None:
    """Ask in a thread, once the libraries for GPUs that this process has imported have been used.

    ``convert``: see :data:`Convert`.
    ``is_wanted``: returns whether the thread that calls it plans for a client; if not, no more is asked.
    """

    def of(library: Any) -> Iterator[Callable[[], Any]]:
        first_uses.wait()
        yield from questions(convert(pd.DataFrame(columns=[*DTYPES]).astype(DTYPES), library.from_pandas))

    first_uses.in_threads("gpurt-ask-ahead", of, is_wanted)


def questions(frame: Any) -> Iterator[Callable[[], Any]]:
    """Yield steps of programs; making each asks about it.

    ``frame``: an empty frame with the columns of :data:`DTYPES`.
    """
    yield lambda: dataframe_creation_dispatch.dispatch(dask.config.get("dataframe.backend", None) or "pandas")
    schema = schema_of(frame)
    if schema is None:
        return
    others = schema._replace(labels=tuple(label.upper() for label in schema.labels))
    rows, other = collection_of(stand_in(schema)), collection_of(stand_in(others))
    alike = other.rename(columns={"I": "i"})
    values: list[tuple[str, Any]] = [("f", 1.5), ("i", 1), ("t", pd.Timestamp(2000, 1, 1)), ("f", 1)]
    yield from (partial(compare, rows[column], value) for column, value in values for compare in COMPARISONS)
    yield from (
        lambda: rows[(rows.f > 1.5) & (rows.f <= 1.5)].reset_index(drop=True),
        lambda: rows.merge(other, left_on="i", right_on="J"),
        lambda: rows.merge(alike, on="i"),
        lambda: (rows.s == "a") & (rows.r != "a") | rows.s.isin(["a"]) & ~rows.i.isin([1]),
        lambda: rows.assign(x=rows.f * (1 - rows.g), y=rows.i * 2 + rows.k, z=rows.f / rows.g, s=rows.r),
        lambda: rows.groupby("i").agg({"f": "sum", "j": "count", "g": "mean", "t": "max"}).reset_index(),
        lambda: rows.groupby("s").agg({"f": "sum", "j": "count", "g": "mean", "i": "sum"}).reset_index(),
        lambda: rows.groupby(["s", "r"]).agg({"f": "sum", "j": "count", "g": "mean"}).reset_index(),
        lambda: rows.groupby("i").f.sum().reset_index(),
        lambda: rows.groupby("s").size().reset_index(),
        lambda: rows.merge(other, left_on="i", right_on="J", how="left"),
        lambda: rows.merge(other, left_on=["i", "s"], right_on=["J", "R"]),
        lambda: rows.merge(alike, on="i", how="leftsemi"),
        lambda: rows.sort_values("f", ascending=False).head(5, compute=False).simplify().dtypes,
        lambda: rows.sort_values(["f", "t"]).head(5, compute=False).simplify().dtypes,
        lambda: rows.sort_values(["i", "s"]).head(5, compute=False).simplify().dtypes,
        lambda: rows.shuffle("i").optimize(fuse=False).dtypes,
        lambda: rows.assign(year=rows.t.dt.year, new=rows.n, small=rows.k),
        lambda: rows[(rows.f > rows.g) & ~rows.b][["f"]].drop_duplicates(),
        lambda: (rows.f.sum(), rows.i.max(), rows.f.mean(), rows.f + 1, rows.f * 2, rows.f + rows.g),
    )
