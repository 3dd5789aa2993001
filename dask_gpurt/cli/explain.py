"""Run ``dask gpurt explain``: run a program, and explain each of its computations."""

from __future__ import annotations

import runpy
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import click

#: Said if there is nothing to explain.
NOTHING = (
    "the runtime has planned no computation of dataframes: it plans those of a client of a cluster, where it "
    "is on, as with DASK_GPURT__ENABLED=true"
)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def explain(script: Path, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT with ARGUMENTS, and explain each computation of dataframes that it makes.

    The script runs as it is, with the runtime switched on as it or the configuration says. What is printed
    at the end goes to standard error: the plan of each computation, where its time went, and what would help
    most. A program that fails is explained as far as it came.
    """
    from dask_gpurt.client.explain.watching import watched

    with watched() as found:
        try:
            failed = run_script(str(script), arguments)
        finally:
            explained = found.explanations(time.time())
            if not explained:
                click.echo(NOTHING, err=True)
            for number, each in enumerate(explained, 1):
                click.echo(f"\n--- computation {number} of {len(explained)}\n{each!r}", err=True)
    sys.exit(failed)


def run_script(script: str, arguments: Sequence[str]) -> int:
    """Run a script as ``__main__``, and return its exit code; print an error from the script's lines on."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent.resolve()))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != script:
            trace = trace.tb_next
        traceback.print_exception(error.with_traceback(trace))
        return 1
    return 0
