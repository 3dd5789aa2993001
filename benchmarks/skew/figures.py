"""Summarise runs: ratios to the yardstick and to the runtime with intervals, load, and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.two_hosts.figures import Interval, interval

#: Width of the table in characters, also in a file.
WIDTH = 150
#: Candidate shares of the worker with a slow link, from none to an equal share; the best is the ideal.
IDEAL_STEPS = 1000


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
    capacity
        Share of the processors that was left.
    rows, processor_seconds, peak_bytes
        For each worker, in the same order: rows of its outputs, CPU seconds, and peak resident memory,
        including shared memory that it has touched.
    device_bytes
        Peak memory of each worker's GPU; empty without GPUs.
    moved
        Outputs moved to other owners once their sizes were known.
    slow
        Index of the worker that was slow or had a slow link; None without.
    sent, received
        Bytes over the link of each worker; 0 on a single host.
    slow_rate
        Bytes per second of the slow link, in either direction; 0 without.
    threads, cores
        Threads of a worker, and processors of the machine.
    """

    cell: str
    contender: str
    turn: int
    seconds: float
    capacity: float
    rows: Sequence[int]
    processor_seconds: Sequence[float]
    peak_bytes: Sequence[int]
    device_bytes: Sequence[int] = ()
    moved: int = 0
    slow: int | None = None
    sent: Sequence[int] = ()
    received: Sequence[int] = ()
    slow_rate: int = 0
    threads: int = 1
    cores: int = 1


def capacity_left(workers: int, threads: int, stopped: float, cores: int) -> float:
    """Return the share of the processors that is left where one worker is stopped for a share of the time.

    Where workers share processors, the rest of the workers use the time of the stopped one.
    """
    return min(cores, threads * (workers - stopped)) / min(cores, threads * workers)


def ideal_with_slow_link(
    seconds: float, shuffled: float, rate: int, workers: int, threads: int, cores: int
) -> float:
    """Return the seconds of a run if the worker with a slow link had the ideal share of the work.

    A worker that makes a share ``s`` of the inputs and assembles the same share of the outputs sends
    ``s (1 - s)`` of the shuffled bytes and receives as much at the same time. The other workers do the rest::

        min over s up to 1/workers of max(s (1 - s) shuffled / rate, seconds * share of the processors at full
        speed * (1 - s) / share of the processors that the others have)

    Parameters
    ----------
    seconds
        Seconds of the run at full speed.
    shuffled
        Bytes of all inputs of the shuffles.
    rate
        Bytes per second of the slow link, in either direction.
    """
    slowdown = min(cores, threads * workers) / min(cores, threads * (workers - 1))
    shares = [step / (IDEAL_STEPS * workers) for step in range(IDEAL_STEPS + 1)]
    return min(
        max(share * (1 - share) * shuffled / rate, seconds * max(1.0, (1 - share) * slowdown))
        for share in shares
    )


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
        found["capacity"] = fmean(run.capacity for run in mine.values())
        ideal = {turn: _ideal(run, base[turn]) for turn, run in mine.items()}
        found["ideal_seconds"] = median(ideal.values())
        found["of_ideal"] = interval([run.seconds / ideal[turn] for turn, run in mine.items()])._asdict()
        found["busiest_processor_seconds"] = _ratio(mine, base, lambda run: max(run.processor_seconds))
    slow = [
        run.processor_seconds[run.slow] / fmean(run.processor_seconds)
        for run in mine.values()
        if run.slow is not None
    ]
    if slow:
        found["slow_processor"] = median(slow)
    if any(max(run.received, default=0) for run in mine.values()):
        where = {turn: run.slow or 0 for turn, run in mine.items()}
        found["link_sent"] = median(run.sent[where[turn]] for turn, run in mine.items())
        found["link_received"] = median(run.received[where[turn]] for turn, run in mine.items())
        found["shuffled"] = median(shuffled(run) for run in mine.values())
    if contender != ours and (theirs := _by_turn(warm, cell, ours)):
        found[f"times_{ours}"] = _ratio(mine, theirs, lambda run: run.seconds)
        found[f"processor_times_{ours}"] = _ratio(mine, theirs, lambda run: sum(run.processor_seconds))
    return found


def _ideal(run: Run, base: Run) -> float:
    """Return the seconds of a run if it used the remaining capacity as well as ``base`` used all of it."""
    if not run.slow_rate:
        return base.seconds / run.capacity
    return ideal_with_slow_link(
        base.seconds, shuffled(base), run.slow_rate, len(run.rows), run.threads, run.cores
    )


def shuffled(run: Run) -> float:
    """Return the shuffled bytes, derived from the bytes sent: one part in ``workers`` stays on its worker."""
    return sum(run.sent) / (1 - 1 / len(run.sent))


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
        "the mean worker: the most rows, the most processor seconds, and those of the slow one; outputs "
        "moved; peak of memory as a share of its limit",
    )
    made.add_column("cell", no_wrap=True)
    made.add_column("contender", no_wrap=True)
    headings = (
        "seconds",
        "of ideal",
        f"times {ours}",
        "processor",
        "rows",
        "busiest",
        "slow",
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
            _told(each.get("of_ideal")),
            _told(each.get(f"times_{ours}")),
            f"{each['processor_seconds']:.2f}",
            f"{each['busiest_rows']:.2f}",
            f"{each['busiest_processor']:.2f}",
            f"{each['slow_processor']:.2f}" if "slow_processor" in each else "",
            f"{each['outputs_moved']:g}",
            f"{each['peak_of_limit']:.0%}",
        )
    return made


def slow_link_lines(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe the ideal of cells with a slow link, its formula, and the bytes over that link."""
    lines = [
        f"{each['cell']}, {each['contender']}: ideal {each['ideal_seconds']:.2f} s; over the slow link "
        f"{each['link_sent'] / 1e6:.1f} MB sent, {each['link_received'] / 1e6:.1f} MB received"
        for each in found
        if "ideal_seconds" in each and "link_sent" in each
    ]
    formula = (
        "ideal: min over shares s of max(s (1 - s) shuffled bytes / slow rate, seconds at full speed "
        "(1 - s) processors of all / processors of the others)"
    )
    return [formula, *lines] if lines else []


def _told(ratio: Mapping[str, float] | None) -> str:
    if ratio is None:
        return ""
    known = Interval(**ratio)
    return f"{known.ratio:.2f} ({known.low:.2f} to {known.high:.2f})"
