"""Summarise overlapped compute and communication: figures, a table and a plot.

The share of the hideable time that was hidden is f = (S - T) / (S - max(C, M)), with C and M the times of
compute and communication alone, S their sum, and T the time of both together: 0 is one after the other, 1 is
the longer one alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

#: The setting without control.
OFF = "off"
#: Plot dimensions in pixels: a bar, the space between cells, and the margins.
BAR, BETWEEN, LEFT, RIGHT, TOP = 14, 26, 260, 900, 40
INK, FAINT = "#222222", "#dddddd"
COLOURS = ("#9aa0a6", "#3b6fd4", "#2aa7c9", "#22a06b", "#e2803a", "#8a63d2", "#c9475f")


@dataclass(frozen=True)
class Round:
    """Record one measurement of a cell: each alone, and both together under each setting, in seconds."""

    compute: float
    communication: float
    together: Mapping[str, float]

    def hidden(self, setting: str) -> float:
        """Return f: the share of the hideable time that was hidden."""
        both = self.compute + self.communication
        return (both - self.together[setting]) / (both - max(self.compute, self.communication))

    def saved(self, setting: str) -> float:
        """Return the share of the sequential time that was saved."""
        return 1 - self.together[setting] / (self.compute + self.communication)


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """Summarise a cell.

    Returns
    -------
    dict
        ``compute`` and ``communication`` alone in seconds, and for each of ``settings`` the time together,
        ``f`` and ``saved``; each as median, least and most over the rounds. ``best`` is the fastest setting,
        and ``against_off`` its time as a share of that without control, by medians; None without settings.
    """
    settings = list(rounds[0].together) if rounds else []
    summed = {
        setting: {
            "seconds": spread([one.together[setting] for one in rounds]),
            "f": spread([one.hidden(setting) for one in rounds]),
            "saved": spread([one.saved(setting) for one in rounds]),
        }
        for setting in settings
    }
    medians = {setting: of["seconds"]["median"] for setting, of in summed.items()}
    return {
        "compute": spread([one.compute for one in rounds]),
        "communication": spread([one.communication for one in rounds]),
        "settings": summed,
        **against(medians),
    }


def against(medians: Mapping[str, float]) -> dict[str, Any]:
    """Return the fastest setting, and its time relative to no control."""
    best = min(medians, key=lambda setting: medians[setting], default=None)
    ratio = medians[best] / medians[OFF] if best is not None and OFF in medians else None
    return {"best": best, "against_off": ratio}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, minimum and maximum of values."""
    if not values:
        return {}
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def print_cells(title: str, cells: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a line for each cell and setting.

    Parameters
    ----------
    title
        Title of the table.
    cells
        The cells' :func:`figures`.
    """
    caption = "saved: per cent of the time of one after the other, least..most"
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("beside each other", "alone, ms", "setting"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ms", "f", "saved", "of off"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, cell in cells.items():
        alone = [
            f"{cell[which]['median'] * 1e3:.0f}" for which in ("compute", "communication") if cell[which]
        ]
        for number, (setting, figure) in enumerate(cell["settings"].items()):
            heading = (name, " + ".join(alone)) if number == 0 else ("", "")
            table.add_row(*heading, setting, *_said(figure, cell["settings"].get(OFF)))
    console = Console(highlight=False, width=110)
    console.print(table)
    for line in _summary(cells):
        console.print(line)


def _said(figure: Mapping[str, Any], off: Mapping[str, Any] | None) -> tuple[str, ...]:
    saved, seconds = figure["saved"], figure["seconds"]["median"]
    ends = f"{saved['least'] * 100:.0f}..{saved['most'] * 100:.0f}"
    return (
        f"{seconds * 1e3:.1f}",
        f"{figure['f']['median']:.2f}",
        f"{saved['median']:.1%} ({ends})",
        f"{seconds / off['seconds']['median']:.3f}" if off else "",
    )


def _summary(cells: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the means over all cells, and how the best setting of each compares with no control."""
    for setting in dict.fromkeys(setting for cell in cells.values() for setting in cell["settings"]):
        of_all = [cell["settings"][setting] for cell in cells.values() if setting in cell["settings"]]
        hidden, saved = (statistics.mean(one[what]["median"] for one in of_all) for what in ("f", "saved"))
        yield f"{setting}, mean of {len(of_all)}: f {hidden:.2f}, {saved:.1%} saved"
    ratios = [cell["against_off"] for cell in cells.values() if cell["against_off"] is not None]
    if ratios:
        yield f"best setting of each cell / off: {statistics.geometric_mean(ratios):.3f} in the mean"


def plot(parts: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw f of each cell and setting as bars, with the spread of the rounds as a line.

    Parameters
    ----------
    parts
        The cells' :func:`figures`, by part.
    path
        A PNG file, which is overwritten.

    Raises
    ------
    ImportError
        Without the package pillow, which comes with bokeh.
    """
    from PIL import Image, ImageDraw

    cells = {f"{part}: {name}": cell for part, of in parts.items() for name, cell in of.items()}
    cells = {name: cell for name, cell in cells.items() if cell["settings"]}
    settings = list(dict.fromkeys(setting for cell in cells.values() for setting in cell["settings"]))
    colours = {setting: COLOURS[i % len(COLOURS)] for i, setting in enumerate(settings)}
    height = TOP + sum(BETWEEN + BAR * len(cell["settings"]) for cell in cells.values()) + BETWEEN
    image = Image.new("RGB", (RIGHT + 60, height), "white")
    draw = ImageDraw.Draw(image)
    for i, setting in enumerate(settings):
        draw.text((LEFT + 90 * i, 8), setting, fill=colours[setting])
    for part in range(6):
        draw.line((_across(part / 5), TOP - 10, _across(part / 5), height - BETWEEN), fill=FAINT)
        draw.text((_across(part / 5), height - BETWEEN + 4), f"f = {part / 5:g}", fill=INK, anchor="ma")
    top = TOP
    for name, cell in cells.items():
        draw.text((8, top), name, fill=INK)
        for setting, figure in cell["settings"].items():
            hidden = figure["f"]
            ends = sorted((_across(0), _across(hidden["median"])))
            draw.rectangle((ends[0], top, ends[1], top + BAR - 3), fill=colours[setting])
            middle = top + BAR // 2 - 1
            draw.line((_across(hidden["least"]), middle, _across(hidden["most"]), middle), fill=INK)
            top += BAR
        top += BETWEEN
    image.save(path, format="PNG")


def _across(share: float) -> float:
    return LEFT + (RIGHT - LEFT) * max(-0.1, min(1.05, share))
