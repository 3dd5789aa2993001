"""Summarise runs: ratios to the yardstick and to the runtime with intervals, load, and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

#: Width of the table in characters, also in a file.
WIDTH = 150
#: Quantiles of Student's distribution for a 95% interval, from one degree of freedom on. More degrees use the
#: last, which errs on the wide side.
STUDENT = (
    12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23,
    2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09, 2.09,
)  # fmt: skip


class Interval(NamedTuple):
    """A ratio, and the ends of its interval."""

    ratio: float
    low: float
    high: float


def interval(found: Sequence[float]) -> Interval:
    """Return the geometric mean of at least two ratios, with a 95% interval from their logarithms."""
    logarithms = [math.log(each) for each in found]
    quantile = STUDENT[min(len(found) - 1, len(STUDENT)) - 1]
    spread = quantile * stdev(logarithms) / math.sqrt(len(found))
    mean = fmean(logarithms)
    return Interval(*map(math.exp, (mean, mean - spread, mean + spread)))


@dataclass(frozen=True)
class Run:
    """Record one timed run.

    Parameters
    ----------
    cell
        The cell; yardsticks are cells too.
    contender
        The contender.
    turn
        Number of the turn; 0, the first on its cluster, is a discarded warm-up.
    seconds
        Wall time from building the graph to the last output.
    rows, processor_seconds, peak_bytes
        For each worker, in the same order: rows of its outputs, CPU seconds, and peak resident memory,
        including shared memory that it has touched.
    device_bytes
        Peak memory of each worker's GPU; empty without GPUs.
    moved
        Outputs moved to other owners once their sizes were known.
    """

    cell: str
    contender: str
    turn: int
    seconds: float
    rows: Sequence[int]
    processor_seconds: Sequence[float]
    peak_bytes: Sequence[int]
    device_bytes: Sequence[int] = ()
    moved: int = 0


def figures(
    runs: Sequence[Run], yardsticks: Mapping[str, str], ours: str, limit: int
) -> list[dict[str, Any]]:
    """Return the figures of each cell and contender.

    Parameters
    ----------
    yardsticks
        The yardstick of each cell; yardsticks have none.
    ours
        The contender to compare with, if it took part.
    limit
        The memory limit of a worker, in bytes.
    """
    warm = [run for run in runs if run.turn]
    return [
        _figure(warm, cell, contender, yardsticks.get(cell), ours, limit)
        for cell, contender in dict.fromkeys((run.cell, run.contender) for run in warm)
    ]


def _figure(
    warm: Sequence[Run], cell: str, contender: str, yardstick: str | None, ours: str, limit: int
) -> dict[str, Any]:
    mine = _by_turn(warm, cell, contender)
    seconds = [run.seconds for run in mine.values()]
    found: dict[str, Any] = {
        "cell": cell,
        "contender": contender,
        "seconds": {"median": median(seconds), "min": min(seconds), "max": max(seconds)},
        "processor_seconds": median(sum(run.processor_seconds) for run in mine.values()),
        "busiest_rows": median(busiest(run.rows) for run in mine.values()),
        "busiest_processor": median(busiest(run.processor_seconds) for run in mine.values()),
        "outputs_moved": median(run.moved for run in mine.values()),
        "peak_of_limit": max(max(run.peak_bytes) for run in mine.values()) / limit,
    }
    if yardstick is not None:
        base = _by_turn(warm, yardstick, contender)
        found["yardstick"] = yardstick
        found["of_yardstick"] = _ratio(mine, base, lambda run: run.seconds)
        found["busiest_processor_seconds"] = _ratio(mine, base, lambda run: max(run.processor_seconds))
    if contender != ours and (theirs := _by_turn(warm, cell, ours)):
        found[f"times_{ours}"] = _ratio(mine, theirs, lambda run: run.seconds)
        found[f"processor_times_{ours}"] = _ratio(mine, theirs, lambda run: sum(run.processor_seconds))
    return found


def _by_turn(runs: Sequence[Run], cell: str, contender: str) -> dict[int, Run]:
    return {run.turn: run for run in runs if (run.cell, run.contender) == (cell, contender)}


def _ratio(
    runs: Mapping[int, Run], others: Mapping[int, Run], figure: Callable[[Run], float]
) -> dict[str, float]:
    """Return the interval of the ratios of a figure to that of ``others`` in the same turns."""
    return interval([figure(run) / figure(others[turn]) for turn, run in runs.items()])._asdict()


def busiest(loads: Sequence[float]) -> float:
    """Return the load of the busiest worker as a multiple of the mean; 1 without any load."""
    return max(loads) / fmean(loads) if any(loads) else 1.0


def table(found: Sequence[Mapping[str, Any]], ours: str) -> Table:
    """Format the figures as a table."""
    made = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="Medians of seconds and processor seconds; ratios with intervals of 95%; as multiples of "
        "the mean worker: the most rows and the most processor seconds; outputs moved; peak of memory as a "
        "share of its limit",
    )
    made.add_column("cell", no_wrap=True)
    made.add_column("contender", no_wrap=True)
    headings = (
        "seconds",
        "of even",
        f"times {ours}",
        "processor",
        "rows",
        "busiest",
        "moved",
        "memory",
    )
    for heading in headings:
        made.add_column(heading, justify="right", no_wrap=True)
    for each in found:
        made.add_row(
            each["cell"],
            each["contender"],
            f"{each['seconds']['median']:.2f}",
            _told(each.get("of_yardstick")),
            _told(each.get(f"times_{ours}")),
            f"{each['processor_seconds']:.2f}",
            f"{each['busiest_rows']:.2f}",
            f"{each['busiest_processor']:.2f}",
            f"{each['outputs_moved']:g}",
            f"{each['peak_of_limit']:.0%}",
        )
    return made


def _told(ratio: Mapping[str, float] | None) -> str:
    if ratio is None:
        return ""
    known = Interval(**ratio)
    return f"{known.ratio:.2f} ({known.low:.2f} to {known.high:.2f})"
