"""Share the options of the benchmarks of planning."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from .reference import numbers_of
from .styles import CAREFUL, STYLES
from .tables import default_parts, prepare

ALL = "all"

_OPTIONS = (
    click.option("--scale", type=float, default=1.0, show_default=True),
    click.option(
        "--parts", type=click.IntRange(min=1), help="Files of a large table. [default: 8 for scale 1]"
    ),
    click.option("--data", type=click.Path(path_type=Path), help="Folder of the tables; made if missing."),
    click.option(
        "--queries", default="all", show_default=True, callback=lambda _, __, text: numbers_of(text)
    ),
    click.option("--backend", type=click.Choice(["pandas", "cudf"]), default="pandas", show_default=True),
    click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results."),
)

#: Gives a command ``styles``, a list.
style_option = click.option(
    "--style",
    "styles",
    type=click.Choice([*STYLES, ALL]),
    default=CAREFUL,
    show_default=True,
    callback=lambda _, __, style: list(STYLES) if style == ALL else [style],
    help="How the queries are written.",
)


def planning_options(main: Callable[..., None]) -> Callable[..., None]:
    """Add options to a command, which gets ``tables``, ``queries``, ``backend`` and ``output``.

    The tables are made if they are missing.
    """

    @functools.wraps(main)
    def with_tables(*, scale: float, parts: int | None, data: Path | None, **options: Any) -> None:
        parts = parts or default_parts(scale)
        folder = data or Path(tempfile.gettempdir()) / "tpch" / f"scale-{scale:g}-{parts}"
        main(tables=prepare(folder, scale, parts), **options)

    return functools.reduce(lambda command, option: option(command), reversed(_OPTIONS), with_tables)
