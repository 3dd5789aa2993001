"""Fit the factors of ``dask gpurt qualify`` to queries of TPC-H that Dask and the runtime have run.

    python -m benchmarks.qualify.fit --json benchmarks/results/qualify-tpch.json

Both files of results have a budget of each query with Dask's own shuffles. The factors are those of least
squares of the relative error, none below 0, drawn towards 0.5 with the weight of one query. Printed are, by
library, the factors, and for queries that were left out of the fit: the correlation of the logarithms of the
gain, the mean error, and between which times of the estimate four of five are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import numpy.typing as npt

from benchmarks.common.commandline import write
from dask_gpurt.tools.qualify.parts import BEFORE, DISK, IDLE, OTHER, PARTS, WAITING, kind_of

RESULTS = Path(__file__).parents[1] / "results"
FILES = {"pandas": "tpch-2cpu-sf3.json", "cudf": "tpch-tasks-2xh200-sf100.json"}
#: Measured on another day, with another scale and tree.
OTHERS = {"pandas": "tpch-partitions-2cpu-sf1.json"}
THREADS = 2
FITTED = [part for part in PARTS if part != DISK]
PRIOR, WEIGHT = 0.5, 1.0


class Judged(NamedTuple):
    """Compare how many times as fast a query is with the runtime, measured and estimated."""

    query: int
    method: str
    gain: float
    estimated_gain: float


class Query(NamedTuple):
    """Hold the parts of a query with one of Dask's shuffles, in seconds, and the times of its warm runs."""

    number: int
    method: str
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
        if each["contender"] in ("tasks", "p2p"):
            parts, dask = parts_of(each["budget"]), each["warm"]["median"]
            yield Query(each["query"], each["contender"], parts, dask, ours[each["query"]])


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


def left_out(found: Sequence[Query]) -> list[Judged]:
    """Estimate each query by factors that were fitted to the others."""
    return [judge(query, fit([other for other in found if other.number != query.number])) for query in found]


def judge(query: Query, factors: npt.NDArray[np.float64]) -> Judged:
    """Compare the gain of a query with the estimate by some factors."""
    gain = query.dask / query.runtime
    return Judged(query.number, query.method, gain, gain / float(query.shares @ factors))


def errors(found: Sequence[Judged]) -> dict[str, float]:
    """Return the correlation and the error of estimates, and between which of them four of five times are."""
    gains = np.array([each.gain for each in found])
    estimated = np.array([each.estimated_gain for each in found])
    low, high = np.quantile(estimated / gains, [0.1, 0.9])
    return {
        "correlation": float(np.corrcoef(np.log(gains), np.log(estimated))[0, 1]),
        "mean_error": float(np.abs(estimated / gains - 1).mean()),
        "low": float(low),
        "high": float(high),
    }


def report() -> Iterator[dict[str, Any]]:
    """Yield the factors of each library, and how well they estimate other queries."""
    for library, file in FILES.items():
        found = list(queries(file))
        factors = fit(found)
        rounded = {part: round(float(x), 2) for part, x in zip(FITTED, factors, strict=True)}
        others = OTHERS.get(library)
        for judging, judged in (
            (file, left_out(found)),
            (others, [judge(query, factors) for query in queries(others)] if others else []),
        ):
            if judged:
                of = {"fitted": file, "judged": judging, "factors": rounded, **errors(judged)}
                yield {"library": library, **of, "queries": [each._asdict() for each in judged]}


@click.command()
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write the table of all queries, too.")
def main(out: Path | None) -> None:
    """Fit the factors of ``dask gpurt qualify``, and judge them."""
    found = list(report())
    for each in found:
        click.echo({name: value for name, value in each.items() if name != "queries"})
    what = "estimates of `dask gpurt qualify` for TPC-H, queries left out of the fit (benchmarks.qualify.fit)"
    write({"what": what, "date": datetime.now(UTC).isoformat(), "figures": found}, out)


if __name__ == "__main__":
    main()
