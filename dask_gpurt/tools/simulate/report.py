"""Report finished simulations in figures, traces and plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.utils import format_bytes
from numpy.typing import NDArray

from dask_gpurt.tools.simulate.tiers import Tiers
from dask_gpurt.topology import Link

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

Values = NDArray[Any]

#: Width of the plot, height of a panel, and edges of panels, in pixels.
WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 1200, 220, 110, 1180, 40, 50
#: Number of columns into which time is divided.
COLUMNS = 300
INK, FAINT = "#222222", "#dddddd"
WORK = "#3b6fd4"
COLOURS = {
    Link.SAME_DEVICE: "#9aa0a6",
    Link.NVLINK: "#22a06b",
    Link.PCIE: "#8a63d2",
    Link.SHARED_MEMORY: "#2aa7c9",
    Link.LOOPBACK: "#b5a642",
    Link.RDMA: "#e2803a",
    Link.TCP: "#c9475f",
}


@dataclass
class Trace:
    """Record tasks and transfers.

    Attributes
    ----------
    tasks
        Start and end of each task, in virtual seconds.
    transfers
        End, link and bytes of each transfer.
    between_hosts
        Bytes moved between hosts.
    removed_tiers
        The tiers of workers that have left.
    """

    tasks: list[tuple[float, float]] = field(default_factory=list)
    transfers: list[tuple[float, Link, int]] = field(default_factory=list)
    between_hosts: int = 0
    removed_tiers: list[Tiers] = field(default_factory=list)

    def add_task(self, start: float, stop: float) -> None:
        """Record a finished task."""
        self.tasks.append((start, stop))

    def add_transfer(self, when: float, link: Link, nbytes: int, between_hosts: bool) -> None:
        """Record a completed transfer."""
        self.transfers.append((when, link, nbytes))
        if between_hosts:
            self.between_hosts += nbytes

    def add_removed(self, tiers: Tiers) -> None:
        """Record the tiers of a worker that has left."""
        self.removed_tiers.append(tiers)


@dataclass(frozen=True)
class Result:
    """Hold the figures of one simulation.

    Attributes
    ----------
    makespan
        Virtual seconds from the first submission until all results were in memory.
    bytes
        Bytes moved between workers, by class of link.
    between_hosts
        Bytes moved between hosts.
    spilled
        Bytes moved to a lower tier.
    worst_memory
        The largest peak of a live tier, relative to its capacity.
    over_memory
        Number of workers whose live tier ever exceeded its capacity.
    too_large
        Number of tasks whose inputs, result and workspace together exceed every live tier of the cluster.
    runs
        Number of finished tasks; more than ``tasks`` if data were lost.
    steals
        Number of work-stealing requests.
    decisions, decision_us
        Number of worker choices, and their mean CPU time in microseconds.
    scheduler_us
        CPU time of the scheduler for messages and stealing per task, in microseconds.
    fallbacks
        Number of placement decisions that were left to Dask because they raised.
    """

    workload: str
    cluster: str
    placement: str
    workers: int
    tasks: int
    makespan: float
    bytes: dict[str, int]
    between_hosts: int
    spilled: int
    worst_memory: float
    over_memory: int
    too_large: int
    runs: int
    steals: int
    decisions: int
    decision_us: float
    scheduler_us: float
    fallbacks: int

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON-serialisable values."""
        return asdict(self)


def busy(tasks: Sequence[tuple[float, float]], makespan: float) -> Values:
    """Return the mean number of running tasks in each of ``COLUMNS`` columns of time."""
    width = makespan / COLUMNS
    starts, stops = (np.array([task[end] for task in tasks]) for end in (0, 1))
    edges = np.arange(COLUMNS + 1) * width
    # Total task seconds until each edge, vectorised over tasks and columns.
    until: Values = _integral(starts, edges) - _integral(stops, edges)
    means: Values = np.diff(until) / width
    return means


def _integral(begins: Values, edges: Values) -> Values:
    """Return, for each edge, the total time since those ``begins`` that are before the edge."""
    ordered = np.sort(begins)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    count = np.searchsorted(ordered, edges)
    integral: Values = edges * count - sums[count]
    return integral


def arrivals(transfers: Sequence[tuple[float, Link, int]], makespan: float) -> dict[Link, Values]:
    """Return the cumulative bytes at the end of each column of time, by class of link."""
    found = {}
    for link in Link:
        mine = [(when, nbytes) for when, other, nbytes in transfers if other is link]
        if mine:
            times, sizes = zip(*mine, strict=True)
            counted, _ = np.histogram(times, bins=COLUMNS, range=(0, makespan), weights=sizes)
            found[link] = np.cumsum(counted)
    return found


def plot(runs: Sequence[tuple[Result, Trace]], path: Path) -> None:
    """Plot simulations of one workload above each other, on the same scales.

    Parameters
    ----------
    runs
        The figures and the trace of each simulation.
    path
        A PNG file, which is overwritten.

    Raises
    ------
    ImportError
        If the package pillow, a dependency of bokeh, is not installed.
    """
    from PIL import Image, ImageDraw

    makespan = max(result.makespan for result, _ in runs)
    work = [busy(trace.tasks, makespan) for _, trace in runs]
    moved = [arrivals(trace.transfers, makespan) for _, trace in runs]
    most_work = max(1.0, *(float(values.max()) for values in work))
    most_bytes = max([1.0, *(float(values[-1]) for links in moved for values in links.values())])
    height = TOP + 2 * len(runs) * (PANEL + GAP)
    image = Image.new("RGB", (WIDTH, height), "white")
    draw = ImageDraw.Draw(image)
    for row, (result, _) in enumerate(runs):
        top = TOP + 2 * row * (PANEL + GAP)
        title = f"{result.workload} on {result.cluster}, {result.placement}: {result.makespan:.2f} s"
        _frame(draw, top, f"{title}, tasks that run", f"{most_work:.0f}", makespan)
        _line(draw, top, work[row] / most_work, WORK)
        top += PANEL + GAP
        _frame(draw, top, "bytes that have arrived", format_bytes(int(most_bytes)), makespan)
        for number, (link, values) in enumerate(moved[row].items()):
            _line(draw, top, values / most_bytes, COLOURS[link])
            said = f"{link} {format_bytes(int(values[-1]))}"
            draw.text((LEFT + 10, top + 8 + 14 * number), said, fill=COLOURS[link])
    image.save(path, format="PNG")


def _frame(draw: ImageDraw, top: int, title: str, most: str, makespan: float) -> None:
    draw.rectangle((LEFT, top, RIGHT, top + PANEL), outline=FAINT)
    draw.text((LEFT, top - 16), title, fill=INK)
    draw.text((LEFT - 8, top), most, fill=INK, anchor="ra")
    draw.text((LEFT - 8, top + PANEL - 12), "0", fill=INK, anchor="ra")
    for part in range(5):
        x = LEFT + (RIGHT - LEFT) * part // 4
        draw.text((x, top + PANEL + 4), f"{makespan * part / 4:.4g} s", fill=INK, anchor="ma")


def _line(draw: ImageDraw, top: int, heights: Values, colour: str) -> None:
    """Draw a line through values between 0 and 1."""
    across = LEFT + (RIGHT - LEFT) * (np.arange(COLUMNS) + 0.5) / COLUMNS
    points = [(float(x), top + PANEL * (1 - float(y))) for x, y in zip(across, heights, strict=True)]
    draw.line(points, fill=colour, width=2)
