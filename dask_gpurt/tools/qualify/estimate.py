"""Estimate what the runtime leaves of the time of a computation. Pure.

Each part of the time is multiplied by a factor, which was fitted to queries of TPC-H that both Dask and the
runtime had run; ``python -m benchmarks.qualify.fit`` prints the factors and their error. A sum of parts does
not know what a rule leaves out of a plan, so it is off by a fifth for a single program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dask_gpurt.tools.qualify.parts import BEFORE, IDLE, OTHER, WAITING

#: The share of each part that is left, by the library of the frames; what is not named stays as it is.
FACTORS: Mapping[str, Mapping[str, float]] = {
    "pandas": {
        **{"shuffles": 0.20, "joins": 0.51, "reads": 0.96, "groups": 0.79},
        **{OTHER: 0.59, WAITING: 0.06, IDLE: 0.15, BEFORE: 0.49},
    },
    "cudf": {
        **{"shuffles": 0.15, "joins": 0.46, "reads": 0.54, "groups": 0.68},
        **{OTHER: 0.45, WAITING: 0.05, IDLE: 0.18, BEFORE: 0.04},
    },
    # Arrays, bags and functions: only rechunks go through the runtime.
    "": {"shuffles": 0.50},
}
#: Between these times of the estimate are four of five queries that the factors were not fitted to.
RANGES = {"pandas": (0.79, 1.35), "cudf": (0.82, 1.45), "": (0.79, 1.35)}


class Estimate(NamedTuple):
    """Hold the estimated seconds with the runtime, and the range in which they are four times of five."""

    seconds: float
    low: float
    high: float


def estimate(parts: Mapping[str, float], library: str) -> Estimate:
    """Estimate the seconds with the runtime from those of each part without, and the library of frames."""
    factors, (low, high) = FACTORS[library], RANGES[library]
    left = sum(factors.get(part, 1.0) * seconds for part, seconds in parts.items())
    return Estimate(left, low * left, high * left)


def library_of(rows: Iterable[Mapping[str, Any]], parts: Mapping[str, float]) -> str:
    """Return the library of the frames that tasks return; empty if they return something else.

    Performance reports have no types: there, what reads or joins is taken for pandas.
    """
    types = {str(row["typename"]).partition(".")[0] for row in rows if row.get("typename")}
    if not types:
        return "pandas" if parts["reads"] + parts["joins"] else ""
    return next((library for library in ("cudf", "pandas") if library in types), "")
