"""Report finished simulations in figures, traces and plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from dask.utils import format_bytes
from numpy.typing import NDArray

from dask_gpurt.tools.simulate.tiers import Tiers
from dask_gpurt.topology import Link

Values = NDArray[Any]

#: Number of points of a line, and height of a panel in pixels.
POINTS, HEIGHT = 500, 240
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


def running(tasks: Sequence[tuple[float, float]], times: Values) -> Values:
    """Return the number of tasks that run at each time."""
    starts, stops = (np.sort([task[end] for task in tasks]) for end in (0, 1))
    count: Values = np.searchsorted(starts, times, "right") - np.searchsorted(stops, times, "right")
    return count


def arrived(transfers: Sequence[tuple[float, Link, int]], times: Values) -> dict[Link, Values]:
    """Return the bytes that have arrived at each time, by class of link."""
    found = {}
    for link in Link:
        mine = sorted((when, nbytes) for when, other, nbytes in transfers if other is link)
        if mine:
            whens, sizes = zip(*mine, strict=True)
            found[link] = np.cumsum([0, *sizes])[np.searchsorted(whens, times, "right")]
    return found


def plot(runs: Sequence[tuple[Result, Trace]], path: Path) -> None:
    """Plot simulations of one workload above each other, on the same scales.

    Parameters
    ----------
    runs
        The figures and the trace of each simulation.
    path
        An HTML file, which is overwritten.

    Raises
    ------
    ImportError
        If the package bokeh is not installed.
    """
    from bokeh.io import save
    from bokeh.layouts import column
    from bokeh.models import DataRange1d
    from bokeh.plotting import figure
    from bokeh.resources import INLINE

    times = np.linspace(0, max(result.makespan for result, _ in runs), POINTS)
    across, tasks, nbytes = DataRange1d(), DataRange1d(start=0), DataRange1d(start=0)
    panels = []
    for result, trace in runs:
        title = f"{result.workload} on {result.cluster}, {result.placement}: {result.makespan:.2f} s"
        work = figure(title=f"{title}, tasks that run", x_range=across, y_range=tasks, height=HEIGHT)
        work.line(times, running(trace.tasks, times), line_width=2)
        moved = figure(title="bytes that have arrived", x_range=across, y_range=nbytes, height=HEIGHT)
        for link, values in arrived(trace.transfers, times).items():
            label = f"{link} {format_bytes(int(values[-1]))}"
            moved.line(times, values, color=COLOURS[link], line_width=2, legend_label=label)
        panels += [work, moved]
    save(column(*panels, sizing_mode="stretch_width"), path, resources=INLINE, title=runs[0][0].workload)
