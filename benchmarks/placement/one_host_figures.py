"""Summarise the runs of placement among the workers of one host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.two_hosts.clusters import SIDES
from benchmarks.two_hosts.figures import Interval, interval, ratios

#: Fewest warm turns for an interval.
MIN_WARM_TURNS = 2


class Run(NamedTuple):
    """Record a timed run.

    Parameters
    ----------
    side
        "off" for Dask's choices, "on" for placement.
    turn
        Number of the pair; 0 is the first one on its clusters, which does not count.
    seconds
        Wall time from building the graph to the result.
    moved, spilled
        Bytes moved to other workers, and to lower memory tiers.
    decisions
        Decisions of placement.
    first_share
        Share of all bytes that the first worker held before the run.
    first_free
        Share of its device tier that was free then.
    """

    side: str
    turn: int
    seconds: float
    moved: int
    spilled: int
    decisions: int
    first_share: float
    first_free: float


def paired(runs: Sequence[Run]) -> list[Run]:
    """Return the runs of the turns that both sides have ended."""
    ended = [{run.turn for run in runs if run.side == side} for side in SIDES]
    return [run for run in runs if run.turn in set.intersection(*ended)]


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the figures of the warm turns that both sides have ended; none if there are too few."""
    both = paired(runs)
    warm = {side: [run for run in both if run.side == side and run.turn] for side in SIDES}
    if len(warm[SIDES[0]]) < MIN_WARM_TURNS:
        return {}
    return {
        "ratio": interval(ratios(both))._asdict(),
        "turns": len(warm[SIDES[0]]),
        **{side: _side(mine) for side, mine in warm.items()},
    }


def _side(runs: Sequence[Run]) -> dict[str, Any]:
    seconds = [run.seconds for run in runs]
    return {
        "seconds": median(seconds),
        "interval": interval(seconds)[1:],
        **{
            name: median(getattr(run, name) for run in runs)
            for name in ("moved", "spilled", "decisions", "first_share", "first_free")
        },
    }


def table(cells: Mapping[str, Mapping[str, Any]]) -> Table:
    """Format the figures of all cells as a table."""
    made = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="Medians of seconds with intervals of 95%; MiB moved between workers and spilled, without "
        "placement and with; off / on: above 1 placement is faster",
    )
    made.add_column("cell", no_wrap=True)
    for heading in ("off", "on", "off / on", "moved", "spilled", "decisions"):
        made.add_column(heading, justify="right", no_wrap=True)
    for name, each in cells.items():
        made.add_row(name, *_row(each))
    return made


def _row(cell: Mapping[str, Any]) -> list[str]:
    found = cell.get("figures")
    if not found:
        return [str(cell.get("error") or "too few turns")]
    ratio = Interval(**found["ratio"])
    return [
        *(_told(found[side]["seconds"], *found[side]["interval"]) for side in SIDES),
        _told(*ratio),
        *(", ".join(f"{found[side][name] / 2**20:.0f}" for side in SIDES) for name in ("moved", "spilled")),
        f"{found['on']['decisions']:.0f}",
    ]


def _told(middle: float, low: float, high: float) -> str:
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"
