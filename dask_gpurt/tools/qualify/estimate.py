"""Estimate what the runtime leaves of the time of a computation. Pure.

Each part of the time is multiplied by a factor, which was fitted to queries of TPC-H that both Dask and the
runtime had run, for seconds each; ``python -m benchmarks.qualify.fit`` prints the factors and their error. In
short programs gaps and planning stay, so there are two estimates. Neither knows what rules leave out.
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
#: What stays in short programs, in which threads wait for latencies, and plans are new.
STAYS = (IDLE, BEFORE)


class Estimate(NamedTuple):
    """Hold the estimated seconds with the runtime: of long programs, and if gaps and planning stay."""

    seconds: float
    stays: float


def estimate(parts: Mapping[str, float], library: str) -> Estimate:
    """Estimate the seconds with the runtime from those of each part without, and the library of frames."""
    left = {part: FACTORS[library].get(part, 1.0) * seconds for part, seconds in parts.items()}
    stays = {part: parts[part] for part in STAYS}
    return Estimate(sum(left.values()), sum({**left, **stays}.values()))


def library_of(rows: Iterable[Mapping[str, Any]], parts: Mapping[str, float]) -> str:
    """Return the library of the frames that tasks return; empty if they return something else.

    Performance reports have no types: there, what reads or joins is taken for pandas.
    """
    types = {str(row["typename"]).partition(".")[0] for row in rows if row.get("typename")}
    if not types:
        return "pandas" if parts["reads"] + parts["joins"] else ""
    return next((library for library in ("cudf", "pandas") if library in types), "")
