"""Fit the factors of ``dask gpurt qualify`` to queries of TPC-H that Dask and the runtime have run.

    python -m benchmarks.qualify.fit

Both files of results have a budget of each query with Dask's own shuffles. The factors are those of least
squares of the relative error, none below 0, drawn towards 0.5 with the weight of one query. Printed are, by
library, the factors, and for queries that were left out of the fit: the correlation of the logarithms of the
gain, the mean error, and between which times of the estimate four of five are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dask_gpurt.tools.qualify.parts import BEFORE, DISK, IDLE, OTHER, PARTS, WAITING, kind_of

RESULTS = Path(__file__).parents[1] / "results"
FILES = {"pandas": "tpch-2cpu-sf3.json", "cudf": "tpch-tasks-2xh200-sf100.json"}
THREADS = 2
FITTED = [part for part in PARTS if part != DISK]
PRIOR, WEIGHT = 0.5, 1.0


class Query(NamedTuple):
    """Hold the parts of a query with Dask, in seconds, and the times of its warm runs."""

    number: int
    parts: Mapping[str, float]
    dask: float
    runtime: float

    @property
    def shares(self) -> npt.NDArray[np.float64]:
        """Return the fitted parts relative to the time with the runtime."""
        seconds = np.array([self.parts[part] for part in FITTED])
        scale = self.dask / sum(self.parts.values()) / self.runtime
        return seconds * scale


def queries(file: str) -> Iterator[Query]:
    """Read the queries of a file, once for each of Dask's shuffles."""
    figures = json.loads((RESULTS / file).read_text())["figures"]
    ours = {each["query"]: each["warm"]["median"] for each in figures if each["contender"] == "gpurt"}
    for each in figures:
        if each["contender"] != "gpurt":
            yield Query(each["query"], parts_of(each["budget"]), each["warm"]["median"], ours[each["query"]])


def parts_of(budget: Mapping[str, Any]) -> dict[str, float]:
    """Divide the budget of a query as ``qualify`` divides a recording."""
    sums, phases = dict.fromkeys(PARTS, 0.0), budget["seconds"]
    for name, tasks in budget["tasks"].items():
        sums[OTHER if name == "(others)" else kind_of(name)] += tasks["seconds"]
    for action, seconds in budget["steps"].items():
        if action != "compute":
            sums[DISK if action.startswith("disk") else WAITING] += seconds
    room = THREADS * (phases["graph"] + phases["first_task"] + phases["computing"])
    busy = sum(sums.values())
    parts = {part: min(1.0, room / busy) * seconds / THREADS for part, seconds in sums.items()}
    return {**parts, IDLE: max(0.0, room - busy) / THREADS, BEFORE: sum(phases.values()) - room / THREADS}


def fit(found: Sequence[Query]) -> npt.NDArray[np.float64]:
    """Return the factor of each part."""
    prior = WEIGHT**0.5 * np.eye(len(FITTED))
    rows = np.vstack([[query.shares for query in found], prior])
    wanted = np.concatenate([np.ones(len(found)), PRIOR * prior.sum(axis=1)])
    free = list(range(len(FITTED)))
    while True:
        factors = np.zeros(len(FITTED))
        factors[free] = np.linalg.lstsq(rows[:, free], wanted, rcond=None)[0]
        if (factors >= 0).all():
            return factors
        free = [part for part in free if factors[part] > 0]


def left_out(found: Sequence[Query]) -> tuple[float, float, npt.NDArray[np.float64]]:
    """Judge estimates of each query by factors that were fitted to the others."""
    estimated, measured = [], []
    for query in found:
        factors = fit([other for other in found if other.number != query.number])
        measured.append(query.dask / query.runtime)
        estimated.append(measured[-1] / (query.shares @ factors))
    logs = np.log([estimated, measured])
    off = np.exp(logs[0] - logs[1])
    return float(np.corrcoef(logs)[0, 1]), float(np.abs(off - 1).mean()), np.quantile(off, [0.1, 0.9])


if __name__ == "__main__":
    for library, file in FILES.items():
        found = list(queries(file))
        print(library, {part: round(float(x), 2) for part, x in zip(FITTED, fit(found), strict=True)})
        correlation, error, (low, high) = left_out(found)
        print(f"  {len(found)} left out: {correlation=:.2f}, {error=:.0%}, {low:.2f} to {high:.2f}")
