"""A picture of a simulation: work, and bytes by class of link, over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.utils import format_bytes
from numpy.typing import NDArray

from dask_gpurt.simulate.simulation import Simulation
from dask_gpurt.topology import Link

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

Values = NDArray[Any]

#: The picture's size, a panel's height and the edges of the panels, in pixels.
WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 1200, 220, 110, 1180, 40, 50
#: Columns that time is divided into.
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


def busy(tasks: Sequence[tuple[float, float]], makespan: float) -> Values:
    """The mean number of tasks that ran, in each column of time."""
    width = makespan / COLUMNS
    starts, stops = (np.array([task[end] for task in tasks]) for end in (0, 1))
    edges = np.arange(COLUMNS + 1) * width
    # Seconds that tasks had run until an edge, without a loop over tasks and columns.
    until: Values = _integral(starts, edges) - _integral(stops, edges)
    means: Values = np.diff(until) / width
    return means


def _integral(begins: Values, edges: Values) -> Values:
    """The sum over ``begins`` of the time from each to each edge, where the edge is later."""
    ordered = np.sort(begins)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    count = np.searchsorted(ordered, edges)
    integral: Values = edges * count - sums[count]
    return integral


def arrivals(transfers: Sequence[tuple[float, Link, int]], makespan: float) -> dict[Link, Values]:
    """Bytes that had arrived over each class of link until the end of each column of time."""
    found = {}
    for link in Link:
        mine = [(when, nbytes) for when, other, nbytes in transfers if other is link]
        if mine:
            times, sizes = zip(*mine, strict=True)
            counted, _ = np.histogram(times, bins=COLUMNS, range=(0, makespan), weights=sizes)
            found[link] = np.cumsum(counted)
    return found


def plot(simulations: Sequence[Simulation], path: Path) -> None:
    """Draw simulations of one workload above each other, with time and amounts to the same scale.

    Parameters
    ----------
    simulations
        That are over.
    path
        A PNG file, which is overwritten.

    Raises
    ------
    ImportError
        Without the package pillow, which comes with bokeh.
    """
    from PIL import Image, ImageDraw

    makespan = max(one.result.makespan for one in simulations)
    work = [busy(one.trace.tasks, makespan) for one in simulations]
    moved = [arrivals(one.trace.transfers, makespan) for one in simulations]
    most_work = max(1.0, *(float(values.max()) for values in work))
    most_bytes = max([1.0, *(float(values[-1]) for links in moved for values in links.values())])
    height = TOP + 2 * len(simulations) * (PANEL + GAP)
    image = Image.new("RGB", (WIDTH, height), "white")
    draw = ImageDraw.Draw(image)
    for row, one in enumerate(simulations):
        top = TOP + 2 * row * (PANEL + GAP)
        title = f"{one.workload.name} on {one.cluster.name}, {one.name}: {one.result.makespan:.2f} s"
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
    """A line through values between 0 and 1."""
    across = LEFT + (RIGHT - LEFT) * (np.arange(COLUMNS) + 0.5) / COLUMNS
    points = [(float(x), top + PANEL * (1 - float(y))) for x, y in zip(across, heights, strict=True)]
    draw.line(points, fill=colour, width=2)
