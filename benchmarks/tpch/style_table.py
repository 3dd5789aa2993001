"""Print the results of ``gpu_styles.sh`` as one short table, and write it as JSON.

    python -m benchmarks.tpch.style_table tpch-results

Of each part, contender and style: the sums of the first and of the warm runs over the queries that ran, and
the geometric means of how many times as long they take as cudf-polars, as the careful style, and as the
runtime that the client has switched on, each over the queries that both ran.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..common.commandline import write
from .contenders import CUDF_POLARS, FLAG, GPURT
from .figures import TABLE_WIDTH, rounded
from .styles import CAREFUL

PARTS = ("polars", "warm", "first", "flag")
FIRST, WARM = "first", "warm"
#: Seconds of queries, by part, contender, style, and whether runs are first ones.
Seconds = Mapping[tuple[str, str, str, str], Mapping[int, float]]


def seconds_in(folder: Path) -> tuple[Seconds, list[str]]:
    """Return the seconds of all parts that have run, and the first line of each error."""
    found: dict[tuple[str, str, str, str], dict[int, float]] = {}
    errors = []
    for part in PARTS:
        file = folder / f"{part}.json"
        for figure in json.loads(file.read_text())["figures"] if file.exists() else ():
            of, query = (part, figure["contender"], figure["style"]), figure["query"]
            errors += [f"{part}, {of[1]}, {of[2]} Q{query}: {error[:150]}" for error in figure["errors"]]
            if figure["first"] and not figure["errors"]:
                found.setdefault((*of, FIRST), {})[query] = statistics.median(figure["first"])
            if "warm" in figure:
                found.setdefault((*of, WARM), {})[query] = figure["warm"]["median"]
    return found, errors


def rows_of(found: Seconds) -> list[dict[str, Any]]:
    """Return a row for each part, contender and style."""
    return [
        {
            "part": part,
            "contender": contender,
            "style": style,
            "runs": kind,
            "queries": len(mine),
            "seconds": sum(mine.values()),
            "of_polars": _times(mine, found.get(("polars", CUDF_POLARS, CAREFUL, kind))),
            "of_careful": _times(mine, found.get((part, contender, CAREFUL, kind))),
            "of_client": _times(mine, found.get((part, GPURT, style, kind))) if contender == FLAG else None,
        }
        for (part, contender, style, kind), mine in found.items()
    ]


def _times(mine: Mapping[int, float], theirs: Mapping[int, float] | None) -> float | None:
    both = [mine[query] / theirs[query] for query in mine if query in theirs] if theirs else []
    return statistics.geometric_mean(both) if both else None


@click.command(help=__doc__.partition("\n")[0])
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    found, errors = seconds_in(folder)
    rows = rows_of(found)
    write({"rows": rounded(rows), "errors": errors}, folder / "styles.json")
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in (
        "part",
        "contender",
        "style",
        "runs",
        "queries",
        "seconds",
        "x polars",
        "x careful",
        "x client",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*("" if value is None else _shown(value) for value in row.values()))
    Console(width=TABLE_WIDTH).print(table)
    for error in errors:
        click.echo(error)


def _shown(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
