"""Show how far a command is: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

#: Takes what the command does now, the number of steps that are done, and that of all steps if it is known.
Show = Callable[[str, int, int | None], None]


@contextmanager
def progress(*, width: int, quiet: bool) -> Iterator[Show]:
    """Show progress on standard error while the body runs.

    Parameters
    ----------
    width
        Characters for what the command does.
    quiet
        Whether to show nothing.

    Yields
    ------
    function
        Call it for each step.
    """
    console = Console(stderr=True)
    if quiet:
        yield lambda doing, done, total: None
    elif not console.is_terminal:
        yield _lines()
    else:
        columns = (TextColumn(f"{{task.description:<{width}}}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda doing, done, total: bar.update(task, description=doing, completed=done, total=total)


def _lines() -> Show:
    """Return a function that prints a line whenever the command does something else."""
    last = ""

    def show(doing: str, done: int, total: int | None) -> None:
        nonlocal last
        if doing != last:
            last = doing
            click.echo(f"{doing} ({done} of {total} done)" if total else doing, err=True)

    return show
