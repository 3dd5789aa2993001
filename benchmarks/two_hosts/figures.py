"""Summarise pairs of measured and simulated runs: ratios with intervals, and a table of all cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, geometric_mean, median, stdev
from typing import Any, NamedTuple, Protocol

from rich.box import SIMPLE_HEAD
from rich.table import Table

#: Quantiles of Student's distribution for a 95% interval, from one degree of freedom on. More degrees use the
#: last, which errs on the wide side.
STUDENT = (
    12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23,
    2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09, 2.09,
)  # fmt: skip
#: Relative tolerance within which a simulated ratio counts as equal to the measured one.
TOLERANCE = 0.15
#: Ratios this close to 1 count as no difference.
NO_DIFFERENCE = 0.05


class Run(NamedTuple):
    """Record a timed run.

    Parameters
    ----------
    side
        "off" for Dask's choices, "on" for placement.
    turn
        Number of the pair; 0 is the first run of the workload on its cluster.
    seconds
        Wall time from the submission to the result.
    cpu
        CPU seconds of all processes of the cluster.
    between
        Bytes that all hosts sent to others.
    """

    side: str
    turn: int
    seconds: float
    cpu: float
    between: int


class Interval(NamedTuple):
    """A ratio, and the ends of its interval."""

    ratio: float
    low: float
    high: float


class Timed(Protocol):
    """Describe what ratios need of a run."""

    @property
    def side(self) -> str: ...

    @property
    def turn(self) -> int: ...

    @property
    def seconds(self) -> float: ...


def ratios(runs: Sequence[Timed]) -> list[float]:
    """Return the ratio of Dask's time to that with placement for each pair but the first."""
    seconds = {(run.side, run.turn): run.seconds for run in runs}
    turns = sorted({run.turn for run in runs} - {0})
    return [seconds["off", turn] / seconds["on", turn] for turn in turns]


def interval(found: Sequence[float]) -> Interval:
    """Return the geometric mean of at least two ratios, with a 95% interval from their logarithms."""
    logarithms = [math.log(each) for each in found]
    quantile = STUDENT[min(len(found) - 1, len(STUDENT)) - 1]
    spread = quantile * stdev(logarithms) / math.sqrt(len(found))
    mean = fmean(logarithms)
    return Interval(*map(math.exp, (mean, mean - spread, mean + spread)))


def cell(
    link: str, workload: str, runs: Sequence[Run], simulated: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """Return the figures of a link and a workload.

    Parameters
    ----------
    simulated
        Virtual seconds by side, of each recorded run.
    """
    warm = {side: [run for run in runs if run.side == side and run.turn] for side in ("off", "on")}
    measured = interval(ratios(runs))
    virtual = geometric_mean(each["off"] / each["on"] for each in simulated)
    return {
        "link": link,
        "workload": workload,
        "measured": measured._asdict(),
        "simulated": virtual,
        "sign": agrees(measured, virtual),
        "within": abs(math.log(virtual / measured.ratio)) <= math.log(1 + TOLERANCE),
        "seconds": {side: median(run.seconds for run in of) for side, of in warm.items()},
        "cpu": {side: median(run.cpu for run in of) for side, of in warm.items()},
        "between": {side: median(run.between for run in of) for side, of in warm.items()},
        "simulated_seconds": [dict(each) for each in simulated],
        "runs": [run._asdict() for run in runs],
    }


def agrees(measured: Interval, simulated: float) -> bool:
    """Return whether simulated and measured ratio agree: on the same side of 1, or within the interval."""
    if measured.low <= 1 <= measured.high or abs(measured.ratio - 1) < NO_DIFFERENCE:
        return measured.low <= simulated <= measured.high or abs(simulated - 1) < NO_DIFFERENCE
    return (simulated > 1) == (measured.ratio > 1)


def by_link(cells: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return geometric means over the workloads of each link, and the worst measured ratio."""
    found: dict[str, dict[str, float]] = {}
    for link in dict.fromkeys(each["link"] for each in cells):
        mine = [each for each in cells if each["link"] == link]
        found[link] = {
            "measured": geometric_mean(each["measured"]["ratio"] for each in mine),
            "simulated": geometric_mean(each["simulated"] for each in mine),
            "worst": min(each["measured"]["ratio"] for each in mine),
        }
    return found


def table(cells: Sequence[Mapping[str, Any]]) -> Table:
    """Format the cells as a table."""
    made = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="Medians of seconds, MB between hosts; Dask / placement: above 1 placement is faster",
    )
    for heading in ("link", "workload"):
        made.add_column(heading, no_wrap=True)
    for heading in (
        "Dask",
        "MB",
        "placed",
        "MB",
        "Dask / placed",
        "simulated",
        "sign",
        "within 15%",
    ):
        made.add_column(heading, justify="right", no_wrap=True)
    for each in cells:
        measured = Interval(**each["measured"])
        sides = (
            figure
            for side in ("off", "on")
            for figure in (f"{each['seconds'][side]:.2f}", f"{each['between'][side] / 1e6:.0f}")
        )
        made.add_row(
            each["link"],
            each["workload"],
            *sides,
            f"{measured.ratio:.2f} ({measured.low:.2f} to {measured.high:.2f})",
            f"{each['simulated']:.2f}",
            "same" if each["sign"] else "other",
            "yes" if each["within"] else "no",
        )
    return made
